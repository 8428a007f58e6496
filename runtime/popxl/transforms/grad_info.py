"""What each input and output of a gradient graph stands for."""

from collections.abc import Iterable
from enum import Enum
from typing import Any

from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.ops.call import CallSiteInfo
from popxl.tensor import Tensor


class ExpectedConnectionType(Enum):
    """Fwd: the value of a forward tensor. FwdGrad: its gradient."""

    Fwd = "Fwd"
    FwdGrad = "FwdGrad"


class ExpectedConnection:
    """What an input or output of a gradient graph stands for. Equal by kind and tensor. TypeError
    on construction.
    """

    _fwd_tensor: Tensor
    _connection_type: ExpectedConnectionType

    def __init__(self) -> None:
        raise TypeError(
            "ExpectedConnection: got a constructor call; expected the connections of a "
            "GradGraphInfo."
        )

    @classmethod
    def make(
        cls, connection_type: ExpectedConnectionType, fwd_tensor: Tensor
    ) -> "ExpectedConnection":
        """A connection of this kind, for transforms."""
        self = cls.__new__(cls)
        self._connection_type, self._fwd_tensor = connection_type, fwd_tensor
        return self

    @classmethod
    def of_value(cls, fwd_tensor: Tensor) -> "ExpectedConnection":
        """The value of a forward tensor, for transforms."""
        return cls.make(ExpectedConnectionType.Fwd, fwd_tensor)

    @classmethod
    def of_gradient(cls, fwd_tensor: Tensor) -> "ExpectedConnection":
        """The gradient of a forward tensor, for transforms."""
        return cls.make(ExpectedConnectionType.FwdGrad, fwd_tensor)

    @property
    def fwd_tensor(self) -> Tensor:
        """The forward graph's tensor."""
        return self._fwd_tensor

    @property
    def connection_type(self) -> ExpectedConnectionType:
        """Whether its value or its gradient."""
        return self._connection_type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpectedConnection) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[ExpectedConnectionType, Tensor]:
        return self._connection_type, self._fwd_tensor

    def __repr__(self) -> str:
        return f"{self._connection_type.value}(%{self._fwd_tensor.name})"


class GradGraphInfo:
    """A gradient graph, the forward graph it belongs to, and what its inputs and outputs stand for.

    TypeError on construction; transforms that make gradient graphs by hand use
    ``GradGraphInfo.make``.
    """

    _graph: Graph
    _forward_graph: Graph
    _expected_inputs: tuple[ExpectedConnection, ...]
    _expected_outputs: tuple[ExpectedConnection, ...]

    def __init__(self) -> None:
        raise TypeError(
            "GradGraphInfo: got a constructor call; expected the result of "
            "popxl.transforms.autodiff."
        )

    @classmethod
    def make(
        cls,
        graph: Graph,
        forward_graph: Graph,
        expected_inputs: Iterable[ExpectedConnection],
        expected_outputs: Iterable[ExpectedConnection],
    ) -> "GradGraphInfo":
        """Connections belong to the graph's first inputs and outputs, in order; it may have more of
        both.
        """
        self = cls.__new__(cls)
        self._graph, self._forward_graph = graph, forward_graph
        self._expected_inputs, self._expected_outputs = (
            tuple(expected_inputs),
            tuple(expected_outputs),
        )
        for what, connections, tensors in (
            ("inputs", self._expected_inputs, graph.inputs),
            ("outputs", self._expected_outputs, graph.outputs),
        ):
            if len(connections) > len(tensors):
                raise GraphError(
                    f"GradGraphInfo: got {len(connections)} expected {what} for graph "
                    f"'{graph.name}'; expected at most its {len(tensors)}."
                )
        return self

    @property
    def graph(self) -> Graph:
        """The gradient graph."""
        return self._graph

    @property
    def forward_graph(self) -> Graph:
        """The graph it is the gradient of."""
        return self._forward_graph

    @property
    def expected_inputs(self) -> tuple[ExpectedConnection, ...]:
        """One per input of the gradient graph: gradients provided, then forward values."""
        return self._expected_inputs

    @property
    def expected_outputs(self) -> tuple[ExpectedConnection, ...]:
        """One per output of the gradient graph: gradients required."""
        return self._expected_outputs

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The forward tensor of each expected input."""
        return tuple(c.fwd_tensor for c in self._expected_inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The forward tensor of each expected output."""
        return tuple(c.fwd_tensor for c in self._expected_outputs)

    def inputs_dict(self, fwd_call_info: CallSiteInfo) -> dict[Tensor, Tensor]:
        """{input of the gradient graph: the caller's tensor} for every forward value, at one call
        of the forward graph.

        Raises:
            TypeError: the call is of another graph.
        """
        self._check_call(fwd_call_info, self._forward_graph, "inputs_dict")
        return {
            t: fwd_call_info.graph_to_parent(c.fwd_tensor)
            for t, c in zip(self._graph.inputs, self._expected_inputs)
            if c.connection_type is ExpectedConnectionType.Fwd
        }

    def fwd_graph_ins_to_grad_parent_outs(
        self, grad_call_info: CallSiteInfo
    ) -> dict[Tensor, Tensor]:
        """{forward graph's tensor: its gradient in the caller} at one call of the gradient
        graph.
        """
        self._check_call(grad_call_info, self._graph, "fwd_graph_ins_to_grad_parent_outs")
        return dict(zip(self.outputs, grad_call_info.outputs))

    def fwd_parent_ins_to_grad_parent_outs(
        self, fwd_call_info: CallSiteInfo, grad_call_info: CallSiteInfo
    ) -> dict[Tensor, Tensor]:
        """{caller's input of the forward call: its gradient in the caller}.

        Raises:
            GraphError: the forward call was given one tensor twice: its gradient is the sum of two
                outputs.
        """
        self._check_call(fwd_call_info, self._forward_graph, "fwd_parent_ins_to_grad_parent_outs")
        result: dict[Tensor, Tensor] = {}
        given = dict(zip(self._forward_graph.inputs, fwd_call_info.inputs))
        for inner, gradient in self.fwd_graph_ins_to_grad_parent_outs(grad_call_info).items():
            outer = given[inner] if inner in given else fwd_call_info.graph_to_parent(inner)
            if outer in result:
                raise GraphError(
                    f"fwd_parent_ins_to_grad_parent_outs: got %{outer.name} for two inputs of "
                    f"graph '{self._forward_graph.name}'; expected each tensor once. Use "
                    "fwd_graph_ins_to_grad_parent_outs and add the two gradients."
                )
            result[outer] = gradient
        return result

    def _check_call(self, call_info: Any, graph: Graph, where: str) -> None:
        if not isinstance(call_info, CallSiteInfo) or call_info.called_graph is not graph:
            called = getattr(call_info, "called_graph", None)
            got = (
                f"a call of '{called.name}'"
                if isinstance(called, Graph)
                else type(call_info).__name__
            )
            raise TypeError(
                f"{where}: got {got}; expected the CallSiteInfo of a call of '{graph.name}'."
            )

    def __repr__(self) -> str:
        inputs, outputs = list(self._expected_inputs), list(self._expected_outputs)
        return (
            f"GradGraphInfo[graph='{self._graph.name}', expected_inputs={inputs}, "
            f"expected_outputs={outputs}]"
        )

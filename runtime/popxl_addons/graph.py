"""Graphs whose variables have names, and graphs with some inputs already connected."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, cast

import popxl
from popxl import Tensor, ops
from popxl.ops.call import CallSiteInfo, flattened
from popxl.sharing import set_sharing, sharing_of
from popxl.transforms.autodiff import GradGraphInfo
from popxl.transforms.storage import Summaries

from popxl_addons.grad_tensors import _Aux
from popxl_addons.named_tensors import NamedTensors, TensorMap

CalledGraphsGradInfo = Mapping[popxl.Graph, GradGraphInfo]
Input = Tensor | list[Tensor] | int | float


class BoundGraph:
    """A graph, and some of its inputs connected: ``args`` is {graph's tensor: caller's tensor}."""

    def __init__(self, graph: popxl.Graph, args: TensorMap | None = None) -> None:
        self.graph = graph
        self.args: dict[Tensor, Tensor] = dict(args or {})

    def call(self, *targs: Input, args: TensorMap | None = None) -> tuple[Tensor, ...]:
        """Call with the other inputs in order; ``args`` adds to and overrides the connections."""
        return self.call_with_info(*targs, args=args).outputs

    def call_with_info(self, *targs: Input, args: TensorMap | None = None) -> CallSiteInfo:
        """The same as `call`; returns the CallSiteInfo."""
        connected = {**self.args, **(args or {})}
        free = [t for t in self.graph.inputs if t not in connected]
        given = flattened(targs, free)
        if len(given) > len(free):
            raise ValueError(
                f"call: got {len(given)} inputs for graph '{self.graph.name}', of whose "
                f"{len(self.graph.inputs)} {len(free)} are not connected; expected at most as many."
            )
        return ops.call_with_info(self.graph, inputs_dict={**connected, **dict(zip(free, given))})

    def bind(self, args: TensorMap) -> "BoundGraph":
        """The same graph with more connections."""
        return BoundGraph(self.graph, {**self.args, **args})

    def subgraph_io_map(
        self,
        *targs: Tensor,
        args: TensorMap | None = None,
        outs: Iterable[Tensor] | None = None,
    ) -> dict[Tensor, Tensor]:
        """``{graph's tensor: caller's tensor}`` of the inputs, and of the outputs when the caller's
        are given.
        """
        connected = {**self.args, **(args or {})}
        free = [t for t in self.graph.inputs if t not in connected]
        connected.update(zip(free, targs))
        connected.update(zip(self.graph.outputs, outs or ()))
        return connected


class WithOwnGradient(Protocol):
    """A module, as far as a graph that was made from it needs it."""

    @property
    def implements_grad_graph(self) -> bool:
        """See `popxl_addons.Module.implements_grad_graph`."""

    def create_grad_graph(
        self,
        fwd_graph: "GraphWithNamedArgs",
        grads_provided: Iterable[Tensor] | None = None,
        grads_required: Iterable[Tensor] | None = None,
    ) -> "GraphWithNamedArgs":
        """See `popxl_addons.Module.create_grad_graph`."""


class GraphWithNamedArgs:
    """A graph and the named tensors among its inputs, its variables in most cases.

    For the gradient of another graph it also holds the `GradGraphInfo` that says what each input
    and output stands for.
    """

    def __init__(
        self,
        graph: popxl.Graph,
        args: NamedTensors | None = None,
        grad_graph_info: GradGraphInfo | None = None,
        from_module: "WithOwnGradient | None" = None,
        aux: _Aux | None = None,
        called_graphs_grad_info: Mapping[Any, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.args = args if args is not None else NamedTensors()
        self._grad_graph_info = grad_graph_info
        self._from_module = from_module
        self._aux = aux
        self.called_graphs_grad_info = as_grad_infos(called_graphs_grad_info)
        self.autodiff_applied = False

    @classmethod
    def from_grad_graph(
        cls, grad_graph_info: GradGraphInfo, args: NamedTensors | None = None
    ) -> "GraphWithNamedArgs":
        """The gradient graph of a GradGraphInfo."""
        return cls(grad_graph_info.graph, args, grad_graph_info)

    def bind(self, args: NamedTensors | None = None) -> BoundGraph:
        """Connect inputs by name. Names that only one side has are ignored; an input left open
        fails at the call.
        """
        return BoundGraph(self.graph, self.args.to_mapping(args) if args is not None else {})

    def call(self, *targs: Input, args: TensorMap | None = None) -> tuple[Tensor, ...]:
        """Call with inputs in order; ``args`` connects others, {graph's tensor: caller's
        tensor}.
        """
        return self.bind().call(*targs, args=args)

    def call_with_info(self, *targs: Input, args: TensorMap | None = None) -> CallSiteInfo:
        """The same as `call`; returns the CallSiteInfo."""
        return self.bind().call_with_info(*targs, args=args)

    def autodiff(
        self,
        grads_provided: Iterable[Tensor] | None = None,
        grads_required: Iterable[Tensor] | None = None,
        called_graphs_grad_info: Mapping[Any, Any] | None = None,
        method: Literal["auto", "build_grad", "autodiff"] = "auto",
        force: bool = False,
    ) -> "GraphWithNamedArgs":
        """The gradient graph; what it needs of this graph is appended to this graph's outputs.

        Args:
            method: "build_grad" is the module's own gradient, "autodiff" the derived one; "auto"
                prefers the first.
            called_graphs_grad_info: gradients, made before, of graphs that this one calls.
        Raises:
            ValueError: another method.
            Exception: this graph was differentiated before, and not ``force``.
        """
        if method not in ("auto", "build_grad", "autodiff"):
            raise ValueError(
                f"autodiff: got method {method!r}; expected 'auto', 'build_grad' or 'autodiff'."
            )
        if self.autodiff_applied and not force:
            raise Exception(
                f"autodiff: got graph '{self.graph.name}', which was differentiated before; "
                "expected a new graph. Pass force=True to do it again."
            )
        module = self._from_module
        by_hand = module if module is not None and module.implements_grad_graph else None
        if method == "build_grad" and by_hand is None:
            raise ValueError(
                f"autodiff: got method 'build_grad' for graph '{self.graph.name}'; expected a "
                "module with build_grad."
            )
        if by_hand is not None and method != "autodiff":
            result = by_hand.create_grad_graph(self, grads_provided, grads_required)
        else:
            known = {**self.called_graphs_grad_info, **as_grad_infos(called_graphs_grad_info)}
            info = popxl.transforms.autodiff(
                self.graph, grads_provided, grads_required, called_graphs_grad_info=known
            )
            result = GraphWithNamedArgs.from_grad_graph(cast(GradGraphInfo, info))
        self.autodiff_applied = True
        return result

    @property
    def grad_graph_info(self) -> GradGraphInfo:
        """What the inputs and outputs stand for. AttributeError if this is not a gradient graph."""
        if self._grad_graph_info is None:
            raise AttributeError(
                f"grad_graph_info: got graph '{self.graph.name}'; expected the result of an "
                "autodiff."
            )
        return self._grad_graph_info

    @grad_graph_info.setter
    def grad_graph_info(self, value: GradGraphInfo) -> None:
        self._grad_graph_info = value

    def copy(self) -> "GraphWithNamedArgs":
        """The same graph with a copy of the names."""
        new = GraphWithNamedArgs(
            self.graph,
            self.args.copy(),
            self._grad_graph_info,
            self._from_module,
            self._aux,
            self.called_graphs_grad_info,
        )
        new.autodiff_applied = self.autodiff_applied
        return new

    def print_schedule(self) -> str:
        """A text: the inputs, the ops in order, the outputs."""
        names = {t: name for name, t in self.args.to_dict().items()}
        lines = [f"Graph: {self.graph.name}"]
        lines += [
            f"  input  %{t.name}: {t.spec}" + (f" ({names[t]})" if t in names else "")
            for t in self.graph.inputs
        ]
        lines += [f"  {op}" for op in self.graph.ops]
        lines += [f"  output %{t.name}: {t.spec}" for t in self.graph.outputs]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"GraphWithNamedArgs({self.graph!r}, args={self.args.keys_flat()})"


def as_grad_infos(infos: Mapping[Any, Any] | None) -> dict[popxl.Graph, GradGraphInfo]:
    """``{graph: GradGraphInfo}`` from a mapping in which either may be a GraphWithNamedArgs."""
    return {
        key.graph if isinstance(key, GraphWithNamedArgs) else key: (
            value.grad_graph_info if isinstance(value, GraphWithNamedArgs) else value
        )
        for key, value in (infos or {}).items()
    }


def input_like(graph: popxl.Graph, t: Tensor) -> Tensor:
    """A new input of the current graph like an input of another graph: by reference where that one
    is.
    """
    by_ref = t in graph._by_ref_inputs
    made = popxl.graph_input(t.shape, t.dtype, t.name, by_ref, t.meta_shape or None)
    set_sharing(made, sharing_of(t))
    return made


def changed_results(graph: popxl.Graph) -> set[Tensor]:
    """Inputs that a graph takes by value, changes in place and gives back: only the result of a
    call has the change.
    """
    kept = set(graph.outputs) - graph._by_ref_inputs
    return kept.intersection(graph.inputs, Summaries().modified_storage(graph))

"""Running one of two graphs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from popxl import dtypes
from popxl.context import get_current_graph
from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.opdef import Op, emit, op
from popxl.ops.call import CallSiteInfo, _check_callable, match_inputs, output_names
from popxl.ops.utils import check_in_graph
from popxl.tensor import Tensor, TensorSpec


@op(
    name="conditional",
    effects=("control",),
    names=lambda then_branch, **_: output_names(then_branch),
)
def _conditional(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: tuple[Any, ...],
    else_inputs: tuple[Any, ...],
) -> tuple[TensorSpec, ...]:
    """Run then_branch where cond is true, else_branch otherwise."""
    return tuple(t.spec for t in then_branch.outputs)


class ConditionalSiteInfo(CallSiteInfo):
    """Links a conditional with its two graphs. Parent inputs: the condition, then's inputs, else's
    inputs.
    """

    def __init__(self, subgraph_op: Op) -> None:
        super().__init__(subgraph_op)

    @property
    def called_graph(self) -> tuple[Graph, Graph]:  # type: ignore[override]
        """(then graph, else graph)."""
        return self._op.arguments["then_branch"], self._op.arguments["else_branch"]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The condition, then's inputs, else's inputs."""
        a = self._op.arguments
        return (a["cond"], *a["then_inputs"], *a["else_inputs"])

    def _sizes(self) -> tuple[int, int]:
        return len(self._op.arguments["then_inputs"]), len(self._op.arguments["else_inputs"])

    def is_parent_index_in_then_branch(self, idx: int) -> bool:
        """Whether the parent's input belongs to the then branch. IndexError if it belongs to
        neither.
        """
        then, other = self._sizes()
        if not 1 <= idx <= then + other:
            raise IndexError(
                f"conditional site: got input index {idx}; expected 1 <= index <= {then + other}."
            )
        return idx <= then

    def graph_to_parent_input_index(self, idx: int, then_branch: bool = True) -> int:
        """Parent's index of an input of a branch. IndexError if invalid."""
        then, other = self._sizes()
        if not 0 <= idx < (then if then_branch else other):
            raise IndexError(
                f"conditional site: got branch input {idx}; expected less than "
                f"{then if then_branch else other}."
            )
        return 1 + idx if then_branch else 1 + then + idx

    def parent_to_graph_input_index(self, idx: int) -> int:
        """Branch's index of a parent's input. IndexError if invalid."""
        in_then = self.is_parent_index_in_then_branch(idx)
        return idx - 1 if in_then else idx - 1 - self._sizes()[0]

    def graph_to_parent_output_index(self, idx: int, then_branch: bool = True) -> int:
        """Parent's index of an output: the same for both branches. IndexError if invalid."""
        return self.parent_to_graph_output_index(idx, then_branch)

    def parent_to_graph_output_index(self, idx: int, then_branch: bool = True) -> int:
        """Branch's index of an output: the same in both. IndexError if invalid."""
        if not 0 <= idx < len(self.outputs):
            raise IndexError(
                f"conditional site: got output index {idx}; expected less than {len(self.outputs)}."
            )
        return idx

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        a = self._op.arguments
        return [
            pair
            for graph, inputs in (
                (a["then_branch"], a["then_inputs"]),
                (a["else_branch"], a["else_inputs"]),
            )
            for pair in (*zip(graph.inputs, inputs), *zip(graph.outputs, self.outputs))
        ]

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """The caller's tensor for an input or output of either graph. ValueError otherwise."""
        for inner, outer in self._pairs():
            if inner is graph_tensor:
                return outer
        raise ValueError(
            f"graph_to_parent: got %{graph_tensor.name}; expected an input or output of one "
            "of the branches."
        )

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """The branch input that a caller's tensor feeds. ValueError if it feeds none."""
        for inner, outer in self._pairs():
            if outer is parent_tensor and outer not in self.outputs:
                return inner
        raise ValueError(
            f"parent_to_graph: got %{parent_tensor.name}; expected an input of one of the branches."
        )

    def set_parent_input_modified(
        self, parent_tensor: Tensor, infer_modified_regions: bool = True
    ) -> None:
        """By-reference inputs of conditionals do not exist. NotImplementedError."""
        raise NotImplementedError(
            "conditional: got an input to be written; expected none: branches take no input by "
            "reference. Return the new value instead."
        )


Inputs = Iterable[Tensor | Iterable[Tensor]] | None


def conditional_with_info(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Inputs = None,
    else_inputs: Inputs = None,
    then_inputs_dict: Mapping[Tensor, Tensor] | None = None,
    else_inputs_dict: Mapping[Tensor, Tensor] | None = None,
    check_inputs: bool = True,
) -> ConditionalSiteInfo:
    """The same as `conditional`, returning the `ConditionalSiteInfo`.

    Shapes and errors: as for `conditional`; ``check_inputs=False`` permits missing inputs.
    """
    _check_callable("conditional", then_branch)
    _check_callable("conditional", else_branch)
    if then_branch._by_ref_inputs or else_branch._by_ref_inputs:
        raise NotImplementedError(
            "conditional: got a branch with by-reference inputs; expected none. Return the "
            "new value instead."
        )
    _check_branches(cond, then_branch, else_branch)
    arguments = {
        "cond": cond,
        "then_branch": then_branch,
        "else_branch": else_branch,
        "then_inputs": match_inputs(
            "conditional", then_branch, _seq(then_inputs), then_inputs_dict, check_inputs
        ),
        "else_inputs": match_inputs(
            "conditional", else_branch, _seq(else_inputs), else_inputs_dict, check_inputs
        ),
    }
    return ConditionalSiteInfo(emit(_conditional.definition, arguments))


def _seq(inputs: Inputs) -> Sequence[Any]:
    return () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else list(inputs)


def _check_branches(cond: Tensor, then_branch: Graph, else_branch: Graph) -> None:
    check_in_graph(get_current_graph(), cond=cond)
    if cond.nelms != 1:
        raise ValueError(f"conditional: got condition {cond!r}; expected a scalar tensor.")
    if cond.dtype is not dtypes.bool:
        raise TypeError(
            f"conditional: got condition %{cond.name}: {cond.spec}; expected a bool scalar. "
            "Compare or cast it."
        )
    if len(then_branch.outputs) != len(else_branch.outputs):
        raise ValueError(
            f"conditional: got {len(then_branch.outputs)} outputs of '{then_branch.name}' and "
            f"{len(else_branch.outputs)} of '{else_branch.name}'; expected the same number."
        )
    for a, b in zip(then_branch.outputs, else_branch.outputs):
        if a.spec != b.spec:
            raise GraphError(
                f"conditional: got outputs %{a.name}: {a.spec} and %{b.name}: {b.spec}; "
                "expected equal specs."
            )


def conditional(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Inputs = None,
    else_inputs: Inputs = None,
    then_inputs_dict: Mapping[Tensor, Tensor] | None = None,
    else_inputs_dict: Mapping[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Run then_branch where the bool scalar is true, else_branch otherwise.

    Shapes: cond [], bool; inputs of each branch as it has them -> outputs, of one spec in both
        branches.
    Raises:
        TypeError: the condition is no tensor, or not bool.
        ValueError: the branches have different numbers of outputs, or inputs do not match.
        NotImplementedError: by-reference inputs.
    """
    return conditional_with_info(
        cond, then_branch, else_branch, then_inputs, else_inputs, then_inputs_dict, else_inputs_dict
    ).outputs

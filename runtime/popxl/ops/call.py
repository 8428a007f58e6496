"""Calling graphs: `call`, `repeat` and `conditional`, and the records that link a call with its
graph.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from popxl.context import get_current_context, get_current_graph
from popxl.errors import GraphError
from popxl.graph import Graph
from popxl.opdef import Op, check_operand, emit, op
from popxl.tensor import Tensor, TensorLike, TensorSpec, make_constant
from popxl.utils import host_array


@op(name="call", effects=("control",), names=lambda graph, inputs: output_names(graph))
def _call(graph: Graph, inputs: tuple[Any, ...]) -> tuple[TensorSpec, ...]:
    """Run a graph once."""
    return tuple(t.spec for t in graph.outputs)


@op(
    name="repeat",
    effects=("control",),
    names=lambda graph, repeat_count, inputs: output_names(graph),
)
def _repeat(graph: Graph, repeat_count: int, inputs: tuple[Any, ...]) -> tuple[TensorSpec, ...]:
    """Run a graph repeat_count times, its outputs becoming its first inputs."""
    return tuple(t.spec for t in graph.outputs)


def output_names(graph: Graph) -> list[str]:
    """The graph's own names of its outputs, which the results of its calls take."""
    return [t.name for t in graph.outputs]


class CallSiteInfo:
    """Links a call or repeat with the graph it calls. Inputs and outputs are live: autodiff may add
    outputs.
    """

    def __init__(self, subgraph_op: Op) -> None:
        self._op = subgraph_op
        self._known: dict[Tensor, Tensor] = {}
        self._known_for: tuple[Any, ...] = (None,)
        """The call's inputs, and how much else there was."""

    @property
    def called_graph(self) -> Graph:
        """The graph called."""
        graph: Graph = self._op.arguments["graph"]
        return graph

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The caller's inputs, in the graph's order."""
        return tuple(self._op.arguments["inputs"])

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The caller's outputs."""
        return self._op.outputs

    def graph_to_parent_input_index(self, idx: int) -> int:
        """Index among the caller's inputs of the graph's input ``idx``: the same."""
        return _checked(idx, self.called_graph.inputs)

    def parent_to_graph_input_index(self, idx: int) -> int:
        """Index among the graph's inputs of the caller's input ``idx``: the same."""
        return _checked(idx, self.inputs)

    def graph_to_parent_output_index(self, idx: int) -> int:
        """Index among the caller's outputs of the graph's output ``idx``: the same."""
        return _checked(idx, self.called_graph.outputs)

    def parent_to_graph_output_index(self, idx: int) -> int:
        """Index among the graph's outputs of the caller's output ``idx``: the same."""
        return _checked(idx, self.outputs)

    def parent_input(self, idx: int) -> Tensor:
        """The caller's input at an index."""
        return self.inputs[idx]

    def parent_output(self, idx: int) -> Tensor:
        """The caller's output at an index."""
        return self.outputs[idx]

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """The caller's tensor for an input or output of the graph. ValueError if it is neither.

        What is both is the caller's input, but the result where the graph takes it by value and
        writes in place: nothing else has the change.
        """
        found = self._parents().get(graph_tensor)
        if found is None:
            raise ValueError(
                f"graph_to_parent: got %{graph_tensor.name}; expected an input or output of graph "
                f"'{self.called_graph.name}'."
            )
        return found

    def _parents(self) -> dict[Tensor, Tensor]:
        """The caller's tensor for each input and output of the graph, the first of several."""
        graph, given = self.called_graph, self._op.arguments["inputs"]
        ours, results = graph._outputs, self._op._outputs
        sizes = len(graph._inputs), len(ours), len(results)
        if self._known_for[0] is not given or self._known_for[1:] != sizes:
            inputs, outputs = zip(graph._inputs, given), dict(reversed([*zip(ours, results)]))
            self._known, self._known_for = {**outputs, **dict(inputs)}, (given, *sizes)
            if any(op.written for op in graph._ops):
                by_value = (t for t in outputs if not self._op.is_by_reference(t))
                self._known.update((t, outputs[t]) for t in by_value)
        return self._known

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """The graph's input that a caller's tensor feeds. ValueError if it feeds none."""
        for inner, outer in zip(self.called_graph.inputs, self.inputs):
            if outer is parent_tensor:
                return inner
        raise ValueError(
            f"parent_to_graph: got %{parent_tensor.name}; expected an input of the call of "
            f"'{self.called_graph.name}'."
        )

    def set_parent_input_modified(
        self, parent_tensor: Tensor, infer_modified_regions: bool = False
    ) -> None:
        """Declare that this call writes to that input, as a TensorByRef annotation does for every
        call of the graph.

        Raises:
            ValueError: a tensor that feeds no input of the graph.
        """
        self._op.take_by_reference(self.parent_to_graph(parent_tensor))


def _checked(idx: int, values: Sequence[Any]) -> int:
    if not 0 <= idx < len(values):
        raise IndexError(f"call site: got index {idx}; expected 0 <= index < {len(values)}.")
    return idx


def flattened(values: Iterable[Any], targets: Sequence[Tensor]) -> list[Any]:
    """The values for a graph's inputs from the first on: what lists and tuples hold, but numbers in
    a list where the next input has axes are its array.
    """
    flat: list[Any] = []
    for value in values:
        has_axes = len(flat) < len(targets) and targets[len(flat)].rank > 0
        if not isinstance(value, (list, tuple)) or (has_axes and _holds_numbers(value)):
            flat.append(value)
        else:
            flat.extend(flattened(value, targets[len(flat) :]))
    return flat


def _holds_numbers(values: Iterable[Any]) -> bool:
    """Whether there is nothing in lists of lists but numbers."""
    return all(
        _holds_numbers(v) if isinstance(v, (list, tuple)) else np.isscalar(v) for v in values
    )


def _operand(name: str, target: Tensor, given: Any) -> Tensor:
    if isinstance(given, Tensor):
        value = given
    else:
        try:
            value = make_constant(
                host_array(f"input %{target.name}", given, target.dtype), target.dtype, None
            )
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{name}: got {type(given).__name__} for input %{target.name}; expected a tensor, "
                f"number or array ({error})."
            ) from None
    check_operand(name, target.name, value, get_current_graph())
    if value.shape != target.shape or value.dtype is not target.dtype:
        raise GraphError(
            f"{name}: got %{value.name}: {value.spec} for input %{target.name}: {target.spec} of "
            f"graph '{target._graph.name}'; expected the same shape and dtype. Reshape or cast "
            "it, or build the graph for this spec."
        )
    return value


def match_inputs(
    name: str,
    graph: Graph,
    inputs: Sequence[Any],
    inputs_dict: Mapping[Tensor, Any] | None,
    check_inputs: bool = True,
) -> tuple[Tensor, ...]:
    """The caller's tensor for each input of the graph: positional from the first, the others by the
    graph's tensor.

    Raises:
        ValueError: too many or too few inputs, an input given twice, or a key that is no input.
        TypeError: a value that is neither tensor nor number nor array.
    """
    positional = flattened(inputs, graph.inputs)
    if len(positional) > len(graph.inputs):
        raise ValueError(
            f"{name}: got {len(positional)} inputs for graph '{graph.name}'; expected at most "
            f"{len(graph.inputs)}."
        )
    values: dict[Tensor, Any] = dict(zip(graph.inputs, positional))
    taken = set(graph.inputs)
    for key, value in (inputs_dict or {}).items():
        if not isinstance(key, Tensor) or key not in taken:
            raise ValueError(
                f"{name}: got key {key!r} in inputs_dict; expected an input of graph "
                f"'{graph.name}'."
            )
        if key in values:
            raise ValueError(
                f"{name}: got input %{key.name} of graph '{graph.name}' twice; expected it once."
            )
        values[key] = value
    missing = [t for t in graph.inputs if t not in values]
    if missing and check_inputs:
        raise ValueError(
            f"{name}: got no value for {', '.join(f'%{t.name}: {t.spec}' for t in missing)} of "
            f"graph '{graph.name}'; expected all {len(graph.inputs)} inputs. Pass them in order, "
            "or in inputs_dict keyed by the graph's tensors."
        )
    if missing and missing != list(graph.inputs[-len(missing) :]):
        raise ValueError(
            f"{name}: got no value for %{missing[0].name} of graph '{graph.name}', and values for "
            "inputs after it; expected those without a value to be the last. Give it one."
        )
    return tuple(_operand(name, t, values[t]) for t in graph.inputs if t in values)


def _check_callable(name: str, graph: Graph) -> None:
    context = get_current_context()
    if not isinstance(graph, Graph):
        raise TypeError(f"{name}: got {type(graph).__name__}; expected a Graph from create_graph.")
    if graph.ir is not context.ir:
        raise GraphError(
            f"{name}: got graph '{graph.name}' of another Ir; expected one of Ir {context.ir.id}."
        )
    if graph._times_entered:
        raise GraphError(
            f"{name}: got graph '{graph.name or 'main'}', which is being built; expected another: "
            "graphs are not recursive."
        )


def call_with_info(
    graph: Graph,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """The same as `call`, returning the `CallSiteInfo`.

    Shapes: inputs and outputs of the graph's own shapes and dtypes.
    Raises:
        ValueError: too many or too few inputs (``check_inputs=False`` permits missing ones), a
            foreign tensor, an input twice, another shape or dtype.
        TypeError: a value that is not convertible.
    """
    _check_callable("call", graph)
    matched = match_inputs("call", graph, inputs, inputs_dict, check_inputs)
    return CallSiteInfo(emit(_call.definition, {"graph": graph, "inputs": matched}))


def call(
    graph: Graph,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
) -> tuple[Tensor, ...]:
    """Run a graph here.

    Shapes: inputs and outputs of the graph's own shapes and dtypes.

    Inputs fill the graph's inputs from the first (lists are flattened, numbers become constants);
    ``inputs_dict`` gives the others, keyed by the graph's own tensors. By-reference inputs see the
    graph's writes, others never do.

    Returns:
        The outputs, always a tuple, those that autodiff appended included.
    Raises:
        ValueError: too many or too few inputs, a foreign tensor, an input twice, another shape or
            dtype.
        TypeError: a value that is not convertible, or a graph that is none.
    """
    return call_with_info(graph, *inputs, inputs_dict=inputs_dict).outputs


def repeat_with_info(
    graph: Graph,
    repeat_count: int,
    *inputs: Tensor | Iterable[Tensor],
    inputs_dict: Mapping[Tensor, Tensor] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """The same as `repeat`, returning the `CallSiteInfo`.

    Shapes and errors: as for `repeat`; ``check_inputs=False`` permits missing inputs.
    """
    _check_callable("repeat", graph)
    try:
        count = index(repeat_count)
    except TypeError:
        raise TypeError(
            f"repeat: got repeat_count {repeat_count!r}; expected an int. Divide with //, or round "
            "it."
        ) from None
    if count < 0:
        raise ValueError(f"repeat: got repeat_count {repeat_count}; expected 0 or more.")
    if len(graph.outputs) > len(graph.inputs):
        raise ValueError(
            f"repeat: got graph '{graph.name}' with {len(graph.outputs)} outputs and "
            f"{len(graph.inputs)} inputs; expected no more outputs than inputs, because the "
            "outputs become the first inputs of the next iteration."
        )
    for result, first in zip(graph.outputs, graph.inputs):
        if result.shape != first.shape or result.dtype is not first.dtype:
            raise GraphError(
                f"repeat: got output %{result.name}: {result.spec} for input %{first.name}: "
                f"{first.spec} of graph '{graph.name}'; expected the same shape and dtype, "
                "because it becomes that input in the next iteration."
            )
    matched = match_inputs("repeat", graph, inputs, inputs_dict, check_inputs)
    return CallSiteInfo(
        emit(
            _repeat.definition,
            {"graph": graph, "repeat_count": count, "inputs": matched},
        )
    )


def repeat(
    graph: Graph,
    repeat_count: int,
    *inputs: Tensor | Iterable[Tensor],
    inputs_dict: Mapping[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Run a graph repeat_count times.

    Shapes: inputs and outputs of the graph's own shapes and dtypes; its first outputs have those of
        its first inputs.

    Its N outputs become its first N inputs of the next iteration; other inputs keep the caller's
    value, except that writes to by-reference ones accumulate.

    Returns:
        The outputs of the last iteration; the first N inputs when the count is 0.
    Raises:
        ValueError: negative count, more outputs than inputs, or inputs that do not match.
        TypeError: a count that is no integer.
    """
    return repeat_with_info(graph, repeat_count, *inputs, inputs_dict=inputs_dict).outputs

"""Gradient graphs that a module writes by hand in ``build_grad``."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import popxl
from popxl import Tensor
from popxl.errors import GraphError, ShapeError
from popxl.transforms.autodiff import ExpectedConnection, GradGraphInfo, add_activation, results_of

from popxl_addons.grad_tensors import _Aux, _VarGrads
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.utils import suffix_graph_name


class WithBuildGrad(Protocol):
    """A module, as far as its gradient graph needs it."""

    @property
    def build_grad(self) -> Callable[..., Any]:
        """See `popxl_addons.Module.build_grad`."""

    def _begin_gradient(self, aux: _Aux, var_grad: _VarGrads) -> None:
        """Let build_grad find these."""


def build_custom_grad_graph(
    module: WithBuildGrad,
    fwd_graph: GraphWithNamedArgs,
    grads_provided: Iterable[Tensor] | None,
    grads_required: Iterable[Tensor] | None,
) -> GraphWithNamedArgs:
    """Trace a module's build_grad; the tensors that build kept in ``aux`` are appended to the
    forward graph's outputs.

    Raises:
        TypeError: a build_grad with other parameters than positional ones, or a result that is no
            tensor.
        ValueError: tensors of another graph, another number of gradients than build_grad takes, a
            gradient that is missing or has another shape than its tensor, or too many results.
    """
    forward, where = fwd_graph.graph, f"{type(module).__name__}.build_grad"
    outputs = results_of(forward) if grads_provided is None else grads_provided
    provided = _own_tensors("grads_provided", outputs, forward)
    required = _own_tensors(
        "grads_required", forward.inputs if grads_required is None else grads_required, forward
    )
    _check_parameters(where, module.build_grad, provided)
    names = {t: name for name, t in fwd_graph.args.to_dict().items()}
    aux = fwd_graph._aux.copy() if fwd_graph._aux is not None else _Aux()
    gradient = forward.ir.create_empty_graph(suffix_graph_name(forward.name, "grad"))
    with gradient:
        incoming = [_input_like(t, f"Gradient___{t.name}") for t in provided]
        aux._inputs = {t: _input_like(t, t.name) for t in aux._tensors}
        var_grad = _VarGrads({names[t]: t for t in required if t in names})
        var_grad._variables = {name: t for t, name in names.items()}
        var_grad.inputs = tuple(t for t in required if t not in names)
        module._begin_gradient(aux, var_grad)
        result = module.build_grad(*incoming)
        returned = (
            []
            if result is None
            else list(result)
            if isinstance(result, Iterable) and not isinstance(result, Tensor)
            else [result]
        )
        results = _results(where, var_grad.inputs, returned)
        results.update(
            {t: var_grad._grads[names[t]] for t in required if names.get(t) in var_grad._grads}
        )
        for t in required:
            popxl.graph_output(_checked_gradient(where, t, results))
    for t in aux._tensors:
        if t not in forward.outputs:
            add_activation(forward, t, "inputs alone in aux, because it cannot get more outputs")
    connections = [
        *(ExpectedConnection.of_gradient(t) for t in provided),
        *(ExpectedConnection.of_value(t) for t in aux._tensors),
    ]
    info = GradGraphInfo.make(
        gradient, forward, connections, [ExpectedConnection.of_gradient(t) for t in required]
    )
    return GraphWithNamedArgs.from_grad_graph(info)


def _own_tensors(what: str, tensors: Iterable[Tensor], graph: popxl.Graph) -> list[Tensor]:
    found = list(tensors)
    for t in found:
        if not isinstance(t, Tensor) or t not in graph:
            raise GraphError(
                f"autodiff: got {t!r} in {what}; expected tensors of graph '{graph.name}'."
            )
    return found


def _check_parameters(
    where: str, build_grad: Callable[..., Any], provided: Sequence[Tensor]
) -> None:
    parameters = inspect.signature(build_grad).parameters.values()
    for p in parameters:
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            raise TypeError(
                f"{where}: got parameter '{p}'; expected positional parameters alone, one for "
                "each gradient."
            )
    least = sum(p.default is p.empty for p in parameters)
    if not least <= len(provided) <= len(parameters):
        raise GraphError(
            f"{where}: got {len(provided)} gradients for {len(parameters)} parameters; expected "
            "one for each. Pass grads_provided, or change the signature."
        )


def _input_like(t: Tensor, name: str) -> Tensor:
    return popxl.graph_input(t.shape, t.dtype, name, meta_shape=t.meta_shape or None)


def _results(where: str, inputs: Sequence[Tensor], returned: Sequence[Any]) -> dict[Tensor, Tensor]:
    """What build_grad returned, by the required inputs that are no variables."""
    for value in returned:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{where}: got {type(value).__name__} among its results; expected tensors."
            )
    if len(returned) > len(inputs):
        raise GraphError(
            f"{where}: got {len(returned)} results; expected at most {len(inputs)}, of the "
            "required inputs that are no variables. Set those of variables on self.var_grad."
        )
    return dict(zip(inputs, returned))


def _checked_gradient(where: str, t: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
    if t not in gradients:
        raise GraphError(
            f"{where}: got no gradient of %{t.name}; expected one. Return it, or set it on "
            "self.var_grad."
        )
    if gradients[t].shape != t.shape:
        raise ShapeError(
            f"{where}: got {gradients[t].spec} as gradient of %{t.name}; expected shape "
            f"{list(t.shape)}."
        )
    return gradients[t]


def create_grad_graph_info(
    ir: popxl.Ir,
    fwd_graph: popxl.Graph,
    grad_graph: popxl.Graph,
    grad_input_to_fwd_output: "OrderedDict[Tensor, Tensor]",
    grad_output_to_fwd_input: "OrderedDict[Tensor, Tensor]",
    fwd_tensors: set[Tensor],
) -> GradGraphInfo:
    """GradGraphInfo of a gradient graph made by hand.

    Args:
        grad_input_to_fwd_output: {input of the gradient graph: the forward tensor it is the
            gradient, or value, of}.
        grad_output_to_fwd_input: {output of the gradient graph: the forward tensor it is the
            gradient of}.
        fwd_tensors: forward tensors among the former that stand for their value.
    """
    inputs: list[ExpectedConnection] = [
        ExpectedConnection.of_value(grad_input_to_fwd_output[t])
        if grad_input_to_fwd_output[t] in fwd_tensors
        else ExpectedConnection.of_gradient(grad_input_to_fwd_output[t])
        for t in grad_graph.inputs
    ]
    outputs = [
        ExpectedConnection.of_gradient(grad_output_to_fwd_input[t]) for t in grad_graph.outputs
    ]
    return GradGraphInfo.make(grad_graph, fwd_graph, inputs, outputs)

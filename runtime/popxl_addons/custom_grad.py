"""Gradient graphs that a module writes by hand in ``build_grad``."""

import inspect
from collections import OrderedDict
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import popxl
from popxl import Tensor
from popxl.errors import GraphError, ShapeError
from popxl.transforms.autodiff import ExpectedConnection, GradGraphInfo, add_activation, results_of

from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.utils import suffix_graph_name

if TYPE_CHECKING:
    from popxl_addons.module import Module


class _Aux:
    """Tensors that ``build`` keeps for ``build_grad``: ``self.aux["x"] = x`` there,
    ``self.aux["x"]`` here.

    Raises:
        TypeError: a value that is no tensor.
        RuntimeError: a read outside build_grad.
        KeyError: a name that build kept nothing under.
    """

    __slots__ = ("_tensors", "_values")

    def __init__(self) -> None:
        self._tensors: Dict[str, Tensor] = {}
        self._values: Optional[Dict[Tensor, Tensor]] = None
        """Inside build_grad: the gradient graph's tensor for each of the forward graph."""

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"aux[{name!r}]: got {type(value).__name__}; expected a tensor. Keep other "
                "values on self."
            )
        self._tensors[name] = value

    def __getitem__(self, name: str) -> Tensor:
        tensors, values = self._readable(name)
        if name not in tensors:
            raise KeyError(f"aux: got {name!r}; expected one of {', '.join(tensors) or 'none'}.")
        return values.get(tensors[name], tensors[name])

    def __contains__(self, name: str) -> bool:
        return name in self._readable(name)[0]

    def _readable(self, name: str) -> Tuple[Dict[str, Tensor], Dict[Tensor, Tensor]]:
        if self._values is None:
            raise RuntimeError(
                f"aux[{name!r}]: got a read outside build_grad; expected a use of the tensor "
                "that build made itself."
            )
        return self._tensors, self._values

    @property
    def _kept(self) -> List[Tensor]:
        """The forward graph's tensors, each once."""
        return list(dict.fromkeys(self._tensors.values()))

    def copy(self) -> "_Aux":
        """The same tensors, not to be read."""
        new = _Aux()
        new._tensors.update(self._tensors)
        return new


class _VarGrads:
    """Gradients of variables, by dotted name, set in build_grad: ``self.var_grad["heads.weight"] =
    dw``.

    ``"heads.weight" in self.var_grad`` tells whether a gradient is required under the name.
    ``inputs`` are the forward graph's required inputs that are no variables, whose gradients
    build_grad returns, in that order.

    Raises:
        TypeError: a value that is no tensor.
        RuntimeError: a use outside build_grad.
        KeyError: no gradient is required under the name, or none is set where one is read.
        ValueError: a gradient whose shape is not the variable's.
    """

    __slots__ = ("_variables", "_grads", "inputs")

    def __init__(self, grads_required_vars_with_names: Optional[Dict[str, Tensor]] = None) -> None:
        self._variables = grads_required_vars_with_names
        self.inputs: Tuple[Tensor, ...] = ()
        self._grads: Dict[str, Tensor] = {}

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"var_grad[{name!r}]: got {type(value).__name__}; expected a tensor.")
        required = self._required(name)
        if name not in required:
            raise KeyError(
                f"var_grad: got {name!r}; expected one of {', '.join(required) or 'none'}."
            )
        if value.shape != required[name].shape:
            expected = list(required[name].shape)
            raise ValueError(
                f"var_grad[{name!r}]: got shape {list(value.shape)}; expected {expected}, the "
                "variable's."
            )
        self._grads[name] = value

    def __getitem__(self, name: str) -> Tensor:
        self._required(name)
        return self._grads[name]

    def __contains__(self, name: str) -> bool:
        return name in self._required(name)

    def _required(self, name: str) -> Dict[str, Tensor]:
        if self._variables is None:
            raise RuntimeError(
                f"var_grad[{name!r}]: got a use outside build_grad; expected it in build_grad "
                "alone."
            )
        return self._variables


def build_custom_grad_graph(
    module: "Module",
    fwd_graph: GraphWithNamedArgs,
    grads_provided: Optional[Iterable[Tensor]],
    grads_required: Optional[Iterable[Tensor]],
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
        aux._values = {t: _input_like(t, t.name) for t in aux._kept}
        module.aux, module.var_grad = aux, _VarGrads({names[t]: t for t in required if t in names})
        module.var_grad.inputs = tuple(t for t in required if t not in names)
        result = module.build_grad(*incoming)
        returned = (
            [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        )
        results = _results(where, module.var_grad.inputs, returned)
        results.update(
            {
                t: module.var_grad._grads[names[t]]
                for t in required
                if names.get(t) in module.var_grad._grads
            }
        )
        for t in required:
            popxl.graph_output(_checked_gradient(where, t, results))
    for t in aux._kept:
        if t not in forward.outputs:
            add_activation(forward, t, "inputs alone in aux, because it cannot get more outputs")
    connections = [
        *(ExpectedConnection.of_gradient(t) for t in provided),
        *(ExpectedConnection.of_value(t) for t in aux._kept),
    ]
    info = GradGraphInfo.make(
        gradient, forward, connections, [ExpectedConnection.of_gradient(t) for t in required]
    )
    return GraphWithNamedArgs.from_grad_graph(info)


def _own_tensors(what: str, tensors: Iterable[Tensor], graph: popxl.Graph) -> List[Tensor]:
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


def _results(where: str, inputs: Sequence[Tensor], returned: Sequence[Any]) -> Dict[Tensor, Tensor]:
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


def _checked_gradient(where: str, t: Tensor, gradients: Dict[Tensor, Tensor]) -> Tensor:
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
    fwd_tensors: Set[Tensor],
) -> GradGraphInfo:
    """GradGraphInfo of a gradient graph made by hand.

    Args:
        grad_input_to_fwd_output: {input of the gradient graph: the forward tensor it is the
            gradient, or value, of}.
        grad_output_to_fwd_input: {output of the gradient graph: the forward tensor it is the
            gradient of}.
        fwd_tensors: forward tensors among the former that stand for their value.
    """
    inputs: List[ExpectedConnection] = [
        ExpectedConnection.of_value(grad_input_to_fwd_output[t])
        if grad_input_to_fwd_output[t] in fwd_tensors
        else ExpectedConnection.of_gradient(grad_input_to_fwd_output[t])
        for t in grad_graph.inputs
    ]
    outputs = [
        ExpectedConnection.of_gradient(grad_output_to_fwd_input[t]) for t in grad_graph.outputs
    ]
    return GradGraphInfo.make(grad_graph, fwd_graph, inputs, outputs)

"""Gradient graphs that a module writes by hand in ``build_grad``."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Set

import popxl
from popxl import Tensor
from popxl.transforms.autodiff import ExpectedConnection, GradGraphInfo

from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.utils import suffix_graph_name

if TYPE_CHECKING:
    from popxl_addons.module import Module


class _Aux:
    """Values that ``build`` keeps for ``build_grad``. Reading a value outside build_grad is an Exception."""

    _values: Dict[str, Any]
    _read: Optional[Callable[[Tensor], Tensor]]

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_read", None)

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._read is None:
            raise Exception(
                f"aux.{name}: got a read outside build_grad; expected a use of the tensor that build made itself."
            )
        if name not in self._values:
            raise AttributeError(
                f"aux.{name}: got an unknown name; expected one of {', '.join(self._values) or 'none'}."
            )
        return self._map(self._values[name])

    def _map(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            assert self._read is not None
            return self._read(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._map(item) for item in value)
        return value

    def copy(self) -> "_Aux":
        """The same values."""
        return self._readable(None)

    def _readable(self, read: Optional[Callable[[Tensor], Tensor]]) -> "_Aux":
        new = _Aux()
        object.__setattr__(new, "_values", dict(self._values))
        object.__setattr__(new, "_read", read)
        return new


class _VarGrads:
    """Gradients of variables, set in build_grad as ``var_grad.weight = ...`` or ``var_grad["heads.weight"] = ...``.

    Raises:
        KeyError: no gradient is required under the name.
        ValueError: a gradient whose shape is not the variable's.
        TypeError: a value that is no tensor.
    """

    _required: Dict[str, Tensor]
    _grads: Dict[str, Tensor]

    def __init__(self, grads_required_vars_with_names: Optional[Dict[str, Tensor]] = None) -> None:
        object.__setattr__(self, "_required", dict(grads_required_vars_with_names or {}))
        object.__setattr__(self, "_grads", {})

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name not in self._required:
            raise KeyError(f"var_grad: got {name!r}; expected one of {', '.join(self._required) or 'none'}.")
        if not isinstance(value, Tensor):
            raise TypeError(f"var_grad.{name}: got {type(value).__name__}; expected a tensor.")
        if value.shape != self._required[name].shape:
            expected = list(self._required[name].shape)
            raise ValueError(f"var_grad.{name}: got shape {list(value.shape)}; expected {expected}, the variable's.")
        self._grads[name] = value

    def __setattr__(self, name: str, value: Tensor) -> None:
        self[name] = value

    def is_required(self, name: str) -> bool:
        """Whether a gradient of this variable is asked for."""
        return name in self._required

    def __contains__(self, name: str) -> bool:
        return name in self._grads

    def __getitem__(self, name: str) -> Tensor:
        return self._grads[name]


def build_custom_grad_graph(
    module: "Module",
    fwd_graph: GraphWithNamedArgs,
    grads_provided: Optional[Iterable[Tensor]],
    grads_required: Optional[Iterable[Tensor]],
) -> GraphWithNamedArgs:
    """Trace a module's build_grad; forward values that it reads are appended to the forward graph's outputs.

    Raises:
        ValueError: a required gradient that build_grad does not give, or of another shape than its tensor.
    """
    forward = fwd_graph.graph
    provided = list(forward.outputs if grads_provided is None else grads_provided)
    required = list(forward.inputs if grads_required is None else grads_required)
    names = {t: name for name, t in fwd_graph.args.to_dict().items()}
    gradient = forward.ir.create_empty_graph(suffix_graph_name(forward.name, "grad"))
    activations: Dict[Tensor, Tensor] = {}

    def read(t: Tensor) -> Tensor:
        if t not in activations:
            activations[t] = popxl.graph_input(t.shape, t.dtype, t.name, meta_shape=t.meta_shape or None)
        return activations[t]

    module.aux = (fwd_graph._aux or _Aux())._readable(read)
    module.var_grad = _VarGrads({names[t]: t for t in required if t in names})
    with gradient:
        incoming = [
            popxl.graph_input(t.shape, t.dtype, f"Gradient___{t.name}", meta_shape=t.meta_shape or None)
            for t in provided
        ]
        result = module.build_grad(*incoming)
        returned = [] if result is None else [result] if isinstance(result, Tensor) else list(result)
        by_input = dict(zip((t for t in forward.inputs if t not in names), returned))
        for t in required:
            if t in names and names[t] in module.var_grad:
                by_input[t] = module.var_grad[names[t]]
            popxl.graph_output(_checked_gradient(module, t, by_input))
    for t in activations:
        if t not in forward.inputs and t not in forward.outputs:
            with forward:
                popxl.graph_output(t)
    connections = [
        *(ExpectedConnection.of_gradient(t) for t in provided),
        *(ExpectedConnection.of_value(t) for t in activations),
    ]
    info = GradGraphInfo.make(gradient, forward, connections, [ExpectedConnection.of_gradient(t) for t in required])
    return GraphWithNamedArgs.from_grad_graph(info)


def _checked_gradient(module: "Module", t: Tensor, gradients: Dict[Tensor, Tensor]) -> Tensor:
    where = f"{type(module).__name__}.build_grad"
    if t not in gradients:
        raise ValueError(f"{where}: got no gradient of %{t.name}; expected one. Return it, or set it on self.var_grad.")
    if gradients[t].shape != t.shape:
        raise ValueError(f"{where}: got {gradients[t].spec} as gradient of %{t.name}; expected shape {list(t.shape)}.")
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
        grad_input_to_fwd_output: {input of the gradient graph: the forward tensor it is the gradient, or value, of}.
        grad_output_to_fwd_input: {output of the gradient graph: the forward tensor it is the gradient of}.
        fwd_tensors: forward tensors among the former that stand for their value.
    """
    inputs: List[ExpectedConnection] = [
        ExpectedConnection.of_value(grad_input_to_fwd_output[t])
        if grad_input_to_fwd_output[t] in fwd_tensors
        else ExpectedConnection.of_gradient(grad_input_to_fwd_output[t])
        for t in grad_graph.inputs
    ]
    outputs = [ExpectedConnection.of_gradient(grad_output_to_fwd_input[t]) for t in grad_graph.outputs]
    return GradGraphInfo.make(grad_graph, fwd_graph, inputs, outputs)

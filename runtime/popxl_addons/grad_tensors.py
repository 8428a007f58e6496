"""What a module's ``build`` keeps for its ``build_grad``, and the gradients that this makes."""

from typing import Any

from popxl import Tensor


class _Aux:
    """Values that ``build`` keeps for ``build_grad``: ``self.aux["x"] = x`` there,
    ``self.aux["x"]`` here.

    A tensor becomes an output of the forward graph, and is read as the gradient graph's input for
    it. Any other value is read as it was kept; tensors inside a container stay the forward graph's.

    Raises:
        RuntimeError: a read outside build_grad.
        KeyError: a name that build kept nothing under.
    """

    __slots__ = ("_inputs", "_values")

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._inputs: dict[Tensor, Tensor] | None = None
        """The gradient graph's input for each tensor of the forward graph, inside build_grad."""

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __getitem__(self, name: str) -> Any:
        inputs = self._readable(name)
        if name not in self._values:
            known = ", ".join(self._values) or "none"
            raise KeyError(f"aux: got {name!r}; expected one of {known}.")
        value = self._values[name]
        return inputs.get(value, value) if isinstance(value, Tensor) else value

    def __contains__(self, name: str) -> bool:
        self._readable(name)
        return name in self._values

    def _readable(self, name: str) -> dict[Tensor, Tensor]:
        if self._inputs is None:
            raise RuntimeError(
                f"aux[{name!r}]: got a read outside build_grad; expected a use of the value "
                "that build made itself."
            )
        return self._inputs

    @property
    def _tensors(self) -> list[Tensor]:
        """The forward graph's tensors, each once."""
        return list(dict.fromkeys(t for t in self._values.values() if isinstance(t, Tensor)))

    def copy(self) -> "_Aux":
        """The same values, not to be read."""
        new = _Aux()
        new._values.update(self._values)
        return new


class _VarGrads:
    """Gradients of variables, by dotted name, set in build_grad: ``self.var_grad["heads.weight"] =
    dw``.

    ``"heads.weight" in self.var_grad`` tells whether a gradient is required under the name; one
    that is set without being required is ignored. ``inputs`` are the forward graph's required
    inputs that are no variables, whose gradients build_grad returns, in that order.

    Raises:
        TypeError: a value that is no tensor.
        RuntimeError: a use outside build_grad.
        KeyError: the forward graph has no variable of the name, or no gradient is set where one is
            read.
        ValueError: a gradient whose shape is not the variable's.
    """

    __slots__ = ("_required", "_variables", "_grads", "inputs")

    def __init__(self, grads_required_vars_with_names: dict[str, Tensor] | None = None) -> None:
        self._required = grads_required_vars_with_names
        self._variables = dict(grads_required_vars_with_names or {})
        """All variables of the forward graph, those whose gradient nobody asks for included."""
        self.inputs: tuple[Tensor, ...] = ()
        self._grads: dict[str, Tensor] = {}

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"var_grad[{name!r}]: got {type(value).__name__}; expected a tensor.")
        self._usable(name)
        if name not in self._variables:
            known = ", ".join(self._variables) or "none"
            raise KeyError(f"var_grad: got {name!r}; expected one of {known}.")
        expected = self._variables[name].shape
        if value.shape != expected:
            raise ValueError(
                f"var_grad[{name!r}]: got shape {list(value.shape)}; expected {list(expected)}, "
                "the variable's."
            )
        self._grads[name] = value

    def __getitem__(self, name: str) -> Tensor:
        self._usable(name)
        return self._grads[name]

    def __contains__(self, name: str) -> bool:
        return name in self._usable(name)

    def _usable(self, name: str) -> dict[str, Tensor]:
        """The variables whose gradients are required."""
        if self._required is None:
            raise RuntimeError(
                f"var_grad[{name!r}]: got a use outside build_grad; expected it in build_grad "
                "alone."
            )
        return self._required

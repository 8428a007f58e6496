"""What a module's ``build`` keeps for its ``build_grad``, and the gradients that this makes."""

from popxl import Tensor


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
        self._tensors: dict[str, Tensor] = {}
        self._values: dict[Tensor, Tensor] | None = None
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

    def _readable(self, name: str) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
        if self._values is None:
            raise RuntimeError(
                f"aux[{name!r}]: got a read outside build_grad; expected a use of the tensor "
                "that build made itself."
            )
        return self._tensors, self._values

    @property
    def _kept(self) -> list[Tensor]:
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

    def __init__(self, grads_required_vars_with_names: dict[str, Tensor] | None = None) -> None:
        self._variables = grads_required_vars_with_names
        self.inputs: tuple[Tensor, ...] = ()
        self._grads: dict[str, Tensor] = {}

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

    def _required(self, name: str) -> dict[str, Tensor]:
        if self._variables is None:
            raise RuntimeError(
                f"var_grad[{name!r}]: got a use outside build_grad; expected it in build_grad "
                "alone."
            )
        return self._variables

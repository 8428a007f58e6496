"""Classes that programs compare a graph's ops with: ``isinstance(op, _ir.op.AddOp)``."""

from typing import Any

__all__ = ["op"]

SPECIAL = {
    "BatchNormOp": "BatchNormalization",
    "GroupNormOp": "GroupNormalization",
    "NegateOp": "Neg",
    "OnehotOp": "OneHot",
    "SubtractOp": "Sub",
}
"""Classes that do not have the name of their kind of op."""


class Kind(type):
    """A class whose instances are the ops of one kind; of all ops where it is called `Op`."""

    def __instancecheck__(cls, value: Any) -> bool:
        op_type = getattr(value, "opType", None)
        if not callable(op_type):
            return False
        kind = SPECIAL.get(cls.__name__, cls.__name__.removesuffix("Op"))
        return kind in ("", op_type())


class Kinds:
    """The classes, each made when it is asked for."""

    def __getattr__(self, name: str) -> Kind:
        if name.startswith("_") or not name.endswith("Op"):
            raise AttributeError(
                f"popart._internal.ir.op: got {name!r}; expected the class of a kind of op, such "
                "as AddOp."
            )
        kind = Kind(name, (), {})
        setattr(self, name, kind)
        return kind


op = Kinds()

"""Annotation symbols that are told apart by identity."""

from typing import Any, TypeVar

T = TypeVar("T")


class _AliasAnnotation:
    """A unique annotation symbol: compared by identity, never called."""

    def __init__(self, name: str, tp: Any):
        self.__name__ = name
        self.__supertype__ = tp

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__}: this is an annotation, not a type. Use it as `x: {self.__name__}`."
        )


def NewAliasAnnotation(name: str, tp: T) -> T:  # noqa: N802 - PopXL's name
    """A new annotation symbol that type checkers see as ``tp``. Calling it raises
    NotImplementedError.
    """
    return _AliasAnnotation(name, tp)  # type: ignore[return-value]

"""Streams by name."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import popxl
from popxl import DeviceToHostStream, HostToDeviceStream

from popxl_addons.utils import OrderedDict

S = TypeVar("S", bound=popxl.streams.Stream)
Description = tuple[tuple[int, ...], popxl.dtype]


class _StreamsBase(Generic[S]):
    """Ordered ``{name: stream}``, made from ``name=(shape, dtype)``.

    Read by name, as an attribute, by position or by slice; iterating yields the streams.

    Raises:
        KeyError, AttributeError: an unknown name.
    """

    def __init__(self, **descriptions: Description) -> None:
        self._streams: OrderedDict[str, S] = OrderedDict()
        for name, (shape, dtype) in descriptions.items():
            self._streams[name] = self._make(shape, dtype, name)

    @staticmethod
    def _make(shape: tuple[int, ...], dtype: popxl.dtype, name: str) -> Any:
        raise NotImplementedError

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, (int, slice)):
            return list(self._streams.values())[key]
        if key not in self._streams:
            raise KeyError(
                f"{type(self).__name__}: got {key!r}; expected one of {', '.join(self._streams)}."
            )
        return self._streams[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._streams:
            raise AttributeError(
                f"{type(self).__name__}: got {name!r}; expected the name of one of its streams."
            )
        return self._streams[name]

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def __iter__(self) -> Iterator[S]:
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def keys(self) -> list[str]:
        """Names, in order."""
        return list(self._streams)

    def items(self) -> list[tuple[str, S]]:
        """(name, stream) pairs, in order."""
        return list(self._streams.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={s.spec}' for n, s in self.items())})"


class InputStreams(_StreamsBase[HostToDeviceStream]):
    """Input streams by name."""

    @staticmethod
    def _make(shape: tuple[int, ...], dtype: popxl.dtype, name: str) -> HostToDeviceStream:
        return popxl.h2d_stream(shape, dtype, name)


class OutputStreams(_StreamsBase[DeviceToHostStream]):
    """Output streams by name."""

    @staticmethod
    def _make(shape: tuple[int, ...], dtype: popxl.dtype, name: str) -> DeviceToHostStream:
        return popxl.d2h_stream(shape, dtype, name)

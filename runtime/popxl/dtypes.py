"""Element types of tensors: PopXL's names, and their counterparts on the host.

``bfloat16``, ``float8_e4m3fn`` and ``float8_e5m2`` go beyond PopXL. numpy lacks them: float32
arrays stand for the first on the host, codes of a byte for the others, as for PopXL's own float8.
"""

import builtins
from typing import Any

import numpy as np


class dtype:  # noqa: N801 - PopXL's name
    """An element type. The instances are this module's constants; there are no others.

    Raises:
        TypeError: on construction.
    """

    _name: str
    _kind: str
    _bits: int
    _np: "np.dtype[Any] | None"
    _torch_name: str | None

    def __init__(self) -> None:
        raise TypeError(
            "dtype: got a constructor call; expected one of the constants, e.g. popxl.float32."
        )

    @classmethod
    def _make(
        cls, name: str, kind: str, bits: int, np_type: Any | None, torch_name: str | None
    ) -> "dtype":
        self = cls.__new__(cls)
        self._name, self._kind, self._bits = name, kind, bits
        self._np = np.dtype(np_type) if np_type is not None else None
        self._torch_name = torch_name
        _BY_NAME[name] = self
        return self

    @property
    def name(self) -> str:
        """The type's name, e.g. ``float32``."""
        return self._name

    @property
    def itemsize(self) -> int:
        """Bytes per element on the device."""
        return self._bits // 8

    @property
    def is_complex(self) -> builtins.bool:
        """Whether this is complex64 or complex128."""
        return self._kind == "c"

    @property
    def is_int(self) -> builtins.bool:
        """Whether this is a signed or unsigned integer; bool is not."""
        return self._kind in "iu"

    @property
    def is_floating_point(self) -> builtins.bool:
        """Whether this is a real floating-point type, of any width."""
        return self._kind == "f"

    @property
    def is_signed(self) -> builtins.bool:
        """Whether negative values exist."""
        return self._kind in "ifc"

    @classmethod
    def from_name(cls, name: str) -> "dtype":
        """The type called ``name``. ValueError if there is none."""
        if name not in _BY_NAME:
            raise ValueError(
                f"dtype.from_name: got {name!r}; expected one of {', '.join(_BY_NAME)}."
            )
        return _BY_NAME[name]

    @classmethod
    def as_dtype(cls, type_value: Any) -> "dtype":
        """The type named by a string, Python type, numpy or torch dtype, or by an object with a
        ``dtype``.

        Raises:
            ValueError: if nothing matches.
        """
        if isinstance(type_value, dtype):
            return type_value
        if isinstance(type_value, str) and type_value in _BY_NAME:
            return _BY_NAME[type_value]
        # "is": numpy's float64 equals float
        if type_value is builtins.bool or type_value is builtins.float:
            return bool if type_value is builtins.bool else float32
        text = str(type_value)
        if text.startswith("torch.") and text[6:] in _BY_NAME:
            return _BY_NAME[text[6:]]
        try:
            if type_value is not None:  # numpy's float64
                return _BY_NP[np.dtype(type_value)]
        # ValueError: numpy 2.4 asks for a torch tensor's dtype itself
        except (TypeError, ValueError, KeyError):
            pass
        inner = getattr(type_value, "dtype", None)
        if inner is not None and inner is not type_value:
            return cls.as_dtype(inner)
        raise ValueError(
            f"dtype.as_dtype: got {type_value!r}; expected a name, a Python type, a numpy or "
            "torch dtype, or an object with a dtype."
        )

    def as_numpy(self) -> "np.dtype[Any]":
        """The numpy type of host arrays (float32 for bfloat16). TypeError if there is none."""
        if self._np is None:
            raise TypeError(f"dtype.as_numpy: got {self.name}; expected a type that numpy has.")
        return self._np

    def as_torch(self) -> Any:
        """The torch type. TypeError if there is none, ModuleNotFoundError without torch."""
        import importlib

        torch = importlib.import_module("torch")
        if self._torch_name is None:
            raise TypeError(
                f"dtype.as_torch: got {self.name}; expected a type that torch computes with."
            )
        return getattr(torch, self._torch_name)

    def __repr__(self) -> str:
        return f"popxl.dtypes.{self.name}"

    def __reduce__(self) -> Any:
        return (dtype.from_name, (self._name,))


_BY_NAME: dict[str, dtype] = {}

bool = dtype._make("bool", "b", 8, np.bool_, "bool")
int8 = dtype._make("int8", "i", 8, np.int8, "int8")
int16 = dtype._make("int16", "i", 16, np.int16, "int16")
int32 = dtype._make("int32", "i", 32, np.int32, "int32")
int64 = dtype._make("int64", "i", 64, np.int64, "int64")
uint8 = dtype._make("uint8", "u", 8, np.uint8, "uint8")
uint16 = dtype._make("uint16", "u", 16, np.uint16, None)
uint32 = dtype._make("uint32", "u", 32, np.uint32, None)
uint64 = dtype._make("uint64", "u", 64, np.uint64, None)
np_dtype_float8_143 = np.dtype([("float8_143", "u1")])
np_dtype_float8_152 = np.dtype([("float8_152", "u1")])
"""numpy types of float8 codes on the host: one field, a byte."""
float8_143 = dtype._make("float8_143", "f", 8, np_dtype_float8_143, None)
float8_152 = dtype._make("float8_152", "f", 8, np_dtype_float8_152, None)
float8_e4m3fn = dtype._make(
    "float8_e4m3fn", "f", 8, np.dtype([("float8_e4m3fn", "u1")]), "float8_e4m3fn"
)
float8_e5m2 = dtype._make("float8_e5m2", "f", 8, np.dtype([("float8_e5m2", "u1")]), "float8_e5m2")
float16 = dtype._make("float16", "f", 16, np.float16, "float16")
bfloat16 = dtype._make("bfloat16", "f", 16, None, "bfloat16")
float32 = dtype._make("float32", "f", 32, np.float32, "float32")
float64 = dtype._make("float64", "f", 64, np.float64, "float64")
complex64 = dtype._make("complex64", "c", 64, np.complex64, "complex64")
complex128 = dtype._make("complex128", "c", 128, np.complex128, "complex128")
bfloat16._np = np.dtype(np.float32)
half = float16
float = float32
double = float64

BEYOND = (bfloat16, float8_e4m3fn, float8_e5m2)
"""The types that PopXL lacks, which `popxl.extensions` has. No table that programs walk through
names them.
"""
_BY_NP: dict[Any, dtype] = {t._np: t for t in _BY_NAME.values() if t is not bfloat16}
_NP_TO_POPXL: dict[Any, dtype] = {np_type: t for np_type, t in _BY_NP.items() if t not in BEYOND}
_PT_TO_POPXL: dict[str, dtype] = {
    f"torch.{t._torch_name}": t for t in _BY_NAME.values() if t._torch_name and t not in BEYOND
}

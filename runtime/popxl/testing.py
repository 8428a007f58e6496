"""Lists of element types for tests."""

from popxl import dtypes


def get_all_dtypes() -> list[dtypes.dtype]:
    """Every type of PopXL but bool."""
    return [t for t in dtypes._BY_NAME.values() if t not in (dtypes.bool, *dtypes.BEYOND)]


def get_all_int_dtypes(
    include_signed: bool = True, include_unsigned: bool = True
) -> list[dtypes.dtype]:
    """Integer types, filtered by sign."""
    return [
        t
        for t in get_all_dtypes()
        if t.is_int and (include_signed if t.is_signed else include_unsigned)
    ]

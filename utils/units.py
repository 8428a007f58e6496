"""Quantities as people read them."""

_SI = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def si(value: float, unit: str = "") -> str:
    """A quantity with three figures and a decimal prefix: `si(2.65e12, "FLOP/s")` is "2.65
    TFLOP/s".
    """
    power = 0
    while abs(value) >= 999.5 and power < len(_SI) - 1:
        value /= 1000.0
        power += 1
    suffix = f"{_SI[power]}{unit}"
    return f"{_three_figures(value)} {suffix}".rstrip()


def bytes_text(count: float) -> str:
    """A number of bytes with three figures and a binary prefix: `bytes_text(3 * 2**30)` is "3.00
    GiB".
    """
    power = 0
    while abs(count) >= 1023.5 and power < len(_BINARY) - 1:
        count /= 1024.0
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{_three_figures(count)} {_BINARY[power]}"


def counted(number: int, thing: str) -> str:
    """A number of things: `counted(1, "record")` is "1 record", `counted(2, "record")` "2
    records".
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time span in its two largest units, such as "3 h 5 min"; short ones with decimals, in s, ms
    or µs.
    """
    if 0 < seconds < 0.9995e-3:
        return f"{_three_figures(seconds * 1e6)} µs"
    if 0 < seconds < 0.0995:
        return f"{_three_figures(seconds * 1e3)} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _three_figures(value: float) -> str:
    size = abs(value)
    if value == int(value) and size < 1000 and size >= 100:
        return f"{value:.0f}"
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"

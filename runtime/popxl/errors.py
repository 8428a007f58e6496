"""The exceptions that the API raises. Each is also a ``ValueError`` or ``TypeError``, as PopXL's
callers expect.
"""

from popart import popart_exception, poplar_application_runtime_error


class UndefinedValue(Exception):
    """A tensor's virtual device or tile set was asked for, but is not known."""


class ShapeError(popart_exception, ValueError):
    """Operands whose shapes do not fit each other or the op."""


class DTypeError(popart_exception, TypeError):
    """Operands whose element types do not fit each other or the op."""


class GraphError(popart_exception, ValueError):
    """A program that cannot be built or transformed: a foreign tensor, a missing gradient, a
    mismatched call.
    """


class ScaleError(poplar_application_runtime_error, ValueError):
    """A scale of float8 that is out of range when a program runs."""


class RemoteMemoryError(RuntimeError):
    """Remote memory in files: too little host memory or disk space, or a file that cannot be read
    or written.
    """

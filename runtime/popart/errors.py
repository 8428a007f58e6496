"""Exceptions of the native layer, under the names by which programs catch them."""


class popart_exception(Exception):  # noqa: N801, N818 - the name that programs catch
    """A program that cannot be built, transformed or prepared."""


class poplar_application_runtime_error(RuntimeError):  # noqa: N801 - the name that programs catch
    """A program that stopped while it ran."""

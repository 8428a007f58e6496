"""Errors of data; `DataError` itself is the configuration's, which reads their description."""

from popxl_gpt.config.errors import DataError

__all__ = ["DamagedRecordError", "DataError"]


class DamagedRecordError(DataError):
    """A record whose checksum is wrong."""

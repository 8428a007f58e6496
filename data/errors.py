"""Errors of data; `DataError` itself is the configuration's, which reads their description."""

from popxl_gpt.utils.errors import DataError

__all__ = ["DamagedRecordError", "DataError", "NoTextError"]


class DamagedRecordError(DataError):
    """A record whose checksum is wrong."""


class NoTextError(DataError):
    """A file that holds no text, or not the text that is asked for, from some place on."""

"""Errors of data that others catch."""

from popxl_gpt.utils.errors import DataError


class DamagedRecordError(DataError):
    """A record whose checksum is wrong."""


class NoTextError(DataError):
    """A file that holds no text, or not the text that is asked for, from some place on."""

"""The one error of this room."""

from popxl_gpt.config import UserError


class DataError(UserError):
    """Input that cannot be used. The message says where, what was found, what was expected and what
    to do.
    """


class DamagedRecordError(DataError):
    """A record whose checksum is wrong."""

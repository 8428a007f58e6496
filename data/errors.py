"""The one error of this room."""


class DataError(ValueError):
    """Input that cannot be used. The message says where, what was found, what was expected and what to do."""

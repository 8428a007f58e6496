"""Errors that are the user's to fix, and how an entry point reports them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

USER_ERROR_EXIT_CODE = 2


class UserError(ValueError):
    """Something the user gave is wrong: told in one message, without a traceback, with exit code 2."""


class ConfigError(UserError):
    """One or more problems in a configuration.

    Attributes:
        problems: one sentence each, in the order in which they were found.
    """

    def __init__(self, problems: Sequence[str], where: str = "configuration"):
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1))
            message = f"{where}: {len(self.problems)} problems.\n{lines}"
        super().__init__(message)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` in the body into its message on stderr and exit code 2; every other error travels on."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR_EXIT_CODE)

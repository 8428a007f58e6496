"""Fixtures of several test files."""

from ways import by, threads  # noqa: F401

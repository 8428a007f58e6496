"""Fixtures of several test files."""

from helpers.products import by, threads  # noqa: F401

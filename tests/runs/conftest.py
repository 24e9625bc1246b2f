"""Fixtures of a run with made-up numbers."""

from made_up import config, made, run  # noqa: F401

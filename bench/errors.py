"""Errors that a user can cause: one line that says what is wrong and what would fix it."""

from __future__ import annotations

from bench.text import visible

USAGE_EXIT_CODE = 2
"""Exit status of a command that was asked for something it cannot do."""


class UsageError(ValueError):
    """A mistake in what the user asked for; the message names it and the fix, on one line.

    Control characters of what it repeats are made visible, so that it can go to a terminal as it is.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(visible(message))


class UserCodeError(UsageError):
    """The user's own code raised; its traceback (the cause) is shown above the message."""

"""Errors that a user can cause: one line that says what is wrong and what would fix it."""

from __future__ import annotations

USAGE_EXIT_CODE = 2
"""Exit status of a command that was asked for something it cannot do."""


class UsageError(ValueError):
    """A mistake in what the user asked for; the message names it and the fix, on one line."""


class UserCodeError(UsageError):
    """The user's own code raised; its traceback (the cause) is shown above the message."""

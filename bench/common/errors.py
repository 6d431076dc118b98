"""Errors that a user can cause, and the exit codes of all commands."""

from __future__ import annotations

from enum import IntEnum

from .text import escape_controls, shorten_message


class ExitCode(IntEnum):
    """The one table of exit codes; every command ends with one of these.

    That of a run is decided in `bench/run/close.py`, or in `conductor.py` where it broke off; that of a gate
    in `bench/gate/decide.py`.
    """

    OK = 0
    """Done; nothing is wrong."""
    FAILED = 1
    """Done, and the answer is bad: a regression, a case that a candidate lacks, an unfit machine."""
    USAGE = 2
    """The command was asked for something that it cannot do."""
    UNDECIDED = 3
    """Two runs, or a run and its resumption, were measured under different conditions, or noise hides all."""
    NOT_MEASURED = 4
    """The request could not be measured: every case of a mode failed, or the ranks die."""
    BUG = 70
    """An exception that nobody expected (EX_SOFTWARE); its traceback is on stderr."""
    START_AGAIN = 75
    """A rank under a launcher (EX_TEMPFAIL) can go no further, and all of them are to start again."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; what was measured is kept."""


class UsageError(ValueError):
    """A mistake in what the user asked for; the message names it and the fix, on one line.

    Control characters of what it repeats are made visible, so that it can go to a terminal as it is, and long
    values are cut.
    """

    exit_code = ExitCode.USAGE
    label = "error"
    """Beginning of the line on the terminal, after the command's name."""

    def __init__(self, message: str = "") -> None:
        super().__init__(escape_controls(shorten_message(message)))


class UserCodeError(UsageError):
    """The user's own code raised; its traceback (the cause) is shown above the message."""


USER_EXCEPTIONS = (Exception, SystemExit, KeyboardInterrupt)
"""Exceptions of a user's code: a model that calls `sys.exit(0)` is no success, and ranks get no Ctrl-C."""


class NotMeasuredError(UsageError):
    """A request that could not be measured."""

    exit_code = ExitCode.NOT_MEASURED


class NotComparableError(UsageError):
    """Two measurements were not made under the same conditions."""

    exit_code = ExitCode.UNDECIDED
    label = "not comparable"


class NothingToCompareError(NotComparableError):
    """The baseline has nothing to compare the candidate with."""

    label = "nothing to compare"

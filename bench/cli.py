"""What all commands share: one parser, one error boundary, text to values, tables and JSON on stdout."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import json
import math
import os
import re
import shlex
import stat
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from .errors import ExitCode, UsageError, UserCodeError
from .text import visible, visible_lines

T = TypeVar("T")

TYPED_ENV = "_DDP_BENCH_TYPED"
"""How the user called the command, for the commands that messages name; no prefix of a condition of a run."""

PIPED_WIDTH = 180
"""Columns of a table that is not on a terminal, where rich would wrap at 80: names of cases may be long."""

MOST_TOML_BYTES = 2**20

LEAST_DURATION_S = 0.1
"""Shortest duration that an option takes: nothing that is measured here is done sooner."""

_DURATION_S = {"s": 1.0, "m": 60.0, "h": 3600.0}

UNRECOGNIZED = "unrecognized arguments: "
"""What argparse says of words that it knows nothing of."""


class Parser(argparse.ArgumentParser):
    """A command line that raises UsageError instead of leaving the process.

    Options are written out: an abbreviation in a script would break with the next option.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, which names the command's help, and the option that was meant."""
        if message.startswith(UNRECOGNIZED):
            word = message.removeprefix(UNRECOGNIZED).partition(" ")[0].partition("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{message}; see {self.prog} --help")


def command(name: str = "", *arguments: str) -> str:
    """Write a command of ours to be pasted, in the form that the user typed, as `python -m bench.run`."""
    typed = os.environ.get(TYPED_ENV)
    module = "report" if name == "report" else f"bench.{name}".rstrip(".")
    words = [*typed.split(), *filter(None, [name])] if typed else ["python", "-m", module]
    return " ".join(quoted(word) for word in (*words, *arguments))


def quoted(word: str) -> str:
    """A word as the shell takes it; one with control characters in `$''`, on one line."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = visible(word.replace("\\", "\\\\").replace("'", "\\'"))
    return f"$'{escaped}'"


class _Current:
    """The command that this process runs."""

    name = "run"


def speaker(name: str | None = None) -> str:
    """Return what lines of a command on stderr begin with, as `bench.run`; by default of this process's."""
    return command(_Current.name if name is None else name).removeprefix("python -m ")


def say(line: str) -> None:
    """Write a line of this command to stderr, with the control characters of what it repeats visible."""
    print(visible(f"{speaker()}: {line}"), file=sys.stderr, flush=True)


def guarded(name: str, work: Callable[[], int]) -> int:
    """Do `work` of command `name` and return its exit code; an error that a user can mend is one line."""
    before, _Current.name = _Current.name, name
    _keep_outputs()
    try:
        return _all_written(work())
    except UsageError as error:
        notes = getattr(error, "__notes__", [])  # its traceback, of another process
        if isinstance(error, UserCodeError) and error.__cause__ is not None:
            notes = [*traceback.format_exception(error.__cause__), *notes]
        print(visible_lines("".join(notes)), end="", file=sys.stderr)
        say(f"{error.label}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        _Current.name = before


class _Output(io.FileIO):
    """Where a command writes: what cannot be written is lost, and the work goes on."""

    lost: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.lost = error
            return len(content)


class _Text(io.TextIOWrapper):
    def close(self) -> None:
        self.flush()  # a user's code may close sys.stdout


def _keep_outputs() -> None:
    """Write to descriptors of our own, which nobody closes, and replace characters that an encoding lacks."""
    for name in ("stdout", "stderr"):
        given = getattr(sys, name)
        if given is getattr(sys, f"__{name}__"):
            end = _Output(os.dup(given.fileno()) if given else os.devnull, "w")  # None: closed from the start
            buffer, encoding = io.BufferedWriter(end), given.encoding if given else None
            setattr(sys, name, _Text(buffer, encoding, "replace", line_buffering=True))


def _all_written(code: int) -> int:
    """`code`; raises UsageError where standard output did not take all. Its reader may leave, as `head`."""
    sys.stdout.flush()
    end = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(end, _Output) and end.lost is not None and end.lost.errno != errno.EPIPE:
        why, end.lost = end.lost.strerror, None  # said once
        raise UsageError(f"standard output cannot be written: {why}; write it to another place")
    return code


def print_table(table: Table, width: int = PIPED_WIDTH) -> None:
    """Print a table on stdout, `width` wide at most where that is no terminal."""
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else width).print(table)


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON of a value or a record, in ASCII; NaN and infinity, which JSON lacks, are null.

    Not by msgspec: names of files and hosts may hold bytes that are no UTF-8, as lone surrogates.
    """
    return json.dumps(_finite(msgspec.to_builtins(value)), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known word, then all of them."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names)}"


def choice(known: Iterable[str]) -> Callable[[str], str]:
    """A parser that takes one of `known`."""
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise UsageError(f"unknown value {text!r}; {did_you_mean(text, names)}")
        return text

    return parse


def csv(item: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A parser of comma-separated values without duplicates."""

    def parse(text: str) -> tuple[T, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise UsageError(f"empty value in {text!r}; separate values by single commas, as in 1,2,4")
        values = tuple(item(part) for part in parts)
        twice = [str(value) for i, value in enumerate(values) if value in values[:i]]
        if twice:
            raise UsageError(f"{twice[0]} is given twice in {text!r}; name each value once")
        return values

    return parse


def named(key: str, parse: Callable[[str], T], text: str, *, where: str = "") -> T:
    """`parse` of `text`; its UsageError begins with `where` and names the option `key`."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{where}--{key.replace('_', '-')}: {error}") from None


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise UsageError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def switch(text: str) -> bool:
    """`on` or `off`, also `true` and `false`."""
    values = {"on": True, "true": True, "off": False, "false": False}
    if text.lower() not in values:
        raise UsageError(f"{text!r} is neither on nor off")
    return values[text.lower()]


def duration_s(text: str) -> float:
    """`90s`, `10m` or `1.5h`, in seconds. A bare number could be seconds or minutes and is refused."""
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise UsageError(f"{text!r} has no unit; write {text}s or {text}m")
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh])", text)
    seconds = float(match[1]) * _DURATION_S[match[2]] if match else 0.0
    if seconds < LEAST_DURATION_S:
        raise UsageError(
            f"{text!r} is not a duration of {LEAST_DURATION_S:g}s or more; write it as 90s, 10m or 1.5h"
        )
    return seconds


def fraction(text: str) -> float:
    """`2%` or `0.02`, as a fraction between 0 and 1."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 < value < 1:
        raise UsageError(f"{text!r} is not a share between 0 and 1; write it as 2% or 0.02")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """A `--config` file as a dictionary. Raises UsageError where it cannot be read or is no TOML."""
    try:
        # A pipe without a writer would hold the command up for ever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MOST_TOML_BYTES + 1) if is_regular else b""
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; name a readable TOML file") from None
    except ValueError as error:
        raise UsageError(f"--config {str(path)!r}: {error}; name a readable TOML file") from None
    if not is_regular:
        raise UsageError(f"--config {path} is no regular file; name a TOML file")
    if len(content) > MOST_TOML_BYTES:
        raise UsageError(f"--config {path} has more than {MOST_TOML_BYTES} bytes; name a file of settings")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise UsageError(f"--config {path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"--config {path} is not valid TOML: {error}") from None

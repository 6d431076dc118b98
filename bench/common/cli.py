"""The command line of all commands: how one is parsed, named and ended, and what it says to the user."""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import io
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

from .errors import ExitCode, UsageError, UserCodeError
from .process import make_package_command
from .text import escape_controls, escape_lines

TYPED_ENV = "_DDP_BENCH_TYPED"
"""Command as the user typed it, for the commands that messages name; no prefix of a condition of a run."""

UNRECOGNIZED = "unrecognized arguments: "
"""Argparse's message for words that it knows nothing of."""


HELP_WIDTH = 80
"""Columns of the texts around a help's options."""


class WholeHelp(argparse.Action):
    """An option that prints every option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the help and leave."""
        assert isinstance(parser, Parser)
        parser.common = ()
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A command line that raises UsageError instead of leaving the process.

    Options are written out: an abbreviation in a script would break with the next option. `--help` shows the
    options `common` alone, by their names in the result, where there are more; `--help-all` shows all, with
    `details`. An example is what follows the command, with its meaning; one that begins with `$ ` is whole.
    """

    def __init__(
        self,
        name: str,
        description: str | None,
        *,
        examples: Sequence[tuple[str, str]],
        exit_codes: str,
        common: Sequence[str] = (),
        details: str = "",
        usage: str | None = None,
    ) -> None:
        prog = format_command(name)
        shown = [(a.removeprefix("$ ") if a.startswith("$ ") else f"{prog} {a}", b) for a, b in examples]
        width = max(len(line) for line, meaning in shown if meaning)
        codes = textwrap.fill(f"Exit status: {exit_codes}", HELP_WIDTH, break_on_hyphens=False)
        lines = (f"  {line:<{width}}   {meaning}".rstrip() for line, meaning in shown)
        self.closing = "\n".join(["examples:", *lines, "", codes])
        self.details = textwrap.fill(details, HELP_WIDTH, break_on_hyphens=False)
        self.common = common
        super().__init__(
            prog=prog,
            usage=usage,
            description=textwrap.fill(" ".join((description or "").split()), HELP_WIDTH),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # `--threshold -5%` is a value that is refused in words, not an option.
        self._negative_number_matcher = re.compile(r"-[.\d].*")
        every = "every option" if common else argparse.SUPPRESS
        self.add_argument("--help-all", action=WholeHelp, nargs=0, default=argparse.SUPPRESS, help=every)

    def format_help(self) -> str:
        """Write the help, of the common options where there are some; it is the last that a parser does."""
        for one in self._actions:
            if self.common and one.option_strings and one.dest not in ("help", "help_all", *self.common):
                one.help = argparse.SUPPRESS
        self.epilog = self.closing if self.common else f"{self.closing}\n\n{self.details}"
        return super().format_help().rstrip("\n") + "\n"

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, which names the command's help, and the option that was meant."""
        if message.startswith(UNRECOGNIZED):
            word = message.removeprefix(UNRECOGNIZED).partition(" ")[0].partition("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{message}; see {self.prog} --help")


def format_command(name: str = "", *arguments: str) -> str:
    """Write a command of ours to be pasted, in the form that the user typed, as `python -m bench.run`."""
    typed = os.environ.get(TYPED_ENV)
    module = "report" if name == "report" else f"bench.{name}".rstrip(".")
    words = [*typed.split(), *filter(None, [name])] if typed else ["python", "-m", module]
    return " ".join(quote_word(word) for word in (*words, *arguments))


@dataclass(frozen=True)
class NextStep:
    """The next thing to do, and the command that does it; empty where none of ours does."""

    why: str
    command: str


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the words that name a command of ours, with its launcher, from its options."""
    for i, (before, word) in enumerate(itertools.pairwise(words), start=1):
        is_module = before in ("-m", "--module") and word.removeprefix("ddp_bench.").startswith("bench.")
        if is_module or (PurePath(before).name in ("ddp-bench", "ddp_bench") and word.isalpha()):
            return [*words[: i + 1]], [*words[i + 1 :]]
    return [], [*words]


def quote_word(word: str) -> str:
    """Write a word as the shell takes it: on one line, in `$''` where characters or bytes do not print."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{''.join(c if c.isprintable() else _escape_bytes(c) for c in escaped)}'"


def _escape_bytes(character: str) -> str:
    """Write a character as its bytes; Python makes one of each byte that it cannot decode."""
    is_byte = "\udc80" <= character <= "\udcff"
    found = character.encode(errors="surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in found)


class _Current:
    """The command that this process runs."""

    name = "run"


def get_message_prefix(name: str | None = None) -> str:
    """Return what lines of a command on stderr begin with, as `bench.run`; by default of this process's."""
    return format_command(_Current.name if name is None else name).removeprefix("python -m ")


def print_message(line: str) -> None:
    """Write a line of this command to stderr, with the control characters of what it repeats visible."""
    print(escape_controls(f"{get_message_prefix()}: {line}"), file=sys.stderr, flush=True)


def run_command(name: str, work: Callable[[], int]) -> int:
    """Do `work` of command `name` and return its exit code; an error that a user can mend is one line."""
    before, _Current.name = _Current.name, name
    _keep_outputs()
    try:
        return _check_written(work())
    except UsageError as error:
        notes = getattr(error, "__notes__", [])  # its traceback, of another process
        if isinstance(error, UserCodeError) and error.__cause__ is not None:
            notes = [*traceback.format_exception(error.__cause__), *notes]
        print(escape_lines("".join(notes)), end="", file=sys.stderr)
        print_message(f"{error.label}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except ModuleNotFoundError as error:
        print_message(
            f"error: {sys.executable} has no {error.name}; install ddp-bench there with python -m pip"
        )
        return ExitCode.USAGE
    except Exception as error:  # noqa: BLE001 - Python would end with 1, which says that the answer is bad
        print(escape_lines("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        print_message(
            f"error: a bug of ddp-bench stopped it: please report the lines above ({type(error).__name__})"
        )
        return ExitCode.BUG
    finally:
        _Current.name = before


def make_main(name: str) -> Callable[[Callable[[list[str]], int]], Callable[..., int]]:
    """Make what does the work of a command its `main`, of the words given or else of those typed."""

    def wrap_work(work: Callable[[list[str]], int]) -> Callable[..., int]:
        def main(argv: Sequence[str] | None = None) -> int:
            arguments = list(sys.argv[1:] if argv is None else argv)
            return run_command(name, lambda: work(arguments))

        return functools.update_wrapper(main, work)

    return wrap_work


class _Output(io.FileIO):
    """Output file of a command: what cannot be written is lost, and the work goes on."""

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


def _check_written(code: int) -> int:
    """`code`; raises UsageError where standard output did not take all. Its reader may leave, as `head`."""
    sys.stdout.flush()
    end = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(end, _Output) and end.lost is not None and end.lost.errno != errno.EPIPE:
        why, end.lost = end.lost.strerror, None  # said once
        raise UsageError(f"standard output cannot be written: {why}; write it to another place")
    return code


@functools.cache
def get_version(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    from importlib import metadata  # a part of each command's start-up that few need

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


TORCHRUN = ["-m", "torch.distributed.run"]


def resolve_command(words: Sequence[str], executable: str) -> list[str]:
    """Return the command that the words after `--` mean; `executable` is what `python` stands for.

    The interpreter is named, because under sudo PATH may know another one or no torchrun. Commands
    of ours are ours in any folder. Raises UsageError where there is no command, or no such program.
    """
    first, *rest = words or [""]
    name = PurePath(first).name
    if first in {"python", "python3", executable, PurePath(executable).name} and rest:
        module = rest[1] if rest[0] == "-m" and len(rest) > 1 else ""
        if own := re.fullmatch(r"bench(?:\.(\w+))?|(report)", module):
            return make_package_command(*filter(None, own.groups()), *rest[2:], python=executable)
        return [executable, *rest]
    if name == "torchrun":
        return [executable, *TORCHRUN, *rest]
    if name == "ddp-bench" or re.fullmatch(r"bench\.\w+", first):
        own_words = rest if name == "ddp-bench" else [first.removeprefix("bench."), *rest]
        return make_package_command(*own_words, python=executable)
    if not rest and name.startswith("python"):
        raise UsageError(f"after -- comes what {name} is to run too, as in -- {name} train.py")
    if not first or shutil.which(first) is None:
        given = f"no program {first!r} is found" if first else "nothing is there"
        raise UsageError(f"after -- comes a command, as in -- python train.py, but {given}")
    return [first, *rest]

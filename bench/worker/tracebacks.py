"""What an error tells of where it came from: its whole traceback, and the line of the user's code."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch

from ..package import OWN_FOLDERS

MOST_CHARACTERS = 32_768
"""Of one rank's traceback: some 300 frames. Rank 0 receives as much from each that failed."""

MOST_CHAINED = 20
"""Errors that are looked through, one the cause of another; a chain of that length is a loop of retries."""

_QUOTED = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in (\S+)', re.MULTILINE)
"""A frame in an error's message: of a replica's thread, a loader's process, or what the compiler traced."""

_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")
"""Name of what the compiler makes of the rest of a function behind a graph break."""

_INSTALLED = ("site-packages", "dist-packages")
_SUITE = tuple(str(folder) + os.sep for folder in OWN_FOLDERS)
_TORCH = os.path.realpath(Path(torch.__file__).parent) + os.sep
_PYTHON = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))


class Frame(NamedTuple):
    """A line that was being executed."""

    path: str
    line: int
    function: str


class Owner(IntEnum):
    """Whose code a file is; the first that an error passed through is named."""

    USER = 0
    LIBRARY = 1
    """Installed, but neither PyTorch nor this suite."""
    OTHER = 2
    """PyTorch, this suite, Python itself, or generated code."""


def formatted(error: BaseException) -> str:
    """The traceback of an error and of its causes; of more than `MOST_CHARACTERS` the middle is left out."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001 - an error class of the user may do anything
        text = f"{type(error).__name__}, whose traceback cannot be written ({type(broken).__name__})\n"
    return bounded(text)


def bounded(text: str) -> str:
    """A traceback, or stacks, without its middle where it is longer than `MOST_CHARACTERS`."""
    if len(text) <= MOST_CHARACTERS:
        return text
    head = MOST_CHARACTERS // 4  # what raised stands at the end
    tail = MOST_CHARACTERS - head
    return f"{text[:head]}\n… {len(text) - head - tail:,d} characters are left out …\n{text[-tail:]}"


def place_of(error: BaseException) -> str:
    """`file:line, in function` of the innermost frame of the user's code, else of the innermost frame.

    Empty for an error that this suite's own code makes: its message says all.
    """
    chain = list(_chain(error))
    is_own = _is_own(error)
    for owner in (Owner.USER,) if is_own else (Owner.USER, Owner.LIBRARY):
        for one in chain:
            found = [frame for frame in _frames(one) if owner_of(frame.path) == owner]
            if found:
                return _written(found[-1])
    frames = [] if is_own else _frames(chain[0])
    return _written(frames[-1]) if frames else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, the first of those that it groups, then what it was raised from, and so on."""
    one: BaseException | None = error
    seen = 0
    while one is not None and seen < MOST_CHAINED:
        seen += 1
        if isinstance(one, BaseExceptionGroup):
            yield from _chain(one.exceptions[0])
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _frames(error: BaseException) -> list[Frame]:
    """Frames outermost first; those in the message come last, as they are of what was called."""
    found = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return found + [Frame(path, int(line), name) for path, line, name in _QUOTED.findall(text_of(error))]


def text_of(error: BaseException) -> str:
    """The message of an error, whose class may be the user's."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever __str__ raises
        return ""


@functools.lru_cache(maxsize=1024)
def owner_of(path: str) -> Owner:
    """Whose code is in a file."""
    if path.startswith("<"):
        return Owner.OTHER
    real = os.path.realpath(path)
    parts = Path(real).parts
    generated = any(part.startswith("torchinductor") for part in parts) or real.startswith(_cache())
    if generated or real.startswith((*_SUITE, _TORCH)):
        return Owner.OTHER
    if any(name in parts for name in _INSTALLED):
        return Owner.LIBRARY
    return Owner.OTHER if real.startswith(_PYTHON) else Owner.USER


def _cache() -> tuple[str, ...]:
    """Where the compiler keeps the code that it generates, if it was told to keep it elsewhere."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return tuple(os.path.realpath(os.environ[name]) + os.sep for name in names if os.environ.get(name))


def _is_own(error: BaseException) -> bool:
    """Whether its class is one of this suite's; a user's package may be called `models`, too."""
    file = getattr(sys.modules.get(type(error).__module__), "__file__", None)
    return file is not None and os.path.realpath(file).startswith(_SUITE)


def _written(frame: Frame) -> str:
    resumed = _RESUMED.fullmatch(frame.function)
    return f"{shown_path(frame.path)}:{frame.line}, in {resumed[1] if resumed else frame.function}"


def shown_path(path: str) -> str:
    """A path relative to the current folder, or else its last two parts: no folder of a user's home."""
    if path.startswith("<"):
        return path
    real, here = Path(os.path.realpath(path)), Path(os.path.realpath("."))
    return str(real.relative_to(here)) if real.is_relative_to(here) else str(Path(*real.parts[-2:]))

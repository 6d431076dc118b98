"""Tracebacks of users' code: bounded, and where they point."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary, TracebackException

from .process import INSTALL_FOLDERS, PACKAGE_FOLDERS

MAX_CHARACTERS = 32_768
"""Characters of one rank's traceback: some 300 frames. Rank 0 receives as much from each that failed."""

_QUOTED = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in (\S+)', re.MULTILINE)
"""A frame in an error's message: of a replica's thread, a loader's process, or what the compiler traced."""

LIBRARY_FOLDERS = PACKAGE_FOLDERS | {
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")
}
"""Folders of code that is no user's: this suite's and Python's."""


def format_traceback(error: BaseException) -> str:
    """Format the traceback of an error and its causes; cut the middle of more than `MAX_CHARACTERS`."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001 - an error class of the user may do anything
        text = f"{type(error).__name__}, whose traceback cannot be written ({type(broken).__name__})\n"
    return cut_traceback(text)


def cut_traceback(text: str) -> str:
    """Return a traceback, or stacks, without its middle where it is longer than `MAX_CHARACTERS`."""
    if len(text) <= MAX_CHARACTERS:
        return text
    head = MAX_CHARACTERS // 4  # what raised stands at the end
    tail = MAX_CHARACTERS - head
    return f"{text[:head]}\n… {len(text) - head - tail:,d} characters are left out …\n{text[-tail:]}"


def find_user_code(error: BaseException) -> str:
    """`file:line, in function` of the innermost frame of the user's code, else of its causes; empty without.

    The user's is what is neither installed nor Python's, this suite's or generated.
    """
    for one in _yield_causes(TracebackException.from_exception(error, lookup_lines=False)):
        quoted = [FrameSummary(path, int(line), name) for path, line, name in _QUOTED.findall(str(one))]
        if found := [frame for frame in (*one.stack, *quoted) if is_users(frame.filename)]:
            return f"{shorten_path(found[-1].filename)}:{found[-1].lineno}, in {found[-1].name}"
    return ""


def _yield_causes(one: TracebackException | None) -> Iterator[TracebackException]:
    """Yield an error, the first of those that it groups, then what it was raised from, and so on."""
    while one is not None:
        if one.exceptions:
            yield from _yield_causes(one.exceptions[0])
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def get_message(error: BaseException) -> str:
    """Return the message of an error, whose class may be the user's."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever __str__ raises
        return ""


def is_users(path: str) -> bool:
    """Tell whether the code of a file is the user's."""
    real = Path(os.path.realpath(path))
    is_library = not (INSTALL_FOLDERS.isdisjoint(real.parts) and LIBRARY_FOLDERS.isdisjoint(real.parents))
    return not (path.startswith("<") or is_library or "torchinductor" in str(real))


def shorten_path(path: str) -> str:
    """Return a path relative to the current folder, or its last two parts: no folder of a user's home."""
    real, here = Path(os.path.realpath(path)), Path(os.path.realpath("."))
    return str(real.relative_to(here)) if real.is_relative_to(here) else str(Path(*real.parts[-2:]))

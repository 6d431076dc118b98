"""Imports a user's script: as if it were alone, and with one line where it does more than define a model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..bench.common.errors import USER_EXCEPTIONS, UsageError
from .workload import format_error

GUARD = 'put what is not the model\'s under `if __name__ == "__main__":`'

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Variables by which a script would meet the other ranks, and wait for them, while they do something else."""


def import_alone(name: str, folder: str) -> ModuleType:
    """Import a module with its file as the whole command line.

    Raises UsageError where it ends the process or makes a process group, and what else it raises.
    """
    was_initialized = dist.is_initialized()
    argv, sys.argv = sys.argv, [name]
    held = _HeldStderr()
    try:
        with _hide_rendezvous(), held:
            spec = importlib.util.find_spec(name)
            sys.argv = [(spec and spec.origin) or name]
            module = importlib.import_module(name)
    except SystemExit as error:
        last = " ".join((held.told or [f"code {error.code}"])[-1].split())
        where = _find_error_place(error, folder, name)
        raise UsageError(f"{where} ends the process on import ({last}); {GUARD}") from None
    except USER_EXCEPTIONS as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any(frame.filename == dist.distributed_c10d.__file__ for frame in frames):
            raise
        where, why = _find_error_place(error, folder, name), format_error(error)
        raise UsageError(f"{where} uses a process group on import ({why}); {GUARD}") from None
    finally:
        sys.argv = argv
    if dist.is_initialized() and not was_initialized:
        dist.destroy_process_group()
        raise UsageError(f"module {name} makes a process group on import, as each mode does; {GUARD}")
    return module


def _find_error_place(error: BaseException, folder: str, name: str) -> str:
    """Name file and line of the user's code that raised."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
    return f"{os.path.relpath(own[-1].filename, folder)}:{own[-1].lineno}" if own else f"module {name}"


@contextlib.contextmanager
def _hide_rendezvous() -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in RENDEZVOUS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


class _HeldStderr:
    """Stands for stderr within it, where argparse says why it ends the process: what is written waits.

    After it, it passes on what it kept, unless the process was to end, and then all that comes: handlers of
    logging that were made within it go on.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self._stream, self._holds = sys.stderr, True

    def __enter__(self) -> None:
        stand_in: Any = self
        sys.stderr = stand_in

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        sys.stderr, self._holds = self._stream, False
        if kind is None or not issubclass(kind, SystemExit):
            self._stream.write("".join(self.told))

    def write(self, text: str) -> int:
        if not self._holds:
            return self._stream.write(text)
        self.told.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

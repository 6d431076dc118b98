"""Code of the processes that train: it uses the standard library and the user's torch, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .hooks import install_hooks
from .private import hide_from_compiler as hide
from .rows import Rows
from .steps import Watch

watch: Watch | None = None
"""The watch of this process, once torch has been imported."""


def install(config_as_json: str) -> None:
    """Install the hooks in this process, once."""
    global watch  # noqa: PLW0603 - a process has one watch
    if watch is None:
        config = json.loads(config_as_json)
        with note_errors(config):
            watch = Watch(config)
            install_hooks(watch)


def hide_from_compiler(_config_as_json: str) -> None:
    """Keep torch's compiler from compiling the hooks, once it has been imported."""
    if watch is not None:
        with note_errors(watch.config):
            hide(watch)


@contextmanager
def note_errors(config: dict[str, Any]) -> Iterator[None]:
    """Say in a row why this torch is not watched as others are: training goes on, whatever is raised."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is
        Rows(config).note(f"this torch cannot be watched: {type(error).__name__}: {error}")

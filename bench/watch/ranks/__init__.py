"""Code of the processes that train: it uses the standard library and the user's torch, nothing else."""

from __future__ import annotations

import json
import os
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
        try:
            watch = Watch(config)
            install_hooks(watch)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            note(config, error)


def hide_from_compiler(_config_as_json: str) -> None:
    """Keep torch's compiler from compiling the hooks, once it has been imported."""
    if watch is not None:
        try:
            hide(watch)
        except Exception as error:  # noqa: BLE001 - as above
            note(watch.config, error)


def note(config: dict[str, Any], error: Exception) -> None:
    """Say in a row why this torch is not watched as others are."""
    text = f"this torch cannot be watched: {type(error).__name__}: {error}"
    Rows(config).write(kind="note", rank=int(os.environ.get("RANK", "0")), text=text)

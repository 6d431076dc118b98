"""Code of the processes that train: it uses the standard library and the user's torch, nothing else."""

from __future__ import annotations

import json

from .hooks import install_hooks
from .private import hide_from_compiler
from .rows import Rows
from .steps import Watch

watch: Watch | None = None
"""The watch of this process, once torch has been imported."""


def install(config_as_json: str) -> None:
    """Install the hooks in this process, once; later keep torch's compiler off them, once it is there."""
    global watch  # noqa: PLW0603 - a process has one watch
    config = json.loads(config_as_json)
    try:
        if watch is None:
            watch = Watch(config)
            install_hooks(watch)
        hide_from_compiler(watch)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        Rows(config).note(f"this torch cannot be watched: {type(error).__name__}: {error}")

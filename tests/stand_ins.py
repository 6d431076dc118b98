"""Fakes in the place of what our modules call; torch itself keeps all of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

FOREIGN = ("torch", "torchvision")


class Patch(pytest.MonkeyPatch):
    """Changes modules and classes until the test's end; refuses those of torch.

    Torch calls its own functions inside others, and every version does so differently: a fake there changes
    what nobody meant to change.
    """

    def setattr(self, target: Any, *more: Any, **options: Any) -> None:
        name = target if isinstance(target, str) else _module_of(target)
        if name.split(".")[0] in FOREIGN:
            raise TypeError(
                f"{name} is not ours to change: give the module that calls it a fake by `stand_in`"
            )
        super().setattr(target, *more, **options)


def _module_of(target: Any) -> str:
    if isinstance(target, ModuleType):
        return target.__name__
    return str(target.__module__) if isinstance(target, type) else ""


class Overlay:
    """Stands before a module or class: has names of its own, and all others of what is behind it."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def stand_in(patch: pytest.MonkeyPatch, module: ModuleType, fakes: Mapping[str, Any]) -> None:
    """Give `module` alone other functions, by the dotted names that it calls them by."""
    for dotted, fake in fakes.items():
        first, *path, last = dotted.split(".")
        seen = vars(module)[first]
        if not isinstance(seen, Overlay):
            seen = Overlay(seen)
            patch.setattr(module, first, seen)
        for name in path:
            seen = vars(seen).setdefault(name, Overlay(getattr(seen, name)))
        setattr(seen, last, fake)

"""One device, the plain module: the reference of every ratio."""

from __future__ import annotations

import contextlib

from torch import nn

from bench.modes.base import Mode


class SingleMode(Mode):
    """The module itself."""

    def __init__(self, module: nn.Module) -> None:
        self.wrapped = self.module = module

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to hold back."""
        return contextlib.nullcontext()

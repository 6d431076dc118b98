"""Watches a step for what users do that DDP does not see, so that a wrong gradient has a likely cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..modes import Mode

STEPS = "; a hook that steps in the backward runs before DDP averages: step after the backward"


@contextlib.contextmanager
def outside_of_wrapper(mode: Mode) -> Iterator[list[str]]:
    """Within it, note the modules that are called while the wrapper's forward is not running, by name."""
    names = {id(part): name for name, part in mode.module.named_modules()}
    called: list[str] = []
    depth = 0

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal depth
        if module is mode.wrapped:
            depth += 1
        elif not depth and id(module) in names:
            called.append(names[id(module)])

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    hooks = (
        register_module_forward_pre_hook(enter),
        mode.wrapped.register_forward_hook(leave, always_call=True),
    )
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def why_wrong(called: Sequence[str]) -> str:
    """Say why gradients differ where these modules were called past the wrapper; empty without any."""
    if not called:
        return ""
    what = f"{called[0]} of model.module" if called[0] else "model.module"
    return f"; the loss calls {what}, which DDP does not see: call model(…)"


@contextlib.contextmanager
def steps_in_backward(parameters: Sequence[nn.Parameter], found: list[bool]) -> Iterator[None]:
    """Within it is a backward; note whether it, or a hook that follows a gradient, changes parameters."""
    before = [one._version for one in parameters]
    yield
    hooked = any(getattr(one, "_post_accumulate_grad_hooks", None) for one in parameters)
    found.append(hooked or before != [one._version for one in parameters])

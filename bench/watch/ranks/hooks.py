"""Hooks that the watch puts into torch."""

from __future__ import annotations

from functools import partial, wraps
from time import perf_counter as now
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.distributed import distributed_c10d
from torch.optim import optimizer as optimizers

from . import private
from .steps import Watch

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("scatter_object_list", "send"),
)
"""Functions of torch.distributed in which a rank waits for others."""


def wrap_function(watch: Watch, original: Any, before: Any, after: Any) -> Any:
    """Return a function with what the watch does around it: `after` gets what `before` has returned."""

    @wraps(original)
    def call_watched(*args: Any, **kwargs: Any) -> Any:
        if not watch.is_on or is_compiling():
            return original(*args, **kwargs)
        begin = now()
        begun = watch.guard(before, *args[:1])
        watch.overhead += now() - begin
        try:
            return original(*args, **kwargs)
        finally:
            if begun is not None:
                begin = now()
                watch.guard(after, begun)
                watch.overhead += now() - begin

    return call_watched


def install_hooks(watch: Watch) -> None:
    """Put the watch around the functions of torch that it knows by their signatures."""
    ddp = private.Ddp
    setup = watch.setup
    around = (
        (ddp, "forward", watch.begin_forward, watch.end_part),
        (ddp, "_sync_buffers", partial(watch.begin_part, "buffers"), watch.end_part),
        (private.LoaderIterator, "__next__", watch.begin_batch, watch.end_batch),
        (torch.autograd, "backward", watch.begin_backward, watch.end_backward),
        (ddp, "_post_forward", setup.begin_search, setup.end_search),
        # Within the constructor: a frame of ours around it would take its warnings from the user's line.
        (ddp, "_build_params_for_reducer", setup.keep_made, setup.note_model),
        (private.Replicas, "__init__", setup.keep_made, setup.note_replicas),
        (private.Loader, "__init__", setup.keep_made, setup.note_loader),
    )
    for owner, name, before, after in around:
        setattr(owner, name, wrap_function(watch, getattr(owner, name), before, after))
    private.Join.notify_join_context = staticmethod(wrap_notify_join(watch, private.Join.notify_join_context))
    ddp.register_comm_hook = wrap_register_hook(watch, ddp.register_comm_hook)
    for name in COLLECTIVES:
        time_collective(watch, name)
    before_step = make_step_hook(watch, "begin_optimizer")
    optimizers.register_optimizer_step_pre_hook(before_step)
    optimizers.register_optimizer_step_post_hook(make_step_hook(watch, "end_optimizer"))
    watch.hidden = [ddp.forward, before_step]  # all that are wrapped have one code, and both hooks


def time_collective(watch: Watch, name: str) -> None:
    """Put the watch around a collective that the script calls, where it returns only when it has ended."""
    original = getattr(distributed_c10d, name, None)
    if original is None:
        return
    watched = wrap_function(watch, original, partial(watch.begin_part, "collectives"), watch.end_part)

    @wraps(original)
    def call_collective(*args: Any, **kwargs: Any) -> Any:
        return (original if kwargs.get("async_op") else watched)(*args, **kwargs)

    private.keep_traceable(original, call_collective)
    for module in (torch.distributed, distributed_c10d):
        setattr(module, name, call_collective)


def make_step_hook(watch: Watch, name: str) -> Any:
    """Return a hook of optimizer steps that runs this method of the watch, and that no compiler traces."""

    def hook(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            begin = now()
            watch.guard(getattr(watch, name), optimizer)
            watch.overhead += now() - begin  # of the row that it wrote, in the next step

    return hook


def wrap_notify_join(watch: Watch, original: Any) -> Any:
    """Return `notify_join_context` that keeps the number of ranks where DDP divides by it."""

    @wraps(original)
    def notify(joinable: Any) -> Any:
        work = original(joinable)
        model = watch.models.get(joinable)
        if model is not None:
            model.joined = work if private.has_active_divisor(joinable) else None
        return work

    return notify


def wrap_register_hook(watch: Watch, original: Any) -> Any:
    """Return `register_comm_hook` that runs the user's hook in place of ours, which cannot be taken away."""

    @wraps(original)
    def register(ddp: Any, state: Any, hook: Any) -> Any:
        model = watch.models.get(ddp)
        if model is None or model.hooked_in != id(ddp.reducer) or model.inner is not None:
            return original(ddp, state, hook)
        ddp._check_comm_hook(hook)
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        ddp._comm_hooks.append((hook, state))
        model.inner = state, hook
        return watch.guard(model.observe_only, private.USER_HOOK)

    return register

"""Private names of torch that the watch uses, each checked first; those of a race are in `reducer.py`."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join
from torch.nn import parallel
from torch.utils.data import dataloader

Ddp: Any = parallel.DistributedDataParallel
Join: Any = join.Join
Replicas: Any = parallel.DataParallel
Loader: Any = dataloader.DataLoader
LoaderIterator: Any = dataloader._BaseDataLoaderIter
USER_HOOK = "a communication hook of its own"

FUNCTIONS = (
    (Ddp, "forward", ("self", "inputs", "kwargs")),
    (Ddp, "register_comm_hook", ("self", "state", "hook")),
    (Ddp, "_check_comm_hook", ("self", "hook")),
    (Ddp, "_build_params_for_reducer", ("self",)),
    (Ddp, "_sync_buffers", ("self",)),
    (Ddp, "_post_forward", ("self", "output")),
    (Join, "notify_join_context", ("joinable",)),
    (LoaderIterator, "__next__", ("self",)),
    (torch.autograd, "backward", ("tensors", "grad_tensors", "retain_graph", "create_graph")),
    (dist, "_register_comm_hook", ("reducer", "state", "comm_hook")),
    (torch.autograd.Variable._execution_engine, "queue_callback", ()),
    (getattr(dist, "ProcessGroup", None), "_get_sequence_number_for_group", ("self",)),
)
"""Functions and the names of their first parameters, where they are told."""

ATTRIBUTES = (
    *(
        "reducer",
        "process_group",
        "logger",
        "require_backward_grad_sync",
        "_module_parameters",
        "_comm_hooks",
    ),
    *("_use_python_reducer", "_delay_all_reduce_params", "mixed_precision", "_join_config", "static_graph"),
    *("gradient_as_bucket_view", "find_unused_parameters"),
    *("broadcast_buffers", "bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list"),
)
"""Attributes of a DDP instance."""


def find_differing_names(functions: Iterable[tuple[Any, str, tuple[str, ...]]] = FUNCTIONS) -> list[str]:
    """Return which of these functions this torch lacks, or has with other parameters."""
    return [
        name
        for owner, name, expected in functions
        if not hasattr(owner, name) or list_parameters(owner, name)[: len(expected)] != expected
    ]


def list_parameters(owner: Any, name: str) -> tuple[str, ...]:
    """Return the names of a function's parameters, of one in C++ as its docstring has them."""
    function = getattr(owner, name, None)
    try:
        return tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        text = (getattr(function, "__doc__", None) or "").partition("(")[2].partition(")")[0]
        return tuple(word.partition(":")[0].strip() for word in text.split(","))


def explain_no_hook(ddp: Any) -> str | None:
    """Return why this DDP instance gets no comm hook of ours, or None."""
    missing = [name for name in ATTRIBUTES if not hasattr(ddp, name)]
    if missing:
        return f"this torch has another DDP (it lacks {missing[0]})"
    size = ddp.process_group.size()
    rounds = size & (size - 1) != 0  # dividing is not the same as multiplying with the inverse
    divides = ddp.gradient_as_bucket_view or getattr(ddp, "batched_grad_copy", False)
    reasons = {
        USER_HOOK: ddp._comm_hooks,
        "the Python reducer": ddp._use_python_reducer,
        "a delayed all-reduce of some parameters": ddp._delay_all_reduce_params,
        "DDP's mixed precision": ddp.mixed_precision is not None,
        "an optimizer in the backward": any(
            hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters
        ),
        "one rank": size < 2,
        f"gradients in the buckets on {size} ranks, which DDP rounds in another way": rounds and divides,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def describe_model(ddp: Any) -> dict[str, Any]:
    """Return what a model row says of a DDP instance."""
    parameters = [p for p in ddp.module.parameters() if p.requires_grad]
    names = ("find_unused_parameters", "broadcast_buffers", "static_graph", "gradient_as_bucket_view")
    of_buffers = "forward_sync_buffers"  # later than 2.11; there `broadcast_buffers` is deprecated
    return {
        "parameters": sum(p.numel() for p in parameters),
        "num_bytes": sum(p.numel() * p.element_size() for p in parameters),
        **{name: bool(getattr(ddp, name, False)) for name in names},
        "buffers_argument": of_buffers if hasattr(ddp, of_buffers) else "broadcast_buffers",
    }


def list_gradient_marks(ddp: Any) -> list[tuple[int, int]]:
    """Return marks of a model's gradients, some of which change in a backward that reaches the model."""
    gradients = [p.grad for p in ddp._module_parameters]
    return [(id(g), 0 if g is None else g._version) for g in gradients]


def get_gradient_mark(ddp: Any) -> tuple[int, int] | None:
    """Return the mark of a model's first gradient, which is the same while it is kept; None without one."""
    gradients = (p.grad for p in ddp._module_parameters if p.grad is not None)
    return next(((id(g), g._version) for g in gradients), None)


def is_searching(ddp: Any) -> bool:
    """Tell whether DDP searches each forward's graph for unused parameters."""
    return bool(getattr(ddp, "find_unused_parameters", False) and not getattr(ddp, "static_graph", False))


def has_unused(ddp: Any) -> bool | None:
    """Tell whether a forward on this rank left any parameter unused so far; None where torch does not say.

    Its logger knows the bytes of unused parameters in some iterations, its reducer whether they ever changed.
    """
    with contextlib.suppress(Exception):
        num_bytes = ddp._get_ddp_logging_data()["unused_parameter_size"]
        return bool(num_bytes > 0 or not ddp.reducer._ddp_graph_static())
    return None


def count_collectives() -> int:
    """Count the collectives of the default group so far; 0 where nothing counts them."""
    with contextlib.suppress(Exception):
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    return 0


def describe_loading(iterator: Any) -> tuple[Any, bool, dict[str, Any]]:
    """Return the sampler of a loader's iterator, whether a pass begins, and what a loader row says of it."""
    sampler, yielded = getattr(iterator, "_index_sampler", None), getattr(iterator, "_num_yielded", None)
    names = {"workers": "_num_workers", "pinned": "_pin_memory"}
    return sampler, yielded == 0, {name: getattr(iterator, of, None) for name, of in names.items()}


def has_active_divisor(ddp: Any) -> bool:
    """Tell whether DDP divides by the number of ranks that have not joined, which changes."""
    return bool(ddp._join_config.enable and not getattr(ddp, "_divide_by_initial_world_size", True))


def is_captured() -> bool:
    """Tell whether a CUDA graph is made of this step, which would be a probe at each replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def read_peak_bytes() -> int | None:
    """Return the most bytes that tensors of this process took on its GPU; None where it uses none."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


def count_bytes(buffer: torch.Tensor) -> int:
    """Return the size of a bucket; of a sparse gradient the size of its values."""
    values = buffer._values() if buffer.is_sparse else buffer
    return values.numel() * values.element_size()


def hide_from_compiler(watch: Any) -> None:
    """Keep torch's compiler off the frames of the watch, once it is there; it goes on with what they call."""
    if watch.hidden and "torch._dynamo" in sys.modules:
        from torch._dynamo.eval_frame import skip_code

        while watch.hidden:
            skip_code(watch.hidden.pop().__code__)
        watch.guard = torch.compiler.disable(watch.guard)


def keep_traceable(original: Any, wrapped: Any) -> None:
    """Let torch's compiler trace a wrapped collective as it does the original."""
    module = sys.modules.get("torch.distributed._functional_collectives")  # loaded later it knows no other
    functional = getattr(module, "traceable_collective_remaps", {})
    if original in functional:
        functional[wrapped] = functional[original]


def register_before_end(work: Any) -> None:
    """Have the engine call `work` at the end of this backward: before DDP's end, which is queued later."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(work)
    except RuntimeError:  # outside of a backward
        work()


def register_hook(ddp: Any, state: Any, hook: Any) -> bool:
    """Register a communication hook, but not in `_comm_hooks`, which is pickled; False where there is one."""
    registering: Any = dist
    if "torch._dynamo" in sys.modules:
        hook = torch.compiler.disable(hook)
    try:
        registering._register_comm_hook(ddp.reducer, state, hook)
    except RuntimeError:
        return False
    return True

"""DistributedDataParallel with every constructor setting that changes its speed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from bench.layout import BucketLayout
from bench.modes.base import Mode, Place, Unsupported
from bench.modes.compiled import built_for, compiles_as
from bench.plan import Case

NEVER = 2**31 - 1
"""A logging sample rate that no run reaches."""

OF_TORCH_2_15 = ("batched_grad_copy", "lazy_bucket_allocation")
"""Constructor arguments that an older torch lacks; given only where they are on."""

LOGGED_ITERATIONS = 10
"""DDP samples its own timings in these first iterations whatever the rate."""


class DistributedMode(Mode):
    """One rank of a DDP case; every rank of `group` builds it at the same time."""

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        place: Place,
        group: dist.ProcessGroup | None,
        *,
        equal_replicas: bool = False,
    ) -> None:
        if case.sync_batchnorm:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group=group)
        self.module = module
        self._case = case
        self._group = group
        self._sync_batchnorms = [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]
        with built_for(case):
            self.wrapped = self.ddp = DistributedDataParallel(
                module,
                device_ids=[place.device.index] if place.device.type == "cuda" else None,
                process_group=group,
                init_sync=not equal_replicas,
                **_constructor_settings(case),
            )
        if case.comm_hook != "none":
            _register_hook(self.ddp, case.comm_hook, group)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """DDP's own `no_sync`."""
        return self.ddp.no_sync()

    @contextlib.contextmanager
    def without_communication(self) -> Iterator[None]:
        """`no_sync` without what the forward would still send: buffers, statistics of batch norm."""
        self.ddp.require_forward_param_sync = False
        self._normalise_over(dist.GroupMember.NON_GROUP_MEMBER)
        try:
            with self.ddp.no_sync():
                yield
        finally:
            self.ddp.require_forward_param_sync = True
            self._normalise_over(self._group)

    def _normalise_over(self, group: Any) -> None:
        """Have SyncBatchNorm use the batches of `group`; of this rank alone where it is no member."""
        for layer in self._sync_batchnorms:
            vars(layer)["process_group"] = group  # past Module.__setattr__: this is within the timed block

    def compiles_as_asked(self) -> contextlib.AbstractContextManager[None]:
        """Under the case's `optimize_ddp`."""
        return compiles_as(self._case)

    def bucket_layout(self) -> BucketLayout | None:
        """The layout that DDP's reducer reports, the rebuilt one once it has rebuilt; None where it rests."""
        if self._case.has_python_reducer:
            return None
        data = self.ddp._get_ddp_logging_data()  # noqa: SLF001 - the reducer's only account of its buckets
        rebuilt = bool(data.get("has_rebuilt_buckets"))
        sizes = str(data["rebuilt_bucket_sizes" if rebuilt else "bucket_sizes"])
        indices = str(data.get("rebuilt_per_bucket_param_indices", "")) if rebuilt else ""
        return BucketLayout(
            tuple(int(size) for size in sizes.split(",")),
            tuple(tuple(int(i) for i in bucket.split()) for bucket in indices.split(",") if bucket.strip()),
        )

    def settle(self) -> None:
        """Take DDP's logger, which synchronises the device, out of the timed steps."""
        self.sample_every(NEVER)
        for _ in range(LOGGED_ITERATIONS):
            self.ddp.reducer.prepare_for_forward()

    def sample_every(self, iterations: int) -> None:
        """Have DDP's logger sample every so many iterations."""
        self.ddp._set_ddp_runtime_logging_sample_rate(iterations)  # noqa: SLF001 - no public way

    def logged_window(self) -> float | None:
        """DDP's own overlap of the last published iteration, percent; None while unset.

        Its communication window inside the backward over the window. It is published at the next forward, so
        it speaks of the iteration before; the logger says 0 for unset.
        """
        data = self.ddp._get_ddp_logging_data()  # noqa: SLF001 - no public way
        window_ns = int(data.get("backward_comm_time", 0))
        inside_ns = int(data.get("backward_compute_comm_overlap_time", 0))
        return 100 * inside_ns / window_ns if window_ns > 0 else None


def _constructor_settings(case: Case) -> dict[str, Any]:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    settings: dict[str, Any] = {
        "gradient_as_bucket_view": case.gradient_as_bucket_view,
        "static_graph": case.static_graph,
        "find_unused_parameters": case.find_unused_parameters,
        # torch 2.15 renamed it; the old name warns there.
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": case.sync_buffers,
    }
    newer = case.bucket_cap_mb.arguments() | {name: True for name in OF_TORCH_2_15 if getattr(case, name)}
    if missing := sorted(newer.keys() - known.keys()):
        raise Unsupported(f"torch {torch.__version__} has no {missing[0]} (2.15 has)")
    return settings | newer


def _register_hook(ddp: DistributedDataParallel, name: str, group: dist.ProcessGroup | None) -> None:
    if name == "powersgd":
        state = powersgd.PowerSGDState(
            process_group=group, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
        return
    hook = default_hooks.fp16_compress_hook if name == "fp16" else default_hooks.bf16_compress_hook
    ddp.register_comm_hook(group, hook)

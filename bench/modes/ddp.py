"""DistributedDataParallel with every constructor setting that changes its speed."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...models.step import get_defaults
from ..common.errors import UserCodeError
from ..common.text import format_list
from ..plan.buckets import BucketLayout, compute_cap_limits, make_cap_arguments
from ..plan.case import Case
from ..plan.case_settings import DDP_DEFAULTS, KINDS
from .base import Mode, Place, Unsupported, UnusedParametersError
from .compiled import set_optimize_ddp

MAX_SAMPLE_RATE = 2**31 - 1
"""A logging sample rate that no run reaches."""

ARGUMENTS = [name for name in DDP_DEFAULTS if KINDS[name] == "argument" and name != "bucket_cap_mb"]
"""Settings that DDP's constructor takes by their own name."""

MIN_TORCH = {"batched_grad_copy": "2.12", "lazy_bucket_allocation": "2.15"}
"""Versions of torch from which DDP's constructor takes an argument; every supported one takes the others."""

MAX_NAMED = 3
"""Parameters that a reason names."""


class DistributedMode(Mode):
    """One rank of a DDP case; every rank of `group` builds it at the same time."""

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        place: Place,
        group: dist.ProcessGroup | None,
    ) -> None:
        if case.static_graph and case.accumulate > 1:
            raise Unsupported("torch breaks a static graph under no_sync; --accumulate 1 measures it")
        # Before the first backward DDP has one bucket for all.
        sent = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        several = sent > compute_cap_limits(case.bucket_cap_mb)[0]
        if case.comm_hook == "powersgd" and case.backend == "gloo" and several:
            raise Unsupported(
                "over gloo PowerSGD hangs with several buckets: torch sends the second all-reduce of each as "
                "the first ends, which ranks see in different orders; --bucket-cap-mb 100 measures it"
            )
        if case.sync_batchnorm:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group=group)
        super().__init__(module)
        self._case, self._group = case, group
        self._zero: Optimizer | None = None
        self._sync_batchnorms = [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]
        with set_optimize_ddp(case):
            self.wrapped = self.ddp = DistributedDataParallel(
                module,
                device_ids=[place.device.index] if place.device.type == "cuda" else None,
                process_group=group,
                init_sync=False,  # all ranks begin with the first one's weights
                **_make_constructor_settings(case),
            )
        if self.ddp.will_sync_module_buffers():
            self.broadcast_buffers = self.ddp._sync_buffers  # as its forward does
        self.sparse = _find_sparse(module)
        if case.comm_hook != "none":
            _register_hook(self.ddp, case.comm_hook, group)

    def make_optimizer(self, make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Optimizer:
        """Make the optimizer that `make` makes, under ZeRO with its state shared out over the ranks."""
        plain = super().make_optimizer(make)
        if not self._case.zero_optimizer:
            return plain
        self._zero = _shard_optimizer(plain, self._group)
        return self._zero

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.ddp.no_sync()

    @contextlib.contextmanager
    def skip_communication(self) -> Iterator[None]:
        """`no_sync` without what else a step sends: buffers, statistics of batch norm, ZeRO's parameters."""
        self.ddp.require_forward_param_sync = False
        self._normalise_over(dist.GroupMember.NON_GROUP_MEMBER)
        if self._zero is not None:
            vars(self._zero)["_sync_params"] = lambda: None  # no public way
        try:
            with self.ddp.no_sync():
                yield
        finally:
            self.ddp.require_forward_param_sync = True
            self._normalise_over(self._group)
            if self._zero is not None:
                del vars(self._zero)["_sync_params"]  # the class's own method shows again

    def _normalise_over(self, group: Any) -> None:
        """Have SyncBatchNorm use the batches of `group`; of this rank alone where it is no member."""
        for layer in self._sync_batchnorms:
            vars(layer)["process_group"] = group  # past Module.__setattr__: this is within the timed block

    def read_bucket_layout(self) -> BucketLayout:
        """Read the buckets that DDP's reducer reports, the rebuilt ones once it has rebuilt."""
        if self.ddp.logger is not None:
            # Otherwise the next forward does, which is one too late after three steps of a static graph.
            self.ddp.logger.set_runtime_stats_and_log()
        data = self.ddp._get_ddp_logging_data()  # the reducer's only account of its buckets
        rebuilt = bool(data.get("has_rebuilt_buckets"))
        sizes = str(data["rebuilt_bucket_sizes" if rebuilt else "bucket_sizes"])
        indices = str(data.get("rebuilt_per_bucket_param_indices", "")) if rebuilt else ""
        num_bytes = tuple(int(size) for size in sizes.split(","))
        parameters = tuple(tuple(map(int, bucket.split())) for bucket in indices.split(",") if bucket.strip())
        trained: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        caps = self._case.bucket_cap_mb
        parameters = parameters or _fill_buckets(trained, self.sparse, caps, num_bytes)
        firsts = [bucket[0] for bucket in parameters] or [0] * len(num_bytes)
        dtypes = tuple(str(trained[i].dtype).removeprefix("torch.") for i in firsts)
        return BucketLayout(num_bytes, parameters, dtypes)

    def stop_sampling(self) -> None:
        """Take DDP's logger, which synchronises the device, out of the timed steps."""
        self.set_sample_rate(MAX_SAMPLE_RATE)
        for _ in range(10):  # it samples its first ten iterations whatever the rate
            self.ddp.reducer.prepare_for_forward()

    @contextlib.contextmanager
    def enter_steps(self) -> Iterator[None]:
        """Compile as the case asks, and name the parameters that a step did not use.

        DDP waits for these, and its next step's error has their numbers. They may differ from step to step,
        which a static graph does not allow.
        """
        try:
            with set_optimize_ddp(self._case):
                yield
        except RuntimeError as error:
            if "mark a variable ready only once" in str(error):
                raise UserCodeError(
                    "a parameter took part in two backwards of one step, as reentrant checkpointing has it; "
                    "give --static-graph on, or checkpoint with use_reentrant=False"
                ) from error
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            numbers = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", str(error))
            trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
            unused = [trained[i] for i in map(int, numbers[1].split()) if i < len(trained)] if numbers else []
            raise UnusedParametersError(
                "give --find-unused-parameters on, which searches the graph in every step: a step did not "
                f"use {format_list(unused, MAX_NAMED) or 'some parameters'}, whose gradients DDP waits for"
            ) from error

    def set_sample_rate(self, iterations: int) -> None:
        self.ddp._set_ddp_runtime_logging_sample_rate(iterations)  # no public way


def _find_sparse(module: nn.Module) -> frozenset[int]:
    """Find the places, among the trained parameters, of those with sparse gradients."""
    trained = [id(p) for p in module.parameters() if p.requires_grad]
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    ids = {id(part.weight) for part in embeddings if part.sparse}
    return frozenset(place for place, one in enumerate(trained) if one in ids)


def _fill_buckets(
    trained: list[Tensor], sparse: frozenset[int], bucket_cap_mb: str, num_bytes: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Fill the buckets that are never rebuilt, as `find_unused_parameters` leaves them.

    The reducer does not tell: they are filled as DDP fills them. Empty where that gives other sizes.
    """
    is_sparse = [place in sparse for place in range(len(trained))]
    limits = list(compute_cap_limits(bucket_cap_mb))
    filled, _ = dist._compute_bucket_assignment_by_size(trained, limits, is_sparse)  # type: ignore[attr-defined]
    found = tuple(tuple(reversed(bucket)) for bucket in reversed(filled))
    sizes = tuple(sum(trained[i].nbytes for i in bucket) for bucket in found)
    return found if sizes == num_bytes else ()


def read_overlap(ddp: DistributedDataParallel) -> float | None:
    """Read DDP's own overlap of the last published iteration, percent; None while unset.

    Its communication window inside the backward over the window. It is published at the next forward, so
    it speaks of the iteration before; the logger says 0 for unset.
    """
    data = ddp._get_ddp_logging_data()  # no public way
    window_ns = int(data.get("backward_comm_time", 0))
    inside_ns = int(data.get("backward_compute_comm_overlap_time", 0))
    return 100 * inside_ns / window_ns if window_ns > 0 else None


def explain_ddp_wait(case: Case, unused: Sequence[str]) -> str:
    """Say which parameters without gradient keep the reduction from its end; empty if none do."""
    if not case.spec.has_buckets or case.find_unused_parameters or case.static_graph or not unused:
        return ""
    return (
        "give --find-unused-parameters on, which searches the graph in every step, or --static-graph on: the "
        f"loss does not use {format_list(unused, MAX_NAMED)}, whose gradients DDP waits for"
    )


def _make_constructor_settings(case: Case) -> dict[str, Any]:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.15 renamed it; the old name warns there.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    given = [name for name in ARGUMENTS if getattr(case, name) != DDP_DEFAULTS[name]]
    settings = make_cap_arguments(case.bucket_cap_mb) | {name: getattr(case, name) for name in given}
    settings |= {buffers: case.sync_buffers}
    if missing := sorted(settings.keys() - known.keys()):
        raise Unsupported(f"torch {torch.__version__} has no {missing[0]}; {MIN_TORCH[missing[0]]} has")
    return settings


def _register_hook(ddp: DistributedDataParallel, name: str, group: dist.ProcessGroup | None) -> None:
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if name in hooks:
        ddp.register_comm_hook(group, hooks[name])
        return
    state = powersgd.PowerSGDState(process_group=group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)


def _shard_optimizer(plain: Optimizer, group: dist.ProcessGroup | None) -> Optimizer:
    """Make the same optimizer, its state shared out over `group`; each rank calls this with its own.

    Raises Unsupported where torch cannot, and for step hooks, which another optimizer would not have.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it takes half a second

    if plain._optimizer_step_pre_hooks or plain._optimizer_step_post_hooks:
        raise Unsupported("the optimizer has step hooks, which ZeroRedundancyOptimizer drops")
    groups = [dict(group) for group in plain.param_groups]
    try:
        return ZeroRedundancyOptimizer(groups, type(plain), process_group=group, **get_defaults(plain))
    except (TypeError, ValueError) as error:
        name = type(plain).__name__
        raise Unsupported(f"ZeroRedundancyOptimizer does not take this {name}: {error}") from error

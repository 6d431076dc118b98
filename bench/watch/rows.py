"""Rows that the ranks of a watched training append to their files, as JSON lines.

Times end in `_s` and are seconds; those of a synchronised backward are relative to the start of its step.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MIN_STEP_S = 1e-6


class Row(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """A row that one process appends to its file."""

    rank: int = 0


class Start(Row, frozen=True, kw_only=True):
    """A process that trains."""

    local_rank: int = 0
    world_size: int = 1
    host: str = ""
    torch: str = ""
    python: str = ""
    backend: str | None = None
    device: str = "cpu"
    time_s: float = 0.0
    """Unix time."""
    threads: int = 1
    """Threads of an operator."""
    cores: tuple[int, ...] = ()
    """Numbers of the cores that it may use."""
    debug: str = "OFF"
    """TORCH_DISTRIBUTED_DEBUG."""


class Made(Row, frozen=True, kw_only=True):
    """Object that the user's code has made at `line`, through the package `made_by` where it is not empty."""

    line: str = ""
    """FILE:LINE of the user's code."""
    made_by: str = ""


class Model(Made, frozen=True, kw_only=True):
    """A DDP model; of a model's rows the last one counts."""

    model: int
    parameters: int = 0
    num_bytes: int = 0
    why: str | None = None
    """Reason to get no probes."""
    bucket_cap_mb: str = "default"
    """Text as of `--bucket-cap-mb`."""
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    buffers_argument: str = "broadcast_buffers"
    unused: bool | None = None
    """True where a search has found unused parameters, None where there is no search."""
    kept_at: str = ""
    """FILE:LINE of a backward that added to gradients which an earlier one had averaged."""
    race_ends_at: int = 0
    """Synchronised backwards until the last turn of a race of bucket caps has ended; 0 without one."""


class Loader(Made, frozen=True, kw_only=True):
    """A loader whose batches are trained on, in its first passes."""

    loader: int
    workers: int | None = None
    pinned: bool | None = None
    passes: int = 0
    epochs: int = 0
    """Different epochs of a shuffling DistributedSampler, 0 without one."""


class Parallel(Made, frozen=True, kw_only=True):
    """A way of parallel training that is not DDP: `how` is DTensor or DataParallel."""

    how: str
    devices: int = 1


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """A synchronised backward, the `k`-th of its model; moments are seconds of the step."""

    model: int
    k: int
    probe: bool = False
    begin_s: float | None = None
    ready_s: tuple[float, ...] = ()
    """Moments at which the buckets were ready; none without our hook."""
    bytes: tuple[int, ...] = ()
    end_s: float | None = None
    alone_s: float | None = None
    """Seconds of a probe from sending the first bucket until the last was reduced."""
    cap: str | None = None
    """Bucket cap in a race, empty where the backward does not count; None outside of a race."""
    round: int = 0

    @property
    def tail_s(self) -> float:
        """Seconds of the backward after its last bucket was ready: it waits for communication."""
        return max(self.end_s - self.ready_s[-1], 0.0) if self.ready_s and self.end_s is not None else 0.0


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by part, which add up to it: a part within another counts for the inner one alone."""

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    waits: float = 0.0
    """The end of its backwards, after their last bucket is ready: ranks write it as part of `backward`."""
    buffers: float = 0.0
    optimizer: float = 0.0
    evaluation: float = 0.0
    collectives: float = 0.0
    """The script's own collectives."""
    other: float = 0.0


class Step(Row, frozen=True, kw_only=True):
    """An optimizer step of one rank, from 1 on."""

    n: int
    step_s: Annotated[float, Meta(ge=MIN_STEP_S)]
    parts: Parts = Parts()
    signature: dict[str, int] = {}
    """Counts of forwards, backwards, synchronised ones and optimizer steps; only equal ones are compared."""
    syncs: tuple[Sync, ...] = ()
    overhead_s: float = 0.0
    """Seconds in the watch's own code since the step before was written."""
    search_s: float = 0.0
    """Seconds of the search for unused parameters, within the forward."""
    loading_s: float = 0.0
    """CPU seconds of the thread that trains within its wait for the loader."""
    accumulated: int = 0
    """Synchronised backwards that added to gradients which an earlier one had averaged."""
    collectives: int = 0
    """Collectives of the default group, where no DDP model trains."""
    gaps: tuple[tuple[float, str, str], ...] = ()
    """Work between parts: seconds, and the user's lines before and after it; only in some steps."""
    marks: tuple[tuple[str, float, float], ...] = ()
    """Parts on a GPU in their order: seconds, and how much later their end came by it than by the host."""

    @property
    def key(self) -> tuple[int, int]:
        """Number of its last synchronised backward, equal on all ranks; else that of the step."""
        return (self.syncs[-1].model, self.syncs[-1].k) if self.syncs else (-1, self.n)

    @property
    def hooked(self) -> bool:
        """True where our hook was in."""
        return any(sync.ready_s for sync in self.syncs)

    @property
    def probes(self) -> list[Sync]:
        """Backwards whose buckets were held back."""
        return [sync for sync in self.syncs if sync.probe and sync.alone_s is not None]

    @property
    def turn(self) -> tuple[int, str] | None:
        """Round of the race and cap that it ran under; an empty cap where it does not count; None without."""
        turns = {(sync.round, sync.cap) for sync in self.syncs if sync.cap is not None}
        return turns.pop() if len(turns) == 1 else (-1, "") if turns else None

    @property
    def alone_s(self) -> float:
        """Seconds of communication alone, in probes."""
        return sum(sync.alone_s or 0.0 for sync in self.probes)

    def split_backward(self) -> Parts:
        """Return its parts, with what its backwards wait apart."""
        waits_s = min(sum(sync.tail_s for sync in self.syncs), self.parts.backward)
        return msgspec.structs.replace(self.parts, backward=self.parts.backward - waits_s, waits=waits_s)


class Note(Row, frozen=True, kw_only=True):
    """Something to tell the user."""

    text: str = ""


class End(Row, frozen=True, kw_only=True):
    """The end of the watch of a process, which trained to its end or to `--steps`; its last row."""

    peak_bytes: int | None = None
    """Most bytes of tensors on its GPU."""

"""Rows of the ranks of a watched training, as steps that all of its ranks took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

WARM_UP_STEPS = 5
"""First steps of a rank, which are left out: DDP builds its buckets, and caches fill."""

MAX_DISTANCE = 4
"""Steps between a probe and the steps that it is compared with."""

MIN_STEP_S = 1e-6
MAX_ROW_BYTES = 2**20


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
    unsupported: tuple[str, ...] = ()
    threads: int = 1
    cores: tuple[int, ...] = ()
    debug: str = "OFF"


class Made(Row, frozen=True, kw_only=True):
    """Object that the user's code has made at `line`, through the package `made_by` where it is not empty."""

    line: str = ""
    made_by: str = ""


class Model(Made, frozen=True, kw_only=True):
    """A DDP model; `why` says why it gets no probes."""

    model: int
    parameters: int = 0
    num_bytes: int = 0
    why: str | None = None
    bucket_cap_mb: str = "default"
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    buffers_argument: str = "broadcast_buffers"
    unused: bool | None = None
    kept_at: str = ""
    race_ends_at: int = 0
    """Synchronised backwards until the last turn of a race of bucket caps has ended; 0 without one."""


class Loader(Made, frozen=True, kw_only=True):
    """A loader whose batches are trained on; `epochs` are those that its sampler had in these passes."""

    loader: int
    workers: int | None = None
    pinned: bool | None = None
    passes: int = 0
    epochs: int = 0


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


class Step(Row, frozen=True, kw_only=True):
    """An optimizer step of one rank."""

    n: int
    step_s: float
    parts: dict[str, float] = {}
    signature: dict[str, int] = {}
    hooked: bool = False
    syncs: tuple[Sync, ...] = ()
    overhead_s: float = 0.0
    """Seconds in the watch's own code since the step before was written."""
    search_s: float = 0.0
    loading_s: float = 0.0
    """CPU seconds of the thread that trains within its wait for the loader."""
    accumulated: int = 0
    collectives: int = 0
    gaps: tuple[tuple[float, str, str], ...] = ()
    """Work between parts: seconds, and the user's lines before and after it; only in some steps."""
    marks: tuple[tuple[str, float, float], ...] = ()
    """Parts on a GPU in their order: seconds, and how much later their end came by it than by the host."""

    @property
    def key(self) -> tuple[int, int]:
        """Number of its last synchronised backward, equal on all ranks; else that of the step."""
        return (self.syncs[-1].model, self.syncs[-1].k) if self.syncs else (-1, self.n)

    @property
    def has_optimizer(self) -> bool:
        """True where an optimizer has taken a step, which ends it."""
        return any(name.startswith("optimizer") for name in self.signature)

    @property
    def probes(self) -> list[Sync]:
        """Backwards whose buckets were held back."""
        return [sync for sync in self.syncs if sync.probe and sync.alone_s is not None]

    @property
    def consists_of(self) -> tuple[tuple[str, int], ...]:
        """Only steps of the same parts are compared."""
        return tuple(sorted(self.signature.items()))

    @property
    def turn(self) -> tuple[int, str] | None:
        """Round of the race and cap that it ran under; an empty cap where it does not count; None without."""
        turns = {(sync.round, sync.cap) for sync in self.syncs if sync.cap is not None}
        return turns.pop() if len(turns) == 1 else (-1, "") if turns else None

    @property
    def alone_s(self) -> float:
        """Seconds of communication alone, in probes."""
        return sum(sync.alone_s or 0.0 for sync in self.probes)

    @property
    def tail_s(self) -> float:
        """Seconds in which it waits for communication, in backwards."""
        return sum(sync.tail_s for sync in self.syncs)


class Note(Row, frozen=True, kw_only=True):
    """Something to tell the user."""

    text: str = ""


class End(Row, frozen=True, kw_only=True):
    """The end of the watch of a process."""

    peak_bytes: int | None = None


JoinedStep: TypeAlias = dict[int, Step]
"""One step by rank."""

_DECODER = msgspec.json.Decoder(Start | Model | Loader | Parallel | Step | Note | End)


class Process(NamedTuple):
    """The rows of one process."""

    start: Start
    steps: list[Step]
    models: dict[int, Model]
    notes: list[str]
    loaders: dict[int, Loader]
    parallel: dict[str, Parallel]
    end: End = End()


def read_process(path: Path) -> Process:
    """Read the rows of a process, but for lines that are cut or tell nothing."""
    found = Process(Start(), [], {}, [], {}, {})
    with path.open("rb") as lines:
        while line := lines.readline(MAX_ROW_BYTES):
            try:
                row = _DECODER.decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            if isinstance(row, Start):
                found = found._replace(start=row)
                found.notes.extend(row.unsupported)
            elif isinstance(row, Step) and row.step_s >= MIN_STEP_S:
                found.steps.append(row)
            elif isinstance(row, Model):
                found.models[row.model] = row
            elif isinstance(row, Loader):
                found.loaders[row.loader] = row
            elif isinstance(row, Parallel):
                found.parallel[row.how] = row
            elif isinstance(row, Note):
                found.notes.append(row.text)
            elif isinstance(row, End):
                found = found._replace(end=row)
    # Before an optimizer's first step nobody knows of it: each synchronised backward was taken for a step.
    steps = enumerate(found.steps)
    del found.steps[: next((place for place, step in steps if step.has_optimizer), 0)]
    found.notes.extend(
        f"DDP model {one.model} gets no probes: {one.why}" for one in found.models.values() if one.why
    )
    return found


@dataclass(frozen=True)
class Watched:
    """The rows of all ranks of a training, and the steps that all of them took."""

    ranks: dict[int, Process] = field(default_factory=dict)
    notes: dict[str, set[int]] = field(default_factory=dict)
    """Ranks by what they have to tell."""
    joined: list[JoinedStep] = field(default_factory=list)
    """Steps of the most frequent parts, after the warm-up, in their order."""
    num_others: int = 0
    """Steps of other parts on the first rank."""
    raced: list[JoinedStep] = field(default_factory=list)
    """Steps like those of `joined`, but under the caps of a race."""

    @property
    def first(self) -> Process:
        return next(iter(self.ranks.values()))

    def list_by_rank(self) -> list[list[Step]]:
        """Return the compared steps of each rank."""
        return [[step[rank] for step in self.joined] for rank in self.ranks]

    @property
    def num_missing(self) -> int:
        """Ranks of the training that left no steps."""
        size = max((process.start.world_size for process in self.ranks.values()), default=0)
        return max(size - len(self.ranks), 0)

    @cached_property
    def probes(self) -> list[tuple[int, list[JoinedStep]]]:
        """Places of probes in `joined`, each with the light steps that are nearer to it than to any other.

        None where ranks are missing, for waiting for them would count as communication.
        """
        if self.num_missing:
            return []
        beside: dict[int, list[JoinedStep]] = {
            i: [] for i, step in enumerate(self.joined) if all(one.probes for one in step.values())
        }
        for i, step in enumerate(self.joined):
            near = min(beside, key=lambda probe: abs(probe - i), default=-MAX_DISTANCE - 1)
            if abs(near - i) <= MAX_DISTANCE and is_light(step):
                beside[near].append(step)
        return [(i, steps) for i, steps in beside.items() if steps]


def read_ranks(folder: Path) -> Watched:
    """Read what ranks have appended to `folder`; of ranks that were started again those with most steps."""
    found = sorted(map(read_process, folder.glob("*.jsonl")), key=lambda one: one.start.time_s)
    notes: dict[str, set[int]] = {}
    starts: list[dict[int, Process]] = []
    for process in found:
        rank = process.start.rank
        for text in process.notes:
            notes.setdefault(text, set()).add(rank)
        if process.steps:
            if all(rank in one for one in starts):
                starts.append({})
            next(one for one in starts if rank not in one)[rank] = process
    most = max(starts, key=lambda one: sum(len(process.steps) for process in one.values()), default={})
    ranks = {rank: most[rank] for rank in sorted(most)}
    return Watched(ranks, notes, *join_steps({rank: process.steps for rank, process in ranks.items()}))


def join_steps(steps: Mapping[int, Sequence[Step]]) -> tuple[list[JoinedStep], int, list[JoinedStep]]:
    """Join steps of the most frequent parts that all ranks took; count the first rank's others.

    Of parts that are as frequent those that take longest. Steps of a race stand apart, at the end.
    """
    warm = {rank: [one for one in own if one.n > WARM_UP_STEPS] for rank, own in steps.items()}
    counts, times_s = Counter[object](), Counter[object]()
    for one in (one for own in warm.values() for one in own):
        counts[one.consists_of] += 1
        times_s[one.consists_of] += one.step_s  # type: ignore[assignment]  # a Counter adds floats too
    usual = max(counts, key=lambda parts: (counts[parts], times_s[parts]), default=())
    by_key: dict[tuple[int, int], JoinedStep] = {}
    for rank, own in warm.items():
        for one in own:
            if one.consists_of == usual:
                by_key.setdefault(one.key, {})[rank] = one
    first = next(iter(warm.values()), [])
    joined = [by_key[one.key] for one in first if len(by_key.get(one.key, ())) == len(warm)]
    others = sum(one.consists_of != usual for one in first)
    return [step for step in joined if not is_raced(step)], others, [*filter(is_raced, joined)]


def is_raced(step: JoinedStep) -> bool:
    """Tell whether bucket caps were raced in this step."""
    return any(one.turn for one in step.values())


def is_light(step: JoinedStep) -> bool:
    """Tell whether our hook was in on all ranks, and only passed the buckets on."""
    return all(one.hooked and not any(sync.probe for sync in one.syncs) for one in step.values())

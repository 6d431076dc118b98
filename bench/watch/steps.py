"""Rows of the ranks of a watched training, as steps that all of its ranks took."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import msgspec

from .rows import End, Loader, Model, Note, Parallel, Start, Step

WARM_UP_STEPS = 5
"""First steps of a rank, which are left out: DDP builds its buckets, and caches fill."""

MAX_DISTANCE = 4
"""Steps between a probe and the steps that it is compared with."""

MAX_ROW_BYTES = 2**20


JoinedStep: TypeAlias = dict[int, Step]
"""One step by rank."""

_DECODER = msgspec.json.Decoder(Start | Model | Loader | Parallel | Step | Note | End)


@dataclass
class Process:
    """The rows of one process."""

    start: Start = field(default_factory=Start)
    end: End = field(default_factory=End)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: dict[int, Model] = field(default_factory=dict)
    loaders: dict[int, Loader] = field(default_factory=dict)
    parallel: dict[str, Parallel] = field(default_factory=dict)


def read_process(path: Path) -> Process:
    """Read the rows of a process, but for lines that are cut or tell nothing."""
    found = Process()
    with path.open("rb") as lines:
        while line := lines.readline(MAX_ROW_BYTES):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                match _DECODER.decode(line):
                    case Start() as start:
                        found.start = start
                    case End() as end:
                        found.end = end
                    case Step() as step:
                        found.steps.append(step)
                    case Model() as model:
                        found.models[model.model] = model
                    case Loader() as loader:
                        found.loaders[loader.loader] = loader
                    case Parallel() as parallel:
                        found.parallel[parallel.how] = parallel
                    case Note(text=text):
                        found.notes.append(text)
    # Before an optimizer's first step nobody knows of it: each synchronised backward was taken for a step.
    begun = (
        i
        for i, step in enumerate(found.steps)
        if any(name.startswith("optimizer") for name in step.signature)
    )
    del found.steps[: next(begun, 0)]
    reasons = ((one.model, one.why) for one in found.models.values() if one.why)
    found.notes += [f"DDP model {number} gets no probes: {why}" for number, why in reasons]
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
    alike: dict[frozenset[tuple[str, int]], list[tuple[int, Step]]] = {}
    for rank, own in steps.items():
        for one in own:
            if one.n > WARM_UP_STEPS:
                alike.setdefault(frozenset(one.signature.items()), []).append((rank, one))
    usual = max(
        alike.values(), key=lambda found: (len(found), sum(one.step_s for _, one in found)), default=[]
    )
    by_key: dict[tuple[int, int], JoinedStep] = {}
    for rank, one in usual:
        by_key.setdefault(one.key, {})[rank] = one
    first = next(iter(steps), 0)
    joined = [step for step in by_key.values() if len(step) == len(steps)]
    num_others = sum(rank == first for found in alike.values() if found is not usual for rank, _ in found)
    return [step for step in joined if not is_raced(step)], num_others, [*filter(is_raced, joined)]


def get_first_rank(step: JoinedStep) -> Step:
    """Return a step as its first rank took it."""
    return next(iter(step.values()))


def select_light(joined: Sequence[JoinedStep]) -> Sequence[JoinedStep]:
    """Select the light steps; all where there are none."""
    return [step for step in joined if is_light(step)] or joined


def is_raced(step: JoinedStep) -> bool:
    """Tell whether bucket caps were raced in this step."""
    return any(one.turn for one in step.values())


def is_light(step: JoinedStep) -> bool:
    """Tell whether our hook was in on all ranks, and only passed the buckets on."""
    return all(one.hooked and not any(sync.probe for sync in one.syncs) for one in step.values())

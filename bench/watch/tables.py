"""Tables of a watched training: those of a run with one case, and a row for each rank and step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from ..machine.manifest import Manifest
from ..plan.buckets import BucketLayout, parse_caps_mib
from ..plan.case import Case
from ..plan.sweep import Planned
from ..results.aggregate import LogTables
from ..results.block_times import BlockTimes
from ..results.blocks import Block
from ..results.disk import replace_file
from ..results.journal import Settled, State
from ..results.metrics import PROBES
from ..results.round_times import WAIT_KEY, RoundTimes
from ..results.tables import encode_csv, format_csv_value
from .rows import MIN_STEP_S, Parts, Step
from .steps import JoinedStep, Watched, get_first_rank

PHASES = ("data", "forward", "backward", "optimizer")
"""Parts as a run has them: the backward includes waiting."""


def write_steps(path: Path, watched: Watched) -> None:
    """Write a row for each rank and step."""
    compared = {(rank, one.n) for step in watched.joined for rank, one in step.items()}
    parts = [f"{part}_ms" for part in Parts.__struct_fields__]
    rows = [["rank", "step", "compared", "kind", "step_ms", *parts, "alone_ms"]]
    for rank, process in watched.ranks.items():
        for one in process.steps:
            kind = "probe" if one.probes else "light" if one.hooked else "raced" if one.turn else "unhooked"
            seconds = (one.step_s, *msgspec.structs.astuple(one.split_backward()))
            times_ms = [round(1000 * s, 4) for s in (*seconds, one.alone_s if one.probes else math.nan)]
            told = (rank, one.n, (rank, one.n) in compared, kind, *times_ms)
            rows.append([*map(format_csv_value, told)])
    replace_file(path, lambda part: part.write_bytes(encode_csv(rows)))


def write_tables(folder: Path, planned: Planned, watched: Watched, manifest: Manifest) -> None:
    """Write the tables of a run: a case is the training, counted in steps, and each raced bucket cap."""
    case_id = planned.case.case_id
    turns = find_turns(watched, planned.case.bucket_cap_mb)
    caps = sorted({cap for _, cap in turns}, key=parse_caps_mib)
    cases = {cap: replace(planned.case, bucket_cap_mb=cap) for cap in caps}
    blocks = [*make_blocks(case_id, watched)]
    ids = {cap: case.case_id for cap, case in cases.items()}
    blocks += make_race_blocks(ids, turns, watched)
    sizes = next((one.syncs[-1].bytes for one in watched.joined[-1].values() if one.syncs), ())
    here = manifest.environment
    names = [gpu.name for gpu in here.gpus or ()] if planned.case.device_type == "cuda" else [here.cpu_model]
    facts: dict[str, Any] = {"global_batch": 1, "device_name": next(iter(names), None)}
    facts |= dict.fromkeys(("batch_per_device", "precision", "scaling"))  # unknown, as what a batch holds
    own: dict[str, Any] = {"exposed_by": PROBES} if watched.probes else {}
    if sizes:
        own |= {"num_buckets": len(sizes), "bucket_bytes": "/".join(map(str, sizes))}
    peaks = [process.end.peak_bytes / 2**20 for process in watched.ranks.values() if process.end.peak_bytes]
    own |= {"peak_mem_mib": max(peaks)} if peaks else {}
    others = [case for case in cases.values() if case.case_id != case_id]
    state = State(
        plan=[planned, *(replace(planned, case=case) for case in others)],
        settled={0: Settled(index=0, status="ok", facts=facts | own)},
        layouts={case_id: BucketLayout(sizes)} if sizes else {},
        times=RoundTimes(blocks),
    )
    state.settled |= {i: Settled(index=i, status="ok", facts=facts) for i in range(1, len(state.plan))}
    LogTables(manifest, state, [(case.case_id, case_id) for case in others]).write(folder, blocks)


def plan_case(watched: Watched, num_cores: int) -> Planned:
    """Describe the training as a case: on as many devices as it has ranks, one of which is a core on CPUs."""
    starts = [process.start for process in watched.ranks.values()]
    on_gpus = any(one.device.startswith("cuda") for one in starts)
    hosts = [one.host for one in starts]
    shares = len({(one.host, one.device) for one in starts}) < len(starts)
    ddp = next(iter(watched.first.models.values()), None)
    told: dict[str, Any] = {}
    if ddp is not None:
        names = ("bucket_cap_mb", "find_unused_parameters", "static_graph", "gradient_as_bucket_view")
        told = {name: getattr(ddp, name) for name in names} | {"sync_buffers": ddp.broadcast_buffers}
    case = Case(
        **told,
        mode="ddp" if watched.first.models or len(starts) > 1 else "single",
        num_devices=len(starts),
        arch="watched script",
        image_size=None,
        batch_per_device=1,
        scaling="weak",
        precision="fp32",
        data="",
        device_type="cuda" if on_gpus else "cpu",
        backend=next((one.backend for one in starts if one.backend), ""),
        unit="steps",
    )
    shared = shares if on_gpus else max(map(hosts.count, hosts)) > num_cores
    return Planned(case=case, num_nodes=len({*hosts}), oversubscribed=shared)


def find_moments(steps: Sequence[JoinedStep]) -> list[float]:
    """Return when each of these steps begins, in seconds, and when the last one ends."""
    return [*accumulate((get_first_rank(step).step_s for step in steps), initial=0.0)]


def make_block(
    watched: Watched,
    place: tuple[str, str, int, int, float],
    taken_s: Mapping[int, Sequence[float]],
    details: Mapping[int, Any] = {},
) -> Block:
    """Make one block; `place` is case, phase, round, position and start in seconds."""
    times = []
    for rank, steps_s in taken_s.items():
        told = BlockTimes(1000 * sum(steps_s), tuple(1000 * s for s in steps_s), details.get(rank, {}))
        times.append((watched.ranks[rank].start.host, rank, told))
    return Block.from_times(1, *place, times)


def find_turns(watched: Watched, own: str) -> dict[tuple[int, str], list[int]]:
    """Find the raced steps, by round and bucket cap, of rounds in which the script's `own` cap took part."""
    found: dict[tuple[int, str], list[int]] = {}
    for index, step in enumerate(watched.raced):
        turn, *others = {one.turn for one in step.values()}
        if turn is not None and turn[1] and not others:
            found.setdefault(turn, []).append(index)
    return {turn: steps for turn, steps in found.items() if (turn[0], own) in found}


def make_race_blocks(
    ids: Mapping[str, str], turns: Mapping[tuple[int, str], Sequence[int]], watched: Watched
) -> Iterator[Block]:
    """Yield a block for each turn of the race, in rounds after those of the training; `ids` are by cap."""
    before = get_first_rank(watched.joined[-1]).n
    begin_s = find_moments(watched.joined)[-1]
    moments_s = find_moments(watched.raced)
    for (number, cap), steps in turns.items():
        taken_s = {rank: [watched.raced[i][rank].step_s for i in steps] for rank in watched.ranks}
        place = (ids[cap], "timed", before + number + 1, [*ids].index(cap), begin_s + moments_s[steps[0]])
        yield make_block(watched, place, taken_s)


def make_blocks(case_id: str, watched: Watched) -> Iterator[Block]:
    """Yield the blocks of a run: a round is a probe, by its step's number, and `timed` the steps beside it.

    A step under `no_sync` is a probe without the broadcast of buffers and without what held buckets took,
    which alone are `comm`. Without probes each step is a round. `anatomy` has the phases of other steps.
    """
    joined, moments_s = watched.joined, find_moments(watched.joined)

    def make(phase: str, index: int, *told: Any) -> Block:
        place = (case_id, phase, get_first_rank(joined[index]).n, 0, moments_s[index])
        return make_block(watched, place, *told)

    for index, beside in watched.probes:
        probe = joined[index]
        beside_s = {rank: [step[rank].step_s for step in beside] for rank in probe}
        yield make("timed", index, beside_s)
        local_s, told = {}, {}
        waited_ms = {rank: 1000 * fmean(step[rank].parts.collectives for step in beside) for rank in probe}
        for rank, one in probe.items():
            local_s[rank] = [estimate_without_communication_s(one, fmean(beside_s[rank]))]
            waits = {WAIT_KEY: round(waited_ms[rank], 4)} if any(waited_ms.values()) else {}
            told[rank] = waits | compute_ready_ms(one)
        yield make("no_sync", index, local_s, told)
        buffers_s = min(one.parts.buffers for one in probe.values())
        # The rank that comes last waits for nobody.
        comm_s = buffers_s + min(_count_syncs_per_probe(one) * one.alone_s for one in probe.values())
        detail = {"buffers_ms": round(1000 * buffers_s, 4)} if buffers_s else {}
        taken_s = {rank: [max(comm_s, MIN_STEP_S)] for rank in probe}
        yield make("comm", index, taken_s, dict.fromkeys(probe, detail))
    for index, step in enumerate(joined):
        if any(one.probes for one in step.values()):
            continue
        taken_s = {rank: [one.step_s] for rank, one in step.items()}
        if not watched.probes:
            yield make("timed", index, taken_s)
        phases_ms = {
            rank: {f"{phase}_ms": round(1000 * getattr(one.parts, phase), 4) for phase in PHASES}
            for rank, one in step.items()
        }
        yield make("anatomy", index, taken_s, phases_ms)


def compute_ready_ms(probe: Step) -> dict[str, list[float]]:
    """Return when each bucket is ready, ms since its backward began, as a run's anatomy pass tells it."""
    sync = probe.probes[0]
    if len(probe.syncs) > 1 or sync.begin_s is None:
        return {}
    return {"ready_ms": [round(1000 * (s - sync.begin_s), 4) for s in sync.ready_s]}


def estimate_without_communication_s(probe: Step, usual_s: float) -> float:
    """Return the seconds of a probe without communication; `usual_s` is a step beside it.

    Where only some backwards of the step were held back, the others are taken to add as much each.
    """
    added_s = _count_syncs_per_probe(probe) * (usual_s - (probe.step_s - probe.alone_s))
    return max(usual_s - added_s - probe.parts.buffers, MIN_STEP_S)


def _count_syncs_per_probe(probe: Step) -> float:
    return len(probe.syncs) / len(probe.probes)

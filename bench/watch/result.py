"""The end of a watched training: its rows become the folder of a run, and what was found is said."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...report.build import page_of, write_page
from ..common.cli import say
from ..common.numbers import plural
from ..common.process import host_name
from ..findings.late_ranks import estimate
from ..findings.watched import as_measured
from ..machine.gpus import gpus
from ..machine.host import machine
from ..machine.manifest import (
    FirstHost,
    Load,
    Manifest,
    Measured,
    Model,
    RankPlace,
    Timing,
    Watched,
    WatchedRank,
)
from ..machine.provenance import describe_run
from ..page.terminal import show
from ..plan.case import Case
from ..plan.settings import Settings
from ..results.disk import writable
from ..results.store import RunWriter, load_run, shown
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import median_interval, with_change_of_runs
from . import steps as seen
from .late import find_late_rank
from .tables import PARTS, parts_s, plan_case, write_steps, write_tables


def finish(
    folder: Path, exit_code: int, quiet: bool, command: Sequence[str] = (), load: Sequence[Load] = ()
) -> None:
    """Write tables, manifest and page of a watched training, and say on stderr what was found.

    `command` is the user's, which stays in the manifest; `load` is that of other programs meanwhile. Raises
    UsageError where `folder` takes no files.
    """
    watched = seen.read_ranks(folder / "ranks")
    with writable(f"{folder}"):
        write_steps(folder / "steps.csv", watched)
        if watched.joined:
            here, writer = machine(host_name()), RunWriter(folder)
            planned = plan_case(watched, here.num_cores or len(watched.ranks))
            manifest = describe_watch(watched, planned.case, here, exit_code, command, load)
            write_tables(writer, planned, watched, manifest)
            writer.write_manifest(manifest)
            writer.close()
    if not watched.joined:
        most = max((len(process.steps) for process in watched.ranks.values()), default=0)
        few = f"{plural(most, 'step')} seen, too few to compare: {seen.WARM_UP_STEPS} are warm-up"
        for text in (f"{few}; let it train longer", *name_notes(watched)):
            say(text)
        return
    page = page_of(load_run(folder), folder)
    place = write_page(folder, page)
    if not quiet:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the user's
            show(page, place=shown(place) if place else "")


def describe_watch(
    watched: seen.Watched,
    case: Case,
    here: FirstHost,
    exit_code: int,
    command: Sequence[str],
    load: Sequence[Load],
) -> Manifest:
    """Describe what was watched, and where; the user's command and environment are fields of their own."""
    first = watched.first
    starts = {rank: process.start for rank, process in watched.ranks.items()}
    places = [
        RankPlace(rank=rank, host=one.host, local_rank=one.local_rank, device=one.device)
        for rank, one in starts.items()
    ]
    models = [*first.models.values()]
    return describe_run(
        [msgspec.structs.replace(here, env={}, gpus=tuple(gpus()))],
        places,
        {"python": first.start.python, "torch": first.start.torch},
        name="watch",
        load=tuple(load),
        settings=Settings(modes=("ddp",), device=case.device_type, gpus=(case.num_devices,)),
        model=Model(
            num_params=sum(one.parameters for one in models),
            gradient_bytes=sum(one.num_bytes for one in models),
        ),
        timing=Timing(
            measuring_s=round(sum(one.step_s for one in first.steps), 2),
            rounds=len(watched.joined),
            stopped_because=f"exit code {exit_code}",
        ),
        watched=Watched(
            command=tuple(command),
            env=here.env,
            exit_code=exit_code,
            num_steps=len(first.steps),
            num_compared=len(watched.joined),
            num_others=watched.num_others,
            ranks=measure_parts(watched.joined),
            late=find_late_rank(watched.joined),
            overhead_ms=measure_overhead(watched.joined),
            notes=tuple(name_notes(watched)),
        ),
    )


def name_notes(watched: seen.Watched) -> list[str]:
    """Return what ranks had to tell, with the ranks where it is not all."""
    few = {text: ranks for text, ranks in watched.notes.items() if len(ranks) < len(watched.ranks)}
    named = {text: f"rank {', '.join(map(str, sorted(ranks)))}: " for text, ranks in few.items()}
    return [f"{named.get(text, '')}{text}" for text in watched.notes]


def measure_parts(joined: Sequence[seen.JoinedStep]) -> tuple[WatchedRank, ...]:
    """Measure the parts of light steps by rank, of all where there are none."""
    told = [step for step in joined if seen.is_light(step)] or joined
    by_rank = {rank: [parts_s(step[rank]) for step in told] for rank in told[0]}
    return tuple(
        WatchedRank(
            rank=rank,
            parts={part: as_measured(median_interval([1000 * one[part] for one in own])) for part in PARTS},
        )
        for rank, own in by_rank.items()
    )


def measure_overhead(joined: Sequence[seen.JoinedStep]) -> Measured | None:
    """Measure what the hook adds to a step: the first light steps less those before it came in."""
    light, plain = [], []
    for step in joined:
        if seen.is_light(step):
            light.append(1000 * max(one.step_s for one in step.values()))
        elif not any(one.hooked for one in step.values()):
            plain.append(1000 * max(one.step_s for one in step.values()))
    if min(len(light), len(plain)) < MIN_ROUNDS:
        return None
    # The machine's pace may change: steps that are near to each other are compared.
    near = light[: 2 * len(plain)]
    difference = estimate(near).minus(estimate(plain))
    return as_measured(with_change_of_runs(difference, near, plain).interval())

"""The end of a watched training: its rows become the folder of a run, and what was found is said."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec

from ...report.build import build_page, write_page
from ..common.cli import format_command, print_message
from ..common.numbers import format_count
from ..common.process import get_host_name
from ..findings.watched import make_measured
from ..machine.gpus import describe_gpus
from ..machine.host import describe_machine
from ..machine.manifest import (
    FirstHost,
    Load,
    Manifest,
    Model,
    RankPlace,
    Timing,
)
from ..machine.provenance import describe_run
from ..machine.watched import Measured, Watched, WatchedRank
from ..page.terminal import print_page
from ..plan.case import Case
from ..plan.settings import Settings
from ..results.commands import name_training
from ..results.disk import report_write_errors
from ..results.run_folder import format_path, write_manifest
from ..results.store import load_run
from ..stats.interval import compute_median_interval
from . import steps as seen
from .late import find_late_rank
from .rows import Parts
from .settings import describe_unseen, find_settings
from .tables import find_turns, plan_case, write_steps, write_tables

UNMEASURED_RACE = (
    "bucket caps were raced, but no step lies within the backwards of a turn that count: the training ended "
    "too early, or its steps synchronize more than 4 backwards each"
)

SHORT_RACE = (
    "the race of bucket caps needs {needed:,d} synchronized backwards, and the watch saw {taken:,d}: train "
    "longer, or give fewer --steps"
)

ROWS = "ranks"
"""Folder, within that of the results, of what ranks append."""


def write_result(
    folder: Path,
    exit_code: int,
    quiet: bool,
    command: Sequence[str] = (),
    load: Sequence[Load] = (),
    *,
    with_page: bool = True,
) -> None:
    """Write tables, manifest and page of a watched training, and say on stderr what was found.

    `command` is the user's, which stays in the manifest; `load` is that of other programs meanwhile. Without
    `with_page` a line says which command makes the page. Raises UsageError where `folder` takes no files.
    """
    watched = seen.read_ranks(folder / ROWS)
    with report_write_errors(f"{folder}"):
        write_steps(folder / "steps.csv", watched)
        if watched.joined:
            here = describe_machine(get_host_name())
            planned = plan_case(watched, here.num_cores or len(watched.ranks))
            manifest = describe_watch(watched, planned.case, here, exit_code, command, load)
            write_tables(folder, planned, watched, manifest)
            write_manifest(folder, manifest)
    if not watched.joined:
        most = max((len(process.steps) for process in watched.ranks.values()), default=0)
        few = f"{format_count(most, 'step')} seen, too few to compare: {seen.WARM_UP_STEPS} are warm-up"
        for text in (f"{few}; let it train longer", *name_notes(watched)):
            print_message(text)
        return
    if not with_page:
        again = format_command("report", str(folder))
        print_message(f"stopped before the page was made: {again} makes the page")
        return
    page = build_page(load_run(folder), folder)
    place = write_page(folder, page)
    if not quiet:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the user's
            following = name_training(page.following, Watched(command=tuple(command)))
            print_page(replace(page, following=following), place=format_path(place) if place else "")


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
    models, (own_ms, own_pct) = [*first.models.values()], measure_watch_time(watched)
    return describe_run(
        [msgspec.structs.replace(here, env={}, gpus=tuple(describe_gpus()))],
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
            script=next((Path(one).name for one in command if re.fullmatch(r"[^-].*\.py", one)), ""),
            exit_code=exit_code,
            num_steps=len(first.steps),
            num_compared=len(watched.joined),
            num_others=watched.num_others,
            ranks=tuple(measure_parts(watched.joined)),
            late=find_late_rank(watched.joined),
            num_probes=len(watched.probes),
            own_ms=own_ms,
            own_pct=own_pct,
            settings=find_settings(watched),
            notes=(*name_notes(watched), *describe_unseen(watched)),
        ),
    )


def name_notes(watched: seen.Watched) -> list[str]:
    """Return what ranks had to tell, with the ranks where it is not all, and what could not be measured."""
    notes = [*describe_missing_ranks(watched)]
    for text, ranks in watched.notes.items():
        named = f"rank {', '.join(map(str, sorted(ranks)))}: " if len(ranks) < len(watched.ranks) else ""
        notes.append(f"{named}{text}")
    if watched.ranks and (models := [*watched.first.models.values()]):
        if watched.raced and not find_turns(watched, models[0].bucket_cap_mb):
            notes.append(UNMEASURED_RACE)
        needed = max(one.race_ends_at for one in models)
        taken = max((sync.k for step in watched.first.steps for sync in step.syncs), default=0)
        if taken < needed:
            notes.append(SHORT_RACE.format(taken=taken, needed=needed))
    return notes


def describe_missing_ranks(watched: seen.Watched) -> Iterator[str]:
    """Say where ranks are missing, or only one trained."""
    ranks, missing = watched.ranks, watched.num_missing
    if missing:
        first = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
        yield (
            f"{missing} of {len(ranks) + missing} ranks left no steps here, rank {first} for one, so what "
            "communication adds is not known. They ended before, or their hosts do not share this folder: "
            "watch on every host, with one --out that all of them see."
        )
    elif len(ranks) == 1:
        yield "Only one process trained: if there should be more, look at what your launcher starts."


def measure_parts(joined: Sequence[seen.JoinedStep]) -> Iterator[WatchedRank]:
    """Measure the parts of light steps by rank, of all where there are none."""

    def measure(taken_s: Iterable[float]) -> Measured:
        return make_measured(compute_median_interval([1000 * s for s in taken_s]))

    told = seen.select_light(joined)
    for rank in told[0]:
        own = [step[rank].split_backward() for step in told]
        parts = {part: measure(getattr(one, part) for one in own) for part in Parts.__struct_fields__}
        step_ms = measure(step[rank].step_s for step in told)
        yield WatchedRank(rank=rank, step_ms=step_ms, parts=parts)


def measure_watch_time(watched: seen.Watched) -> tuple[float, float]:
    """Measure the watch's own code, ms and percent of a step, on the rank where it is most."""
    own = [
        (fmean(one.overhead_s for one in process.steps), fmean(one.step_s for one in process.steps))
        for process in watched.ranks.values()
    ]
    own_s, step_s = max(own, key=lambda pair: pair[0] / pair[1])
    return round(1000 * own_s, 4), round(100 * own_s / step_s, 3)

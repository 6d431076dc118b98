"""The two sides of a gate: their results folders, refused where files do not hold together.

Figures come from blocks.csv; cases.csv says what the cases are, how they ended and their peak memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import structs

from ..common.errors import UsageError
from ..machine.conditions import Difference, Question, find_differences
from ..machine.load import average_loads
from ..machine.manifest import Manifest
from ..plan.case_settings import DDP_DEFAULTS, MODE_DEFAULTS, STEP_DEFAULTS
from ..plan.modes import RANK_PER_DEVICE
from ..results.aggregate import compute_metrics_by_round, estimate_cases
from ..results.case_columns import IDENTITY, METRICS
from ..results.case_result import CaseResult
from ..results.round_times import assign_block_numbers
from ..results.store import RunData, load_run
from ..results.tables import report_read_errors
from ..stats.interval import Estimate

SWEPT_COLUMNS = ("mode", "num_devices", "compile", *MODE_DEFAULTS)
"""Columns that may differ between the cases of one run; together they name a case within it."""

DEFAULTS = STEP_DEFAULTS | DDP_DEFAULTS

MEASURED_COLUMNS = ("device_name", "link")
"""Known only of cases that were measured."""

PLANNED_COLUMNS = tuple(
    column.name
    for column in IDENTITY
    if column.name
    not in {*SWEPT_COLUMNS, *MEASURED_COLUMNS, "case_id", "status", "reason", "reason_code", "global_batch"}
)
"""Settings and places of a case, known of unmeasured ones too; global_batch follows from them."""

Rounds: TypeAlias = Mapping[tuple[int, int], float]
"""One figure by launch and round."""


@dataclass(frozen=True)
class GateCase:
    """A case's results with its rounds in blocks.csv."""

    result: CaseResult
    rounds: Mapping[str, Rounds]
    """Figures by metric; none where the case does not have it."""
    fitted: Mapping[str, Estimate] = field(default_factory=dict)
    """The repeated metrics that `cases.csv` has, of one fit over all rounds; all but ms are logarithms."""

    @property
    def key(self) -> tuple[str, ...]:
        """Values that name a case in its run; a setting that its ddp-bench lacked has PyTorch's default."""
        return tuple(self.result.get_text(name) or str(DEFAULTS.get(name, "")) for name in SWEPT_COLUMNS)


@dataclass(frozen=True)
class GateRun:
    """A run that passed every check."""

    path: Path
    manifest: Manifest
    cases: tuple[GateCase, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the gate set for this side alone."""


def read_run(path: Path) -> GateRun:
    """Load and check a results folder or an archive. Raises UsageError that names what is wrong with it."""
    return check_run(load_run(path))


def check_run(run: RunData) -> GateRun:
    """Return the cases of a loaded run. Raises UsageError where cases.csv and blocks.csv disagree."""
    _check(run)
    cases = run.results
    with report_read_errors(run.path / "blocks.csv"):
        fits = estimate_cases([case for case in cases if case.is_ok], run.times.fit_steps())
        rounds = compute_metrics_by_round(cases, run.times)
    made = []
    for case in cases:
        in_launch = {name: {(0, r): x for r, x in of.items()} for name, of in rounds[case.case_id].items()}
        fitted = {n: one for n, one in fits.get(case.case_id, {}).items() if not math.isnan(one.error)}
        made.append(GateCase(case, in_launch, fitted))
    return GateRun(run.path, run.manifest, tuple(made))


def _check(run: RunData) -> None:
    """Raise UsageError for what reads well and is not whole, as a file cut off between two lines."""
    cases, blocks = run.results, run.blocks

    def refuse(bad: Any, what: str) -> None:
        if bool(bad):
            raise UsageError(f"{run.path}: {what}; restore the folder or measure again")

    def is_whole(case: CaseResult) -> bool:
        batch, accumulate = case.batch_per_device, case.get_number("accumulate")
        return not (batch and accumulate) or case.global_batch == batch * case.num_devices * accumulate

    refuse(not cases, "cases.csv holds no case")
    refuse(any(c.is_ok and not c.images_per_s for c in cases), "cases.csv: images_per_s is not given")
    refuse(not all(map(is_whole, cases)), "cases.csv: global_batch is not batch x devices x accumulate")
    known = blocks["case_id"].isin([case.case_id for case in cases])
    refuse(not known.all(), "blocks.csv has blocks of a case that cases.csv does not hold")
    rows = blocks[["case_id", "phase", "rank"]].assign(block=assign_block_numbers(blocks))
    used = rows[rows["phase"].isin(["timed", "no_sync"])]
    refuse(used.duplicated(["block", "rank"]).any(), "blocks.csv: a block stands twice")
    for case in (one for one in cases if one.is_ok):
        own, seen = (found[found["case_id"] == case.case_id].groupby("block") for found in (rows, used))
        num_ranks = case.num_devices if case.mode in RANK_PER_DEVICE else 1
        ranks = seen["rank"].agg(["size", "max"])
        refuse(
            (ranks != [num_ranks, num_ranks - 1]).any(axis=None), f"blocks.csv lacks ranks of {case.case_id}"
        )
        phases = own["phase"].first()
        for what, found in (("blocks", len(phases)), ("rounds", sum(phases == "timed"))):
            told = case.get_text(f"num_{what}")
            said = f"blocks.csv has {found} {what} of {case.case_id}, cases.csv has num_{what} {told}"
            refuse(told != f"{found}", said)


def merge_sides(launches: Iterable[tuple[GateRun, GateRun]]) -> tuple[GateRun, GateRun]:
    """Baseline and candidate, each with the rounds of all launches."""
    baselines, candidates = zip(*launches, strict=True)
    return merge_launches(baselines), merge_launches(candidates)


def merge_launches(runs: Sequence[GateRun]) -> GateRun:
    """One side's launches, each of which started both sides anew, as one run: their rounds side by side.

    The memory that a process happens to get makes it a percent or so faster or slower for as long as it
    lives, and several percent without huge pages (bench/common/process.py; Kalibera and Jones, "Rigorous
    benchmarking in reasonable time", 2013, measure the same for other programs), so rounds of one launch
    agree with each other better than with those of the next. A comparison of two processes would call that a
    change.

    A case that failed in any launch is a failed case; peak memory is the highest, and clocks are those of the
    launch in which heat or power held them down the most.
    """
    by_id: dict[str, list[GateCase]] = {}
    for run in runs:
        for case in run.cases:
            by_id.setdefault(case.result.case_id, []).append(case)
    loads = [run.manifest.load[0] for run in runs if run.manifest.load]
    load = (reduce(average_loads, loads),) if loads else ()
    manifest = structs.replace(runs[0].manifest, load=load)
    return replace(runs[0], manifest=manifest, cases=tuple(map(_merge_case, by_id.values())))


def _merge_case(cases: Sequence[GateCase]) -> GateCase:
    if failed := [case for case in cases if not case.result.is_ok]:
        return failed[0]
    rounds = {
        name: {(i, r): value for i, case in enumerate(cases) for (_, r), value in case.rounds[name].items()}
        for name in cases[0].rounds
    }
    once = {
        name: {(0, 0): max(found.values())}
        for name, found in rounds.items()
        if found and not METRICS[name].has_interval
    }
    slowest = max(cases, key=lambda case: case.result.throttled_pct or 0.0)
    return replace(slowest, rounds=rounds | once)


def find_run_differences(
    baseline: GateRun, candidate: GateRun, pairs: Iterable[tuple[GateCase, GateCase]]
) -> tuple[Difference, ...]:
    """Conditions and settings that differ, blocking ones first."""
    found = _find_case_differences([(ours.result, theirs.result) for ours, theirs in pairs])
    found += find_differences(baseline.manifest, candidate.manifest, Question.GATE)
    ours, theirs = (run.manifest.watched for run in (baseline, candidate))
    if ours and theirs:
        settings = theirs.list_settings()
        found += [
            Difference(name=name, then=then, now=settings[name], blocking=False)
            for name, then in ours.list_settings().items()
            if then != settings[name]
        ]
    return tuple(sorted(found, key=lambda difference: not difference.blocking))


def _find_case_differences(pairs: list[tuple[CaseResult, CaseResult]]) -> list[Difference]:
    """List settings and places that differ; swept settings, as of two watched trainings, do not block."""
    found = []
    for name in (*SWEPT_COLUMNS, *PLANNED_COLUMNS, *MEASURED_COLUMNS):
        is_swept = name in SWEPT_COLUMNS
        default = str(DEFAULTS.get(name, "none")) if is_swept else "none"
        known = [pair for pair in pairs if name not in MEASURED_COLUMNS or all(case.is_ok for case in pair)]
        texts = [tuple(case.get_text(name) or default for case in pair) for pair in known]
        changed = [(then, now) for then, now in texts if then != now]
        if changed:
            left, right = (", ".join(dict.fromkeys(side)) for side in zip(*changed, strict=True))
            found.append(Difference(name=name, then=left, now=right, blocking=not is_swept))
    return found

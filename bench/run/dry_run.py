"""The plan of a run, printed instead of measured (`--dry-run`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import median
from typing import Any

from ..common.console import format_s
from ..common.numbers import format_count
from ..common.text import escape_controls, format_list, to_json
from ..findings.wording import label_planned_case, name_device, name_samples, name_workload_parts
from ..plan.settings import AXES, format_value
from ..results.case_result import CaseResult
from ..stats.fit import MIN_ROUNDS
from ..worker import messages as m
from .conductor import begin_ranks
from .failures import START_TIMEOUT_S
from .job import Job
from .schedule import INSTRUMENTED, SHARES, list_passes
from .stop_rule import estimate_duration_s
from .workers import Workers

PROBE_S, NUM_COLD = 1.0, 2
"""Seconds that single trains to tell how long a step takes, at least, and first steps, which do not count."""

MAX_ROWS, NUM_FIRST = 40, 5
"""Cases above which a plan prints only the first and last ones, and how many of each."""


def show_plan(workers: Workers, job: Job, *, as_json: bool = False) -> None:
    """Print every case, why it is skipped, the order of the first round and the expected time.

    Of many cases the first and last, and what varies. As JSON, for a program: all cases to measure, those
    skipped and why, the versions, the seconds expected, and the range of rounds.
    """
    # Eager: a plan should not take the minutes of a compiler, nor need one.
    eager = replace(job.plan[0].case, compile="off")
    begin_ranks(workers, job, [eager], 1)
    prepare = m.Prepare(index=0, case=eager, least_s=PROBE_S, proves=False)
    probed = workers.ask_worker(0, prepare, "the probe of single", START_TIMEOUT_S)
    steps_ms = probed.times.steps_ms[NUM_COLD:]
    runnable = [p for p in job.plan if p.skip_reason is None]
    step_s, of_single = median(steps_ms) / 1000, job.plan[0].case
    batch = of_single.global_batch
    preparing_s, rounds_s, most = estimate_duration_s(
        job.plan, step_s=step_s, single_batch=batch, settings=job.settings
    )
    kinds = {phase for p in runnable for phase in list_passes(p.case, job.settings)}
    passes = {"instrumented" if phase in INSTRUMENTED else phase for phase in kinds}
    is_fixed = most == job.settings.rounds  # the time is enough for them
    least = most if is_fixed else max(int(most * (1 - sum(SHARES[kind] for kind in passes))), 1)
    if as_json:
        skipped = {p.case.case_id: p.skip_reason for p in job.plan if p.skip_reason is not None}
        found = {
            "cases": [p.case.case_id for p in runnable],
            "skipped": skipped,
            "versions": job.inspected.versions,
            "startup_s": preparing_s,
            "rounds_s": rounds_s,
            "rounds": [least, most],
        }
        print(to_json(found))
        return
    here = format_count(job.machine.devices_per_node, name_device(job.machine.device_type))
    as_planned = CaseResult.from_row(of_single.to_row())
    trained = name_workload_parts(as_planned, job.settings.batch_size)
    print(
        escape_controls(
            f"{len(job.plan)} cases, {len(runnable)} to measure, on {here}; {', '.join(trained)}:"
        )
    )
    rows = _format_rows(job, name_samples(as_planned))
    if len(rows) > MAX_ROWS:
        rows[NUM_FIRST:-NUM_FIRST] = [f"  … {len(rows) - 2 * NUM_FIRST} more cases; --json lists all of them"]
        rows += _summarize_plan(job)
    print("\n".join(rows))
    steps = format_count(job.settings.count_steps_per_block(step_s), "step")
    print(
        f"Rounds in random order (seed {job.settings.seed}), {steps} per block; a step of "
        f"single takes {step_s * 1000:.0f} ms here (probe of {len(steps_ms)} steps)."
    )
    limit = "" if job.settings.max_time is None else f", limit {format_s(job.settings.max_time)}"
    few = f"; intervals need {MIN_ROUNDS}" if least < MIN_ROUNDS else ""
    num = f"{least:,d} to {most:,d}" if least < most else f"{most:,d}"
    num = f"about {num} rounds, fewer where communication is slow"
    fitting = f"{most:,d} rounds" if is_fixed else num
    print(
        f"Expected time: about {format_s(preparing_s)} of start-up, to prove and warm up every case, and "
        f"{format_s(rounds_s)} of rounds{limit}: {fitting}{few}."
    )


def _format_rows(job: Job, noun: str) -> list[str]:
    """Write a line for each case."""
    sizes = job.settings.batch_size or ()
    names = [label_planned_case(p.case, sizes) for p in job.plan]
    width = max(map(len, names))
    rows = []
    for name, p in zip(names, job.plan, strict=True):
        what = f"skipped: {p.skip_reason}" if p.skip_reason else "oversubscribed" * p.oversubscribed
        rows.append(f"  {name:<{width}}  {p.case.global_batch:>5} {noun}/step  {what}".rstrip())
    return rows


def _summarize_plan(job: Job) -> list[str]:
    """Say which settings vary between the cases, and how many cases are skipped for each reason."""
    settings: dict[str, Any] = job.settings.stored()
    several = {name: settings[name] for name in ("modes", "gpus", "batch_size", *AXES)}
    varied = [
        f"--{name.replace('_', '-')} ({format_list([*map(format_value, values)])})"
        for name, values in several.items()
        if isinstance(values, tuple) and len(values) > 1
    ]
    reasons = Counter(p.skip_reason for p in job.plan if p.skip_reason is not None)
    skipped = [f"{format_count(num, 'case')} skipped: {reason}" for reason, num in reasons.most_common()]
    return [f"The cases vary {', '.join(varied)}.", *skipped]

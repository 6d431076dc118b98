"""The beginning of a run: its plan on the terminal, its manifest, alike hosts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from statistics import median

import msgspec

from .. import plan
from ..cli import command
from ..cluster.turns import interleaved_id
from ..console import format_s
from ..errors import UsageError
from ..expected_time import estimate_s
from ..findings.numbers import plural, short
from ..findings.wording import devices, samples_noun, workload_parts
from ..manifest import Host, Manifest, OwnVersion
from ..provenance import own_git_state, own_version
from ..text import visible
from ..worker import messages as m
from .failures import START_LIMIT_S
from .job import Job
from .stop_rule import expected_half_width
from .workers import Workers


def show_plan(workers: Workers, job: Job) -> None:
    """Print the plan and how long it takes."""
    # Eager: a plan should not take the minutes of a compiler, nor need one.
    first = m.Probe(settings=job.settings, case=replace(job.plan[0].case, compile="off"))
    print_plan(job, workers.value(0, first, "the probe of single", START_LIMIT_S))


def print_plan(job: Job, steps_ms: Sequence[float]) -> None:
    """Every case, why it is skipped, the order of the first round and the expected time."""
    runnable = [p for p in job.plan if p.skip_reason is None]
    order = plan.round_order(len(runnable), seed=job.settings.seed, round_index=1)
    place = {runnable[i].case.case_id: position + 1 for position, i in enumerate(order)}
    width = max(len(p.case.case_id) for p in job.plan)
    here = devices(job.machine.devices_per_node, job.machine.device_type)
    of_single = job.plan[0].case
    noun = samples_noun(asdict(of_single))
    trained = workload_parts(of_single.stored(), of_single.batch_per_device)
    print(visible(f"{len(job.plan)} cases, {len(runnable)} to measure, on {here}; {', '.join(trained)}:"))
    for p in job.plan:
        what = f"skipped: {p.skip_reason}" if p.skip_reason else f"place {place[p.case.case_id]} in round 1"
        more = ", oversubscribed" if p.oversubscribed and not p.skip_reason else ""
        print(f"  {p.case.case_id:<{width}}  {p.case.global_batch:>5} {noun}/step  {what}{more}")
    step_s = median(steps_ms) / 1000
    batch = of_single.global_batch
    expected = estimate_s(job.plan, step_s=step_s, single_batch=batch, settings=job.settings)
    steps = plural(job.settings.steps_per_block(step_s), "step")
    print(
        f"Rounds in random order (seed {job.settings.seed}), {steps} per block; a step of "
        f"single takes {step_s * 1000:.0f} ms here (probe of {len(steps_ms)} steps)."
    )
    limit = "" if job.settings.max_time is None else f", limit {format_s(job.settings.max_time)}"
    print(f"Expected time: about {format_s(expected)} of measuring{limit}, plus start-up.")
    if (known := expected_half_width(job.plan, job.settings, steps_ms, expected_s=expected)) is not None:
        print(
            f"Comparisons will be known to about ±{short(100 * known, 2)}% by then, if all cases scatter as "
            f"the probe does; what counts as equal is {100 * job.settings.margin:g}% (--margin)."
        )


def new_manifest(
    job: Job,
    profiled: m.Profiled,
    arguments: Sequence[str],
    begun: Sequence[m.Begun],
    *,
    load_before: float | None = None,
) -> Manifest:
    """What manifest.json says of a run that begins on the workers that have `begun`, by rank."""
    machines = [one.machine for one in begun if one.machine is not None]
    settings = job.settings
    return Manifest(
        name=settings.name,
        run_id=uuid.uuid4().hex[:12],
        interleaved_id=interleaved_id(),
        preset=settings.preset,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(arguments),
        command=command("run", *arguments),
        settings=settings,
        seed=settings.seed,
        plan_hash=plan.plan_hash(job.plan),
        versions=profiled.versions,
        ddp_bench=OwnVersion(version=own_version()),
        git=own_git_state(),
        workload=profiled.workload,
        environment=machines[0],
        hosts={str(one.host): msgspec.convert(msgspec.to_builtins(one), Host) for one in machines},
        model=profiled.model,
        ranks=tuple(one.place for one in begun),
        link=begun[0].place.link,
        load_before=load_before,
    )


def check_alike(found: Sequence[m.Begun]) -> None:
    """Raise UsageError with every difference between hosts; the first rank of each speaks for it."""
    hosts = {str(one.machine.host): one.conditions for one in found if one.machine is not None}
    differences = []
    for name in dict.fromkeys(name for told in hosts.values() for name in told):
        values: dict[str, list[str]] = {}
        for host, told in hosts.items():
            values.setdefault(told.get(name, "none"), []).append(host)
        if len(values) > 1:
            differences.append(", ".join(f"{_named(h)}: {name} {value}" for value, h in values.items()))
    if differences:
        raise UsageError(f"the hosts differ: {'; '.join(differences)}; make them alike or leave some out")


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

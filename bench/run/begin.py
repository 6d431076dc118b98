"""The beginning of a planned run: its ranks take their devices and meet, alike hosts, its manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from ..common.errors import UsageError
from ..common.text import format_list
from ..common.turns import get_interleaved_id
from ..machine.launch import read_parent_command, write_launched_command
from ..machine.manifest import Manifest
from ..machine.provenance import describe_run
from ..plan.case import Case
from ..plan.sweep import hash_plan
from ..worker import messages as m
from ..worker.facts import Begun
from .failures import START_TIMEOUT_S
from .job import Job
from .workers import Workers


def begin_ranks(workers: Workers, job: Job, cases: Sequence[Case], num_ranks: int) -> list[Begun]:
    """Have the first `num_ranks` take their devices and meet, for these cases. Raises RestartError."""
    there = workers.launched
    begin = m.Begin(
        settings=job.settings,
        num_outputs=job.inspected.num_outputs,
        cases=tuple(cases),
        world_size=num_ranks,
        local_world_size=min(there.local_world_size, num_ranks) if there else num_ranks,
        meeting=workers.name,
        port=workers.store_port,
    )
    # Each is told of its own host: told of all, they would take memory with the square of their number.
    everyone = {
        rank: msgspec.structs.replace(
            begin, seen=tuple(one for one in job.seen if one.host == workers.hosts[rank])
        )
        for rank in range(num_ranks)
    }
    return [*workers.ask_workers(everyone, "start-up", START_TIMEOUT_S).values()]


def make_manifest(
    job: Job,
    arguments: Sequence[str],
    begun: Sequence[Begun],
    *,
    load_before: float | None = None,
) -> Manifest:
    """Describe for manifest.json a run that begins on the workers that have `begun`, by rank."""
    machines = [one.machine for one in begun if one.machine is not None]
    settings, inspected = job.settings, job.inspected
    return describe_run(
        machines,
        [one.place for one in begun],
        inspected.versions,
        name=settings.name,
        interleaved_id=get_interleaved_id(),
        command=write_launched_command(os.environ, read_parent_command(), *arguments),
        settings=settings,
        plan_hash=hash_plan(job.plan),
        workload=inspected.workload,
        model=inspected.model,
        load_before=load_before,
    )


def check_alike(found: Sequence[Begun]) -> None:
    """Raise UsageError with every difference between hosts; the first rank of each speaks for it."""
    hosts = {str(one.machine.host): one.conditions for one in found if one.machine is not None}
    differences = []
    for name in dict.fromkeys(name for told in hosts.values() for name in told):
        values: dict[str, list[str]] = {}
        for host, told in hosts.items():
            values.setdefault(told.get(name, "none"), []).append(host)
        if len(values) > 1:
            differences.append(
                ", ".join(f"{format_list(h, 1)}: {name} {value}" for value, h in values.items())
            )
    if differences:
        raise UsageError(f"the hosts differ: {'; '.join(differences)}; make them alike or leave some out")

"""The rates of the devices by themselves, measured before the first case at every device count of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.findings.numbers import plural
from ddp_bench.bench.manifest import DeviceRates
from ddp_bench.bench.measure.matrix_rate import DeviceMeter
from ddp_bench.bench.measure.memory import release_memory
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.recovery.attempt import is_broken_by
from ddp_bench.bench.recovery.lockstep import Lockstep, RestartError
from ddp_bench.models.workload import one_line


def measure_rates(
    lockstep: Lockstep,
    cluster: Cluster,
    plan: Sequence[Planned],
    *,
    precision: str,
    limit_s: float,
    say: Callable[[str], None],
) -> list[DeviceRates]:
    """Matrix rate and copy bandwidth of every rank, by the number of devices measured at the same moment.

    A case on n devices is held against what those n devices reach together: cores that share a memory
    bus, and ranks that share a device, reach less than one of them alone. A count that fails on any rank
    is left out, and `say` hears why: no case needs these rates.
    """
    device = cluster.place.device
    meter = functools.cache(lambda: DeviceMeter(device, precision))
    counts = _counts(plan, cluster.world_size)
    takes_part = cluster.rank < max(counts, default=0)
    found: list[DeviceRates] = []

    def done(what: str, work: Callable[[], Any] | None) -> list[Any]:
        """What each rank's work gives, or why it gives nothing. Raises RestartError for a broken device."""
        _, reports = lockstep.run(None, what, work and functools.partial(_tried, work), limit_s=limit_s)
        if any(report.status != "ok" for report in reports):
            raise RestartError
        return [report.value for report in reports]

    # Memory and libraries come before the first count, so that all measure at the same moment.
    done("memory for the devices' rates", (lambda: bool(meter())) if takes_part else None)
    for num_devices in counts:
        what = f"the rates of {plural(num_devices, 'device')}"
        work = (lambda: meter().measured()) if cluster.rank < num_devices else None
        values = done(what, work)[:num_devices]
        reasons = [value for value in values if isinstance(value, str)]
        if reasons:
            say(f"{what} are not known: {reasons[0]}")
        elif None not in values:  # only rank 0 hears of them
            found += [
                DeviceRates(num_devices=num_devices, rank=rank, **value) for rank, value in enumerate(values)
            ]
    meter.cache_clear()
    done("giving their memory back", lambda: release_memory(device))
    return found


def _counts(plan: Sequence[Planned], num_ranks: int) -> list[int]:
    """Device counts of the cases to measure; DataParallel may use more devices than there are ranks."""
    runnable = {planned.case.num_devices for planned in plan if planned.skip_reason is None}
    return sorted(count for count in runnable if count <= num_ranks)


def _tried(work: Callable[[], Any]) -> Any:
    """Do `work`; one line of what it raises, such as too little memory, unless that breaks the device."""
    try:
        return work()
    except Exception as error:
        if is_broken_by(error):
            raise
        return one_line(error)

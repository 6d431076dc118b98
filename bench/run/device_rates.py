"""The rates of the devices by themselves, measured before the first case at every device count of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.cluster.ranks import Cluster
from bench.findings.wording import plural
from bench.measure.roofline import DeviceMeter
from bench.plan import Planned
from bench.recovery.lockstep import Lockstep
from models.workload import one_line


def measure_rates(
    lockstep: Lockstep,
    cluster: Cluster,
    plan: Sequence[Planned],
    *,
    precision: str,
    limit_s: float,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Matrix rate and copy bandwidth of every rank, by the number of devices measured at the same moment.

    A case on n devices is held against what those n devices reach together: cores that share a memory
    bus, and ranks that share a device, reach less than one of them alone. A count that fails on any rank
    is left out, and `say` hears why: no case needs these rates.
    """
    device = cluster.place.device
    meter = functools.cache(lambda: DeviceMeter(device, precision))
    found: list[dict[str, Any]] = []
    for num_devices in _counts(plan, cluster.world_size):
        what = f"the rates of {plural(num_devices, 'device')}"
        work = (lambda: _measured(meter)) if cluster.rank < num_devices else None
        _, reports = lockstep.run(None, what, work, limit_s=limit_s)
        values = [report.value for report in reports[:num_devices]]
        reasons = [value for value in values if isinstance(value, str)]
        if reasons:
            say(f"{what} are not known: {reasons[0]}")
        else:
            found += [
                {"num_devices": num_devices, "rank": rank, **value} for rank, value in enumerate(values)
            ]
    meter.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _counts(plan: Sequence[Planned], num_ranks: int) -> list[int]:
    """Device counts of the cases to measure; DataParallel may use more devices than there are ranks."""
    runnable = {planned.case.num_devices for planned in plan if planned.skip_reason is None}
    return sorted(count for count in runnable if count <= num_ranks)


def _measured(meter: Callable[[], DeviceMeter]) -> dict[str, float] | str:
    """The rates of this rank's device, or why there are none."""
    try:
        return meter().measured()
    except RuntimeError as error:  # too little memory, or arithmetic that the device has not
        return one_line(error)

"""The rates of the devices by themselves, measured before the first case at every device count of a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from bench.cluster.ranks import Cluster
from bench.findings.wording import plural
from bench.measure.roofline import DeviceMeter
from bench.plan import Planned
from bench.recovery.lockstep import Lockstep


def measure_rates(
    lockstep: Lockstep, cluster: Cluster, plan: Sequence[Planned], *, precision: str, limit_s: float
) -> list[dict[str, Any]]:
    """Matrix rate and copy bandwidth of every rank, by the number of devices measured at the same moment.

    A case on n devices is held against what those n devices reach together: cores that share a memory
    bus, and ranks that share a device, reach less than one of them alone. A count that fails is left out.
    """
    device = cluster.place.device
    # Made inside the guarded work: a device may lack the memory.
    meter = functools.cache(lambda: DeviceMeter(device, precision))
    found: list[dict[str, Any]] = []
    for num_devices in _counts(plan, cluster.world_size):
        _, reports = lockstep.run(
            None,
            f"the rates of {plural(num_devices, 'device')}",
            (lambda: meter().measured()) if cluster.rank < num_devices else None,
            limit_s=limit_s,
        )
        if all(report.status == "ok" for report in reports):
            found += [
                {"num_devices": num_devices, "rank": rank, **report.value}
                for rank, report in enumerate(reports[:num_devices])
            ]
    meter.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _counts(plan: Sequence[Planned], num_ranks: int) -> list[int]:
    """Device counts of the cases to measure; DataParallel may use more devices than there are ranks."""
    runnable = {planned.case.num_devices for planned in plan if planned.skip_reason is None}
    return sorted(count for count in runnable if count <= num_ranks)

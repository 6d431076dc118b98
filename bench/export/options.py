"""What an export may be asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A column of cases.csv that other tools are given; they have to know which way is better."""

    column: str
    meaning: str
    bigger_is_better: bool

    @property
    def tool(self) -> str:
        """Of github-action-benchmark: of one file, bigger values or smaller values are better."""
        return "customBiggerIsBetter" if self.bigger_is_better else "customSmallerIsBetter"


METRICS = {
    metric.column: metric
    for metric in (
        Metric("images_per_s", "throughput of all devices", bigger_is_better=True),
        Metric("step_ms", "one optimizer step of the slowest rank", bigger_is_better=False),
        Metric("exposed_comm_ms", "time that communication adds to the step", bigger_is_better=False),
        Metric("speedup", "throughput over that of one device without a wrapper", bigger_is_better=True),
        Metric("peak_mem_mib", "most memory in use, worst device", bigger_is_better=False),
    )
}
"""By column, in the order in which they are exported."""


@dataclass(frozen=True)
class Options:
    """What a user may ask for beside the format; each format takes some of it."""

    host_names: bool = False
    metric: str = "images_per_s"
    """A column of `METRICS`."""
    num_devices: int | None = None

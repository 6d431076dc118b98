"""The metrics that other tools are given, and what each tool calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A column of cases.csv; other tools have to know its unit and which way is better."""

    column: str
    unit: str
    """Of a rate, what it counts is known of each case."""
    meaning: str
    bencher: tuple[str, float]
    """Bencher's measure, and how many of its units one of ours has."""
    gauge: tuple[str, str, float]
    """Prometheus' gauge, its base unit, and how many of them one of ours has."""
    bigger_is_better: bool = False

    @property
    def tool(self) -> str:
        """Of github-action-benchmark: of one file, bigger values or smaller values are better."""
        return "customBiggerIsBetter" if self.bigger_is_better else "customSmallerIsBetter"


METRICS = {
    metric.column: metric
    for metric in (
        Metric(
            *("images_per_s", "images/s", "throughput of all devices"),
            bencher=("throughput", 1.0),
            gauge=("throughput", "per_second", 1.0),
            bigger_is_better=True,
        ),
        Metric(
            *("step_ms", "ms", "one optimizer step of the slowest rank"),
            bencher=("latency", 1e6),
            gauge=("step", "seconds", 1e-3),
        ),
        Metric(
            *("exposed_comm_ms", "ms", "time that communication adds to the step"),
            bencher=("exposed-communication-ns", 1e6),
            gauge=("exposed_communication", "seconds", 1e-3),
        ),
        Metric(
            *("speedup", "ratio", "throughput over that of one device without a wrapper"),
            bencher=("speed-up", 1.0),
            gauge=("speedup", "ratio", 1.0),
            bigger_is_better=True,
        ),
        Metric(
            *("peak_mem_mib", "MiB", "most memory in use, worst device"),
            bencher=("peak-memory-bytes", 2.0**20),
            gauge=("peak_memory", "bytes", 2.0**20),
        ),
    )
}
"""By column, in the order in which they are exported.

`throughput`, per second, and `latency`, in nanoseconds, are Bencher's own; its format has no place for units,
so those of other measures stand in their names.
"""

DEFAULT = "images_per_s"
"""Where a format takes one metric and none is named."""

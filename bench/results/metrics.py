"""Metrics of speed and communication: an entry for each, from which all else that is said of it follows.

A value comes from the entry's formula or function, else from the `detail` of blocks (`bench/measure`) by its
name, else from the facts of a prepared case (`bench/run/case_facts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.numbers import TIMES
from .columns import Column, Metric, declare_interval_columns, declare_number_column, declare_text_column

if TYPE_CHECKING:  # they take a second, and `--help` needs the names of metrics alone
    from ..stats.fit import FittedSteps
    from ..stats.interval import Estimate
    from .case_result import CaseResult
    from .round_times import ByRound, RoundTimes

SINGLE = "single"
"""The timed phase of the case of `single` that a case is compared with; `single` itself has none."""


@dataclass(frozen=True)
class Formula:
    """A function of a case's steps: of those of a round the value there, of fitted ones the estimate."""

    of: Callable[..., float]
    """Takes the case, and ms per step of each of the phases."""
    phases: tuple[str, ...] = ("timed",)
    is_log: bool = True
    """True where its logarithm is estimated: of times, rates and ratios."""
    when: Callable[[CaseResult], bool] = lambda _: True
    """Tells whether it says anything of a case."""
    needs_interval: bool = False
    """True where it says nothing without one: few rounds tell little of a difference of differences."""

    def compute_by_round(self, case: CaseResult, times: RoundTimes) -> ByRound:
        """Return the value of every round that has all of its steps."""
        found = [times.get_case(case_id).get_steps(phase) for case_id, phase in self._list_steps(case)]
        rounds = [r for r in found[0] if all(r in by_round for by_round in found)] if found else ()
        return {r: self.of(case, *(by_round[r] for by_round in found)) for r in rounds}

    def estimate(self, case: CaseResult, typical: FittedSteps) -> Estimate:
        """Return the estimate by the fit of a run, not known where it says nothing of the case."""

        def compute_value(log_ms: Iterable[float]) -> float:
            found = self.of(case, *map(math.exp, log_ms))
            return math.log(found) if self.is_log else found

        found = typical.estimate(compute_value, *self._list_steps(case))
        return typical.estimate(compute_value) if self.needs_interval and math.isnan(found.error) else found

    def _list_steps(self, case: CaseResult) -> list[tuple[str, str]]:
        """Return the case and phase of each step; none where it says nothing of the case."""
        single = case.single
        if not self.when(case) or (SINGLE in self.phases and single is None):
            return []
        return [
            (single.case_id, "timed") if phase == SINGLE and single else (case.case_id, phase)
            for phase in self.phases
        ]


EXPOSED_COMM = "exposed_comm_ms"
"""The column of what communication adds to a step, of which the gate compares like with like."""

ESTIMATORS = NO_SYNC, PROBES = "no_sync", "probes"
"""Estimators of exposed communication: of a run, and of a training that is watched."""

SPEED: tuple[Column, ...] = (
    *declare_interval_columns(
        "step_ms",
        "typical step of the longest rank, fitted over rounds: see docs/measuring.md",
        kind=Metric,
        above=0,
        formula=Formula(lambda _, ms: ms),
        gated=False,
    ),
    *declare_interval_columns(
        "images_per_s",
        "units per second (images for image models): `global_batch` x `units_per_sample` / `step_ms`, the "
        "typical rate",
        kind=Metric,
        above=0,
        formula=Formula(lambda case, ms: case.compute_rate(ms)),
        shown="Throughput = global batch over the step of the slowest rank",
        higher_is_better=True,
    ),
    declare_number_column(
        "images_per_s_sustained",
        "units of all timed blocks / time of their longest ranks: slow steps included",
        above=0,
        value=lambda case, times: case.compute_rate(times.timed_ms) * times.num_steps,
        shown="Sustained throughput",
    ),
    *(
        declare_number_column(
            f"step_ms_p{percent}",
            meaning,
            above=0,
            value=lambda _, times, percent=percent: times.compute_percentile_ms(percent),
            shown=shown,
        )
        for percent, shown, meaning in (
            (50, "Step, median", "median step time, all ranks and timed steps"),
            (75, "", "75th percentile of the step time"),
            (95, "Step, p95", "95th percentile of the step time"),
            (99, "Step, p99", "99th percentile, where there are 100 steps or more"),
        )
    ),
    Column(
        "ranked",
        "bool",
        "whether its speed-up compares: it shares no devices and is no stand-in for DP",
        value=lambda case, _: case.is_ranked,
    ),
    *declare_interval_columns(
        "speedup",
        "`images_per_s` over that of `single` with as large a batch, compiled alike",
        kind=Metric,
        above=0,
        formula=Formula(
            lambda case, ms, single_ms: case.compute_rate(ms) / case.single.compute_rate(single_ms),
            ("timed", SINGLE),
        ),
        shown=f"Speed-up ({TIMES}) = throughput over that of “single”, the plain module on one device",
        higher_is_better=True,
        written="{:.3f}" + TIMES,
    ),
    *declare_interval_columns(
        "efficiency",
        "speed-up / devices",
        kind=Metric,
        above=0,
        formula=Formula(
            lambda case, ms, single_ms: (
                case.compute_rate(ms) / case.single.compute_rate(single_ms) / case.num_devices
            ),
            ("timed", SINGLE),
            when=lambda case: case.has_efficiency,
        ),
        shown="Efficiency (%) =",
        higher_is_better=True,
        gated=False,  # its change is that of speed-up
        written="{:.1%}",
    ),
    *declare_interval_columns("forward_ms", "forward and loss per step, from the anatomy pass"),
    *declare_interval_columns(
        "backward_ms", "backward per step, from the anatomy pass; includes exposed communication"
    ),
    *declare_interval_columns("optimizer_ms", "optimizer step and `zero_grad`, from the anatomy pass"),
    *declare_interval_columns("data_ms", "fetching the batch, from the anatomy pass"),
    *declare_interval_columns(
        "comm_ms",
        "what a step sends, DDP's buffers and then its buckets, back to back with no compute beside it",
        formula=Formula(lambda _, ms: ms, ("comm",)),
        shown="Communication alone =",
    ),
    *declare_interval_columns(
        "buffers_ms",
        "the part of `comm_ms` that broadcasts DDP's buffers; empty where it sends none",
        shown="Buffers = the part of it that broadcasts DDP's buffers",
    ),
    *declare_interval_columns(
        "no_sync_step_ms",
        "the step under no_sync: compute, optimizer and batch",
        formula=Formula(lambda _, ms: ms, ("no_sync",)),
        shown="Step without synchronising =",
    ),
    *declare_interval_columns(
        EXPOSED_COMM,
        "time that communication adds to a step: the step minus the same step without "
        "synchronising, in the same round",
        kind=Metric,
        formula=Formula(lambda _, ms, local_ms: ms - local_ms, ("timed", "no_sync"), is_log=False),
        shown="Exposed =",
        called="exposed communication",
        written="{:,.2f} ms",
        relative_to="step_ms",
    ),
    *declare_interval_columns(
        "exposed_comm_pct",
        "share of the step that communication adds, to compare models and machines by",
        formula=Formula(
            lambda _, ms, local_ms: 100 * (1 - local_ms / ms), ("timed", "no_sync"), is_log=False
        ),
        shown="Exposed share =",
    ),
    declare_text_column(
        "exposed_by",
        "how `exposed_comm_ms` is estimated: `no_sync` of a run (empty in older ones), `probes` of a watched "
        "training, whose buckets were held back; the gate compares only like with like",
        choices=ESTIMATORS,
        value=lambda case, times: case.exposed_by if times.get_steps("no_sync") else None,
        shown="Exposed by = how it was estimated. no_sync: the step without synchronising is one under "
        "no_sync; probes: it is one whose buckets were held back until the last was ready, less what they "
        "then took",
    ),
    *declare_interval_columns(
        "hidden_pct",
        "100 x (1 - exposed / comm); below 0 where it adds more than it takes alone",
        formula=Formula(
            lambda _, ms, local_ms, comm_ms: 100 * (1 - (ms - local_ms) / comm_ms),
            ("timed", "no_sync", "comm"),
            is_log=False,
            # SyncBatchNorm's messages are exposed, and not among the buckets that `comm_ms` is of.
            when=lambda case: case.get_setting("sync_batchnorm") != "True",
            needs_interval=True,
        ),
        shown="Overlap = the share of communication that costs no time, 1 - exposed / communication alone; 0 "
        "where it adds more than it takes alone, empty where its interval is wider than 100 "
        "percentage points",
    ),
    *declare_interval_columns(
        "overlap_trace_pct",
        "time in which both compute and communication run, over the time communication runs, per "
        "rank; unlike `hidden_pct` it counts compute that communication slows, and waiting for other ranks",
        ends=(0, 100),
    ),
    *declare_interval_columns(
        "overlap_window_pct",
        "DDP's own logger: the part of its communication window that lies inside the backward",
        ends=(0, 100),
    ),
    *declare_interval_columns(
        "compute_slowdown",
        "time to the last gradient beside communication, over the same time without it",
        shown=f"Compute slow-down ({TIMES}) =",
    ),
    *declare_interval_columns(
        "bubble_pct",
        "`partition`, `pipeline`: share of the stages' time in which they wait",
        shown="Bubble = the share of the stages' time in which they wait for each other",
    ),
    *declare_interval_columns(
        "anatomy_slowdown_pct",
        "how much slower the instrumented step is than the timed one",
        value=lambda _, times: {
            r: 100 * (ms / times.get_steps()[r] - 1)
            for r, ms in times.get_steps("anatomy").items()
            if r in times.get_steps()
        },
        shown="Cost of instruments = how much slower they make the step",
    ),
)

"""What a layout is searched for in: one reading of a calibration. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.errors import UsageError
from bench.scaling import reading
from bench.scaling.buckets import Layout
from bench.scaling.calibration import Calibration
from bench.scaling.scenario import Scenario, cost_band, own_curves
from bench.scaling.search import CostMs, lower_bound_ms
from bench.scaling.timeline import Compute, Slowdown, make_work, simulate


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One step of the slowest of `num_ranks` ranks; times in ms."""

    num_bytes: tuple[int, ...]
    ready_ms: tuple[float, ...]
    kinds: tuple[str, ...]
    comm_ms: CostMs
    compute: Compute
    slowdown: Slowdown
    copy_ms: float
    residual_ms: float
    wire_share: float

    @classmethod
    def of(cls, calibration: Calibration, *, num_ranks: int, comm_hook: str, accumulate: int) -> Problem:
        """The medians of a calibration, as `bench.scaling.predict` reads them.

        Raises UsageError for a hook whose messages are not the buckets.
        """
        c = calibration
        scenario = Scenario(num_devices=num_ranks, comm_hook=comm_hook, accumulate=accumulate)
        slowest = c.spread.factor(num_ranks)
        micro = reading.compute(c)
        further_ms = (accumulate - 1) * (micro.before_ms + micro.backward_ms)
        compute = replace(micro, before_ms=micro.before_ms + further_ms)
        return cls(
            num_bytes=tuple(p.num_bytes for p in c.parameters),
            ready_ms=tuple(min(p.ready_ms, micro.backward_ms) * slowest for p in c.parameters),
            kinds=tuple(p.kind for p in c.parameters),
            comm_ms=cost_band(c, scenario, own_curves(c.allreduce)).estimate,
            compute=compute.scaled(slowest),
            slowdown=reading.slowdown(c),
            copy_ms=median(c.copy_ms),
            residual_ms=median(c.residual_ms),
            wire_share=scenario.wire_share,
        )

    def step_ms(self, layout: Layout) -> float:
        """The simulated step under `layout`."""
        work = make_work(self.num_bytes, self.ready_ms, layout, self.comm_ms, wire_share=self.wire_share)
        step = simulate(
            work, self.compute, slowdown=self.slowdown, copy_ms=self.copy_ms, residual_ms=self.residual_ms
        )
        return step.step_ms

    def bound_ms(self) -> float:
        """The least step that any layout can reach: compute and communication each at full speed."""
        least = lower_bound_ms(
            self.num_bytes,
            self.ready_ms,
            self.comm_ms,
            self.compute,
            copy_ms=self.copy_ms,
            wire_share=self.wire_share,
        )
        return max(least + self.residual_ms, self.compute.total_ms)


def check_hooks(hooks: Sequence[str]) -> None:
    """Raise UsageError for a hook that has no buckets to lay out."""
    if "powersgd" in hooks:
        raise UsageError(
            "--comm-hook powersgd: its messages are not the buckets, so no layout can be searched for; "
            "give none, fp16 or bf16"
        )

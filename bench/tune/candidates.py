"""Chooses what is worth measuring: the few uniform caps that promise most by a calibration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.layout import PYTORCH_CAPS, BucketCaps
from ddp_bench.bench.predict.buckets import MIB, Layout, assign_cap
from ddp_bench.bench.predict.calibration import Calibration
from ddp_bench.bench.predict.scenario import Scenario, cost_band, own_curves
from ddp_bench.bench.predict.timeline import Compute, Slowdown, make_work, simulate

KINDS = ("default", "uniform")
"""Of bucket caps, the simplest first."""

USUAL_CAPS = (
    PYTORCH_CAPS,
    *(BucketCaps((cap,)) for cap in (0, 0.5, 1, 2, 4, 5, 8, 10, 16, 25, 32, 50, 64, 100, 200)),
)
"""Tried for models of any size."""

ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8)
"""Digits of further caps: steps of a third or a half, which a user would write."""

FINEST = 200
"""No more buckets than this are tried for, but for one per parameter."""

LEAST_MARGIN, MOST_MARGIN = 0.05, 0.1
"""A layout may win that is predicted to be slower by less than the model's error, or than this."""

STEP_APART = 1.4
"""A second uniform cap makes this many times more or fewer buckets: it tells of the model's mistakes."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run DDP, and its predicted step."""

    bucket_cap_mb: BucketCaps
    kind: str
    """One of `KINDS`."""
    gradient_as_bucket_view: bool = False
    comm_hook: str = "none"
    accumulate: int = 1
    num_buckets: int = 0
    predicted_ms: float = 0.0
    bound_ms: float = 0.0

    @property
    def point(self) -> tuple[BucketCaps, bool, str, int]:
        """The settings that tell it from the others."""
        return self.bucket_cap_mb, self.gradient_as_bucket_view, self.comm_hook, self.accumulate


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The settings to vary beside the layout; the first of each is what DDP is compared in."""

    gradient_as_bucket_view: tuple[bool, ...] = (False,)
    comm_hook: tuple[str, ...] = ("none",)
    accumulate: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Raise UsageError for a hook that has no buckets to lay out."""
        if "powersgd" in self.comm_hook:
            raise UsageError(
                "--comm-hook powersgd: its messages are not the buckets, so no layout can be searched for; "
                "give none, fp16 or bf16"
            )


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """One step of the slowest of several ranks under any layout, from a calibration; times in ms."""

    num_bytes: tuple[int, ...]
    ready_ms: tuple[float, ...]
    comm_ms: Callable[[float], float]
    """All-reduce time of so many bytes on the wire."""
    compute: Compute
    kinds: tuple[str, ...] | None = None
    slowdown: Slowdown | None = None
    copy_ms: float = 0.0
    residual_ms: float = 0.0
    wire_share: float = 1.0

    @classmethod
    def of(cls, calibration: Calibration, *, num_ranks: int, comm_hook: str, accumulate: int) -> StepModel:
        """Read the medians of a calibration as `bench.predict.prediction` does."""
        c = calibration
        scenario = Scenario(num_devices=num_ranks, comm_hook=comm_hook, accumulate=accumulate)
        slowest = c.spread.factor(num_ranks)
        micro = c.compute()
        further_ms = (accumulate - 1) * (micro.before_ms + micro.backward_ms)
        compute = replace(micro, before_ms=micro.before_ms + further_ms)
        return cls(
            num_bytes=tuple(p.num_bytes for p in c.parameters),
            ready_ms=tuple(min(p.ready_ms, micro.backward_ms) * slowest for p in c.parameters),
            kinds=tuple(p.kind for p in c.parameters),
            comm_ms=cost_band(c, scenario, own_curves(c.allreduce)).estimate,
            compute=compute.scaled(slowest),
            slowdown=c.slowdown(),
            copy_ms=median(c.copy_ms),
            residual_ms=median(c.residual_ms),
            wire_share=scenario.wire_share,
        )

    def layout(self, caps: BucketCaps) -> Layout:
        return assign_cap(self.num_bytes, caps, kinds=self.kinds)

    def step_ms(self, layout: Layout) -> float:
        work = make_work(self.num_bytes, self.ready_ms, layout, self.comm_ms, wire_share=self.wire_share)
        step = simulate(
            work, self.compute, slowdown=self.slowdown, copy_ms=self.copy_ms, residual_ms=self.residual_ms
        )
        return step.step_ms

    def bound_ms(self) -> float:
        """The least step that any layout can reach: compute and communication each at full speed.

        From parameter k on, everything is sent after k is ready and copied, so the backward lasts at least
        until then plus the least time in which the rest can be sent; for the last parameter that is its own
        all-reduce. It is copied back after that, and all of them are after the last gradient is ready.
        """
        compute, total = self.compute, sum(self.num_bytes)
        launch_ms = (
            ready + self.copy_ms * copied / total
            for ready, copied in zip(accumulate(self.ready_ms, max), accumulate(self.num_bytes), strict=True)
        )
        sent_ms = max(launch + rest for launch, rest in zip(launch_ms, self._least_comm_ms(), strict=True))
        last_ms = max(
            compute.backward_ms + 2 * self.copy_ms, sent_ms + self.copy_ms * self.num_bytes[-1] / total
        )
        least_ms = compute.before_ms + last_ms + compute.after_ms
        return max(least_ms + self.residual_ms, compute.total_ms)

    def _least_comm_ms(self) -> list[float]:
        """By k, the least time to send the gradients from k on, over all ways to cut them."""
        count = len(self.num_bytes)
        sent = [0, *accumulate(self.num_bytes)]
        least = [math.inf] * count + [0.0]
        for k in range(count - 1, -1, -1):
            # The first bucket may have begun before k: what it holds of the rest still has to go out.
            least[k] = min(
                self.comm_ms((sent[end] - sent[k]) * self.wire_share) + least[end]
                for end in range(k + 1, count + 1)
            )
        return least[:count]


def uniform_caps(total_bytes: int) -> list[BucketCaps]:
    """List caps to try for gradients of `total_bytes`: the usual ones, then round numbers."""
    lowest = math.floor(math.log10(max(total_bytes / FINEST, 1) / MIB))
    highest = math.ceil(math.log10(total_bytes / MIB))
    powers = range(lowest, highest + 1)
    more = [digit * 10.0**power for power in powers for digit in ROUND]
    sensible = [f"{cap:.6g}" for cap in more if total_bytes / FINEST <= cap * MIB <= 2 * total_bytes]
    written = (BucketCaps.parse(cap) for cap in sensible if "e" not in cap)
    return list(dict.fromkeys([*USUAL_CAPS, *written]))


def choose(calibration: Calibration, *, num_ranks: int, axes: Axes) -> list[Candidate]:
    """Choose candidates, the default first: four layouts at most, then two per further value of an axis.

    Args:
        calibration: of the workload on this machine.
        num_ranks: ranks that exchange gradients.
        axes: what may vary.
    """
    view, *other_views = axes.gradient_as_bucket_view
    margin = min(max((calibration.model_error_pct or 0.0) / 100, LEAST_MARGIN), MOST_MARGIN)
    found: list[Candidate] = []
    for hook, micro_batches in itertools.product(axes.comm_hook, axes.accumulate):
        model = StepModel.of(calibration, num_ranks=num_ranks, comm_hook=hook, accumulate=micro_batches)
        bound_ms = model.bound_ms()
        promising = [
            Candidate(
                bucket_cap_mb=cap,
                kind="default" if cap == PYTORCH_CAPS else "uniform",
                gradient_as_bucket_view=view,
                comm_hook=hook,
                accumulate=micro_batches,
                num_buckets=len(layout),
                predicted_ms=model.step_ms(layout),
                bound_ms=bound_ms,
            )
            for cap, layout in _promising(model, margin)
        ]
        found += promising[:2] if found else promising
    # What a view saves is not part of the model: the prediction is that of the copy.
    best = min((c for c in found if c.point[1:] == found[0].point[1:]), key=lambda c: c.predicted_ms)
    return [*found, *(replace(best, gradient_as_bucket_view=other) for other in other_views)]


def _promising(model: StepModel, margin: float) -> list[tuple[BucketCaps, Layout]]:
    """Find the default, the best uniform cap, and one coarser and one finer that lose `margin` at most."""
    caps: dict[Layout, BucketCaps] = {}
    for cap in uniform_caps(sum(model.num_bytes)):
        caps.setdefault(model.layout(cap), cap)
    steps = {layout: model.step_ms(layout) for layout in caps}
    default, *others = caps  # in the order of the caps
    found = [default]
    if others:
        best = min(others, key=steps.__getitem__)
        limit_ms = min(steps[best], steps[default]) * (1 + margin)
        close = [layout for layout in others if steps[layout] <= limit_ms]
        finer = [layout for layout in close if len(layout) >= STEP_APART * len(best)]
        coarser = [layout for layout in close if len(layout) <= len(best) / STEP_APART]
        found += [best] if best in close else []
        found += [min(side, key=steps.__getitem__) for side in (coarser, finer) if side]
    return [(caps[layout], layout) for layout in found]

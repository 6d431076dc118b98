"""What is worth measuring: the few layouts that a calibration promises most of. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from bench.layout import BucketCaps
from bench.scaling.buckets import Layout, assign_cap
from bench.scaling.calibration import Calibration
from bench.tune.caps import uniform_caps
from bench.tune.elimination import rounds_of_finalists
from bench.tune.problem import Problem

KINDS = ("default", "uniform")
"""Of bucket caps, the simplest first."""

LEAST_MARGIN, MOST_MARGIN = 0.05, 0.1
"""A layout may win that is predicted to be slower by less than the model's error, or than this."""

STEP_APART = 1.4
"""A second uniform cap makes this many times more or fewer buckets: it tells of the model's mistakes."""

STEPS_TO_PREPARE = 10
"""What a case takes before its first block, in its own steps: construction, proof, warm-up."""

LEAST_STEPS = 24
"""Of the default and each finalist, in timed blocks."""

LEAST_MEASURED = 2


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run DDP, and what the calibration promises of it."""

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


def choose(calibration: Calibration, *, num_ranks: int, axes: Axes) -> list[Candidate]:
    """The candidates, the default first: at most four layouts, and one or two per further value of an axis.

    Args:
        calibration: of the workload on this machine.
        num_ranks: ranks that exchange gradients.
        axes: what may vary.
    """
    view = axes.gradient_as_bucket_view[0]
    found: list[Candidate] = []
    for hook, accumulate in itertools.product(axes.comm_hook, axes.accumulate):
        problem = Problem.of(calibration, num_ranks=num_ranks, comm_hook=hook, accumulate=accumulate)
        base = (hook, accumulate) == (axes.comm_hook[0], axes.accumulate[0])
        few = _of_problem(problem, margin=_margin(calibration))
        found += [
            Candidate(
                bucket_cap_mb=cap,
                kind=kind,
                gradient_as_bucket_view=view,
                comm_hook=hook,
                accumulate=accumulate,
                num_buckets=len(layout),
                predicted_ms=problem.step_ms(layout),
                bound_ms=problem.bound_ms(),
            )
            for cap, kind, layout in (few if base else few[:2])
        ]
    best = _best_simple(found, axes)
    more = [_with_view(best, other) for other in axes.gradient_as_bucket_view[1:]]
    return list({c.point: c for c in [*found, *more]}.values())


def affordable(candidates: Sequence[Candidate], *, seconds: float) -> list[Candidate]:
    """So many that in `seconds` the finalists get `LEAST_STEPS`, in their order.

    The default comes first and what the user asked to compare beside the layout stays; of further layouts
    those go that promise least, until the rest fits or two are left.
    """
    default = candidates[0]
    kept = list(candidates)
    layouts = sorted(
        (c for c in candidates[1:] if c.point[1:] == default.point[1:]),
        key=lambda c: c.predicted_ms,
        reverse=True,
    )
    for worst in layouts:
        if len(kept) <= LEAST_MEASURED or _last_steps(kept, seconds) >= LEAST_STEPS:
            break
        kept.remove(worst)
    return kept


def _last_steps(candidates: Sequence[Candidate], seconds: float) -> float:
    """Steps of each finalist in `seconds`, preparation included."""
    step_ms = mean(c.predicted_ms for c in candidates)
    left_ms = 1000 * seconds - STEPS_TO_PREPARE * step_ms * len(candidates)
    return left_ms / (2 * step_ms) * rounds_of_finalists(len(candidates) - 1)


Promising = tuple[BucketCaps, str, Layout]
"""Cap, kind and layout."""


def _of_problem(problem: Problem, *, margin: float) -> list[Promising]:
    """The default, the best uniform cap, and one coarser and one finer within `margin`."""
    steps: dict[Layout, tuple[float, BucketCaps]] = {}
    for cap in uniform_caps(sum(problem.num_bytes)):
        layout = assign_cap(problem.num_bytes, cap, kinds=problem.kinds)
        if layout not in steps:
            steps[layout] = (problem.step_ms(layout), cap)
    default, *others = steps  # in the order of the caps
    found = [default]
    if others:
        best = min(others, key=lambda layout: steps[layout][0])
        limit_ms = min(steps[best][0], steps[default][0]) * (1 + margin)
        close = [layout for layout in others if steps[layout][0] <= limit_ms]
        finer = [layout for layout in close if len(layout) >= STEP_APART * len(best)]
        coarser = [layout for layout in close if len(layout) <= len(best) / STEP_APART]
        found += [best] if best in close else []
        found += [min(side, key=lambda layout: steps[layout][0]) for side in (coarser, finer) if side]
    return [(steps[x][1], "default" if x == default else "uniform", x) for x in found]


def _best_simple(found: Sequence[Candidate], axes: Axes) -> Candidate:
    base = [c for c in found if (c.comm_hook, c.accumulate) == (axes.comm_hook[0], axes.accumulate[0])]
    return min(base, key=lambda c: c.predicted_ms)


def _with_view(candidate: Candidate, view: bool) -> Candidate:  # noqa: FBT001 - a value of the axis
    # What a view saves is not part of the model: the prediction is that of the copy.
    return Candidate(**{**vars(candidate), "gradient_as_bucket_view": view})


def _margin(calibration: Calibration) -> float:
    return min(max((calibration.model_error_pct or 0.0) / 100, LEAST_MARGIN), MOST_MARGIN)

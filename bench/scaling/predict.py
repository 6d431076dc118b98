"""Predicts step time, throughput and exposed communication elsewhere, with intervals.

An interval holds what the calibration's own rounds leave open (every input resampled), what is not known of
the network (the band of its curve), and the model's error on held-out cases where that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from ddp_bench.bench.scaling.buckets import assign_cap
from ddp_bench.bench.scaling.calibration import AllReduceTimes, Calibration, Samples
from ddp_bench.bench.scaling.cost import CostCurve, on_shared_cores
from ddp_bench.bench.scaling.refusal import (
    MOST_HALF_WIDTH,
    extrapolation,
    is_exposed_refused,
    refusal,
    remedy,
    width_of,
)
from ddp_bench.bench.scaling.scenario import Scenario, batch_per_device, cost_band, own_curves
from ddp_bench.bench.scaling.slowest_rank import RankSpread
from ddp_bench.bench.scaling.timeline import Compute, SimulatedStep, Slowdown, make_work, simulate
from ddp_bench.bench.settings import IMAGES
from ddp_bench.bench.stats import Interval

RESAMPLES = 200

BANDWIDTH = "exposed communication for bandwidth"
LATENCY = "exposed communication for latency"
HANDLING = "copying buckets, and what the simulation lacks"
RANK_SPREAD = "rank spread, waiting for the slowest"
BESIDE_OTHERS = "compute of a rank beside others"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Milliseconds of a step; together they are what it takes beyond the same work on one device alone.

    Exposed communication, less what would remain if it took no time, is split as the all-reduces by
    themselves are: time that grows with bytes, time that does not. It holds compute slowed by communication.
    """

    bandwidth_ms: float
    latency_ms: float
    handling_ms: float
    rank_spread_ms: float
    sharing_ms: float

    def shares_pct(self) -> list[tuple[str, float]]:
        """Cause and share of the time lost, largest first; empty where nothing is lost."""
        parts = {
            BANDWIDTH: self.bandwidth_ms,
            LATENCY: self.latency_ms,
            HANDLING: self.handling_ms,
            RANK_SPREAD: self.rank_spread_ms,
            BESIDE_OTHERS: self.sharing_ms,
        }
        lost = {cause: ms for cause, ms in parts.items() if ms > 0}
        total_ms = sum(lost.values())
        ordered = sorted(lost.items(), key=lambda part: -part[1])
        return [(cause, 100 * ms / total_ms) for cause, ms in ordered]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One scenario's outcome; `step` is the drawable timeline of the estimate, on the slowest rank."""

    scenario: Scenario
    step_ms: Interval
    images_per_s: Interval
    """Units per second, counted in `unit`."""
    efficiency: Interval
    """Throughput over n times that of one device."""
    exposed_comm_ms: Interval
    wait_ms: float
    """Of the step: waiting for the slowest rank."""
    extrapolated_ms: float
    """Of that: what was not measured, because fewer ranks were calibrated."""
    reason: str
    """Why nothing of it may be shown, its figures being too wide; else empty."""
    losses: Losses
    """What the step takes beyond the same work on one device alone."""
    num_buckets: int
    step: SimulatedStep
    unit: str = IMAGES

    @property
    def shown_exposed_ms(self) -> Interval | None:
        """The exposed communication; None where it is too wide to be shown."""
        return None if is_exposed_refused(self.exposed_comm_ms, self.step_ms) else self.exposed_comm_ms

    @property
    def caution(self) -> str:
        """What of the step is extrapolated, where that is much of it."""
        return extrapolation(self.extrapolated_ms, self.step_ms.estimate)


@dataclass(frozen=True)
class _Inputs:
    """One reading of a calibration: its medians, or those of a resample."""

    compute: Compute
    ready_ms: tuple[float, ...]
    single_ms: float
    slowdown: Slowdown
    copy_ms: float
    residual_ms: float
    spread: RankSpread
    comm: CostCurve


@dataclass(frozen=True)
class _Outcome:
    """A step; its ms, units per second, efficiency and exposed communication; what it loses, when asked."""

    step: SimulatedStep
    figures: tuple[float, float, float, float]
    losses: Callable[[], Losses]
    extrapolated_ms: float


def predict(
    calibration: Calibration,
    scenario: Scenario,
    *,
    resamples: int = RESAMPLES,
    model_error_pct: float | None = None,
) -> Prediction:
    """Predict one scenario. Deterministic: resampling is seeded.

    Args:
        calibration: what was measured.
        scenario: what is asked for.
        resamples: draws behind the intervals.
        model_error_pct: half-width of the model's error, instead of the calibration's own.

    Raises UsageError where the scenario asks for what its network or batch cannot give.
    """
    batch = batch_per_device(calibration, scenario)
    found = _outcome(calibration, scenario, _read(calibration, scenario, None), batch)
    rng = np.random.default_rng(0)
    draws = [
        _outcome(calibration, scenario, _read(calibration, scenario, rng), batch).figures
        for _ in range(resamples)
    ]
    error = calibration.model_error_pct if model_error_pct is None else model_error_pct
    wider = _widening(calibration)

    def of(index: int, *, share: float = 1.0) -> Interval:
        return _interval(
            found.figures[index], [figures[index] for figures in draws], wider, (error or 0.0) / 100 * share
        )

    step_ms, images_per_s, efficiency, exposed = of(0), of(1), of(2), of(3, share=0.0)
    width = width_of(step_ms, images_per_s, efficiency)
    reason = ""
    if width > MOST_HALF_WIDTH:
        much = extrapolation(found.extrapolated_ms, step_ms.estimate)
        reason = refusal(
            width, much and f"{much} of a noisy calibration", remedy(width, error_pct=error or 0.0)
        )
    # The model's error is one of the step; the part that is communication carries all of it.
    reach = (error or 0.0) / 100 * step_ms.estimate
    losses = found.losses()
    return Prediction(
        scenario=scenario,
        step_ms=step_ms,
        images_per_s=images_per_s,
        efficiency=efficiency,
        exposed_comm_ms=replace(
            exposed,
            low=max(exposed.estimate - math.hypot(exposed.estimate - exposed.low, reach), 0.0),
            high=exposed.estimate + math.hypot(exposed.high - exposed.estimate, reach),
        ),
        wait_ms=losses.rank_spread_ms,
        extrapolated_ms=found.extrapolated_ms,
        reason=reason,
        losses=losses,
        num_buckets=len(found.step.buckets),
        step=found.step,
        unit=calibration.identity.unit,
    )


def _read(calibration: Calibration, scenario: Scenario, rng: np.random.Generator | None) -> _Inputs:
    def value(samples: Samples) -> float:
        return float(np.median(_resampled(samples, rng)))

    c = calibration

    def again(allreduce: tuple[AllReduceTimes, ...]) -> tuple[AllReduceTimes, ...]:
        return tuple(
            replace(t, points=tuple((size, _resampled(times, rng)) for size, times in t.points))
            for t in allreduce
        )

    curves = own_curves(again(c.allreduce))
    if scenario.measured is not None:
        other = replace(scenario.measured, allreduce=again(scenario.measured.allreduce))
        scenario = replace(scenario, measured=other)
    band = cost_band(c, scenario, curves)
    compute, slowdown = c.compute(value), c.slowdown(value)
    central_ms = float(np.median(c.backward_ms))
    scale = compute.backward_ms / central_ms if central_ms else 1.0
    comm = band.at(float(rng.triangular(-1, 0, 1)) if rng is not None else 0.0)
    if c.identity.device_type == "cpu" and scenario.elsewhere and c.num_ranks in curves:
        slowdown, comm = on_shared_cores(
            slowdown,
            core_share=value(c.comm_core_share),
            calibrated=(curves[c.num_ranks], c.num_ranks),
            asked=(comm, scenario.num_devices),
            num_bytes=sum(p.num_bytes for p in c.parameters),
        )
    return _Inputs(
        compute=compute,
        ready_ms=tuple(min(p.ready_ms * scale, compute.backward_ms) for p in c.parameters),
        single_ms=value(c.single_step_ms) if c.single_step_ms else compute.total_ms,
        slowdown=slowdown,
        copy_ms=value(c.copy_ms),
        residual_ms=value(c.residual_ms),
        spread=replace(
            c.spread,
            of_ranks=_resampled(c.rank_spread, rng),
            of_slowest=_resampled(c.slowest_spread, rng),
        ),
        comm=comm,
    )


def _outcome(calibration: Calibration, scenario: Scenario, inputs: _Inputs, batch: int) -> _Outcome:
    n, calibrated = scenario.num_devices, calibration.identity.batch_per_device
    layout = assign_cap(
        [p.num_bytes for p in calibration.parameters],
        scenario.bucket_cap_mb,
        kinds=[p.kind for p in calibration.parameters],
    )
    size, alone, times = batch / calibrated, n == 1, scenario.accumulate

    def step_of(micro: Compute) -> Compute:
        before_ms = times * micro.before_ms + (times - 1) * micro.backward_ms
        return Compute(
            before_ms=size * before_ms, backward_ms=size * micro.backward_ms, after_ms=micro.after_ms
        )

    # A rank's compute was measured beside other ranks, which may slow it; one device has no others.
    by_itself = inputs.single_ms / inputs.compute.total_ms
    quiet = by_itself if alone else 1.0
    own, single = step_of(inputs.compute.scaled(quiet)), step_of(inputs.compute.scaled(by_itself))
    slowest = inputs.spread.factor(n)
    work = make_work(
        [p.num_bytes for p in calibration.parameters],
        [ready * quiet * size * slowest for ready in inputs.ready_ms],
        layout,
        inputs.comm,
        wire_share=scenario.wire_share,
    )
    compute = own.scaled(slowest)
    copy_ms, residual_ms = (0.0, 0.0) if alone else (inputs.copy_ms, inputs.residual_ms)
    step = simulate(work, compute, slowdown=inputs.slowdown, copy_ms=copy_ms, residual_ms=residual_ms)
    per_sample = calibration.identity.units_per_sample
    units_per_s = batch * per_sample * n * times * 1000 / step.step_ms
    of_single = batch * per_sample * times * 1000 / single.total_ms

    def losses() -> Losses:
        without_copies = simulate(work, compute, slowdown=inputs.slowdown)
        network_ms = max(step.exposed_comm_ms - max(step.step_ms - without_copies.step_ms, 0.0), 0.0)
        latency = min(inputs.comm(1.0) * len(layout) / step.comm_ms, 1.0) if step.comm_ms > 0 else 0.0
        return Losses(
            bandwidth_ms=network_ms * (1 - latency),
            latency_ms=network_ms * latency,
            handling_ms=step.exposed_comm_ms - network_ms,
            rank_spread_ms=own.total_ms * (slowest - 1),
            sharing_ms=own.total_ms - single.total_ms,
        )

    figures = (step.step_ms, units_per_s, units_per_s / n / of_single, step.exposed_comm_ms)
    measured = inputs.spread.factor(min(n, calibration.num_ranks))
    return _Outcome(step, figures, losses, own.total_ms * max(slowest - measured, 0.0))


def _resampled(samples: Samples, rng: np.random.Generator | None) -> Samples:
    """Draw as many figures with replacement; without `rng` return the figures themselves."""
    if rng is None or len(samples) < 2:
        return samples
    return tuple(rng.choice(samples, len(samples)))


def _widening(calibration: Calibration) -> float:
    """Hesterberg's factor for few rounds (source: `bench.stats.ratio_of_medians`)."""
    rounds = min((len(s) for s in (calibration.backward_ms, calibration.forward_ms) if len(s) > 1), default=0)
    if not rounds:
        return 1.0
    factor = scipy.stats.t.ppf(0.975, rounds - 1) / scipy.stats.norm.ppf(0.975)
    return float(factor * math.sqrt(rounds / (rounds - 1)))


def _interval(estimate: float, draws: Sequence[float], wider: float, error: float) -> Interval:
    """Form the 95% interval of `draws` about `estimate`.

    Args:
        estimate: from the figures themselves.
        draws: from resamples of them; none leaves only the error.
        wider: factor for few rounds, on the logarithm.
        error: of the model, as a share, added in quadrature.
    """
    low, high = np.quantile(draws, (0.025, 0.975)) if draws else (estimate, estimate)
    if estimate <= 0:
        return Interval(estimate, min(float(low), estimate), max(float(high), estimate))
    below = math.log(estimate / min(float(low), estimate)) * wider if low > 0 else math.inf
    above = math.log(max(float(high), estimate) / estimate) * wider
    model = math.log1p(error)
    return Interval(
        estimate,
        estimate * math.exp(-math.hypot(below, model)),
        estimate * math.exp(math.hypot(above, model)),
    )

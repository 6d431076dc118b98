"""Step time, throughput and exposed communication elsewhere, with intervals. Pure.

An interval holds what the calibration's own rounds leave open (every input resampled), what is not known of
the network (the band of its curve), and the model's error on held-out cases where that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.errors import UsageError
from bench.scaling import reading
from bench.scaling.buckets import assign_cap
from bench.scaling.calibration import AllReduceTimes, Calibration, Samples
from bench.scaling.cost import CostBand, CostCurve
from bench.scaling.losses import Losses, split_losses
from bench.scaling.resampling import interval, resampled, widening
from bench.scaling.scenario import Scenario, cost_band, own_curves
from bench.scaling.shared_cores import on_shared_cores
from bench.scaling.slowest_rank import RankSpread
from bench.scaling.timeline import Compute, SimulatedStep, Slowdown, make_work, simulate
from bench.stats import Interval

RESAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One scenario's outcome; `step` is the drawable timeline of the estimate, on the slowest rank."""

    scenario: Scenario
    step_ms: Interval
    images_per_s: Interval
    efficiency: Interval
    """Throughput over n times that of one device."""
    exposed_comm_ms: Interval
    wait_ms: float
    """Of the step: waiting for the slowest rank."""
    losses: Losses
    """What the step takes beyond the same work on one device alone."""
    num_buckets: int
    step: SimulatedStep


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
class _Played:
    """A step; its ms, images/s, efficiency and exposed communication; what it loses, when asked."""

    step: SimulatedStep
    figures: tuple[float, float, float, float]
    losses: Callable[[], Losses]


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
    played = _play(calibration, scenario, _read(calibration, scenario, None), batch)
    rng = np.random.default_rng(0)
    drawn = (_play(calibration, scenario, _read(calibration, scenario, rng), batch) for _ in range(resamples))
    draws = [p.figures for p in drawn]
    error = calibration.model_error_pct if model_error_pct is None else model_error_pct
    wider = widening(calibration)

    def of(index: int, *, share: float = 1.0) -> Interval:
        return interval(played.figures[index], [d[index] for d in draws], wider, (error or 0.0) / 100 * share)

    step_ms = of(0)
    exposed = of(3, share=0.0)
    # The model's error is one of the step; the part that is communication carries all of it.
    reach = (error or 0.0) / 100 * step_ms.estimate
    losses = played.losses()
    return Prediction(
        scenario=scenario,
        step_ms=step_ms,
        images_per_s=of(1),
        efficiency=of(2),
        exposed_comm_ms=replace(
            exposed,
            low=max(exposed.estimate - math.hypot(exposed.estimate - exposed.low, reach), 0.0),
            high=exposed.estimate + math.hypot(exposed.high - exposed.estimate, reach),
        ),
        wait_ms=losses.rank_spread_ms,
        losses=losses,
        num_buckets=len(played.step.buckets),
        step=played.step,
    )


def batch_per_device(calibration: Calibration, scenario: Scenario) -> int:
    """Images per device and micro-batch; strong scaling divides the batch size over the devices.

    Raises UsageError where it does not divide.
    """
    batch = scenario.batch_per_device or calibration.identity.batch_per_device
    if scenario.scaling == "weak":
        return batch
    if batch % scenario.num_devices:
        raise UsageError(
            f"the global batch of {batch} does not divide over {scenario.num_devices} devices; "
            f"give --batch-size a multiple of {scenario.num_devices}"
        )
    return batch // scenario.num_devices


def _read(calibration: Calibration, scenario: Scenario, rng: np.random.Generator | None) -> _Inputs:
    def value(samples: Samples) -> float:
        return float(np.median(resampled(samples, rng)))

    c = calibration

    def again(allreduce: tuple[AllReduceTimes, ...]) -> tuple[AllReduceTimes, ...]:
        return tuple(
            replace(t, points=tuple((size, resampled(times, rng)) for size, times in t.points))
            for t in allreduce
        )

    curves = own_curves(again(c.allreduce))
    if scenario.measured is not None:
        other = replace(scenario.measured, allreduce=again(scenario.measured.allreduce))
        scenario = replace(scenario, measured=other)
    band: CostBand = cost_band(c, scenario, curves)
    compute, slowdown = reading.compute(c, value), reading.slowdown(c, value)
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
            of_ranks=resampled(c.rank_spread, rng),
            of_slowest=resampled(c.slowest_spread, rng),
        ),
        comm=comm,
    )


def _play(calibration: Calibration, scenario: Scenario, inputs: _Inputs, batch: int) -> _Played:
    n, calibrated = scenario.num_devices, calibration.identity.batch_per_device
    layout = assign_cap(
        [p.num_bytes for p in calibration.parameters],
        scenario.bucket_cap_mb,
        kinds=[p.kind for p in calibration.parameters],
    )
    size = batch / calibrated
    alone = n == 1
    # A rank's compute was measured beside other ranks, which may slow it; one device has no others.
    quiet = inputs.single_ms / inputs.compute.total_ms if alone else 1.0
    micro = inputs.compute.scaled(quiet)
    own = Compute(
        before_ms=size
        * (micro.before_ms + (scenario.accumulate - 1) * (micro.before_ms + micro.backward_ms)),
        backward_ms=size * micro.backward_ms,
        after_ms=micro.after_ms,
    )
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
    images_per_s = batch * n * scenario.accumulate * 1000 / step.step_ms
    single = calibrated * 1000 / inputs.single_ms

    def losses() -> Losses:
        without_copies = simulate(work, compute, slowdown=inputs.slowdown)
        return split_losses(
            exposed_ms=step.exposed_comm_ms,
            handling_ms=max(step.step_ms - without_copies.step_ms, 0.0),
            latency_ms=inputs.comm(1.0) * len(layout),
            comm_ms=step.comm_ms,
            rank_spread_ms=own.total_ms * (slowest - 1),
            sharing_ms=own.total_ms - size * scenario.accumulate * inputs.single_ms,
        )

    figures = (step.step_ms, images_per_s, images_per_s / n / single, step.exposed_comm_ms)
    return _Played(step, figures, losses)

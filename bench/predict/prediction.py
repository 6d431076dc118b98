"""Predicts step time, throughput and exposed communication elsewhere, with intervals.

An interval holds what the calibration's own rounds leave open (every input resampled), what is not known of
the network (the band of its curve), and the model's error on held-out cases where that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

import numpy as np
import scipy
from msgspec import Meta

from ..buckets import assign_cap
from ..case import wire_share
from ..cli import command, speaker
from ..stats.interval import Interval
from .allreduce import AllReduceTimes, Samples, on_shared_cores
from .calibration import Calibration
from .networks import MeasuredNetwork
from .scenario import Scenario, as_calibrated, batch_per_device, cost_band, own_curves
from .timeline import Compute, SimulatedStep, make_work, simulate

MOST_HALF_WIDTH = 0.5
"""A figure whose 95% half-width is a larger share of its value says its order of magnitude at most."""

MUCH_OF_STEP = 0.2
"""Share of a predicted step from which on what is extrapolated in it is pointed out."""

LITTLE_OF_STEP = 0.05
"""An exposed communication that is known to this share of the step is known well enough, however small."""

MOST_TIMES = 30.0
"""Calibrating that many times as long is not proposed: a quieter machine helps more."""

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
    """One scenario's outcome: a row of the table on the terminal, of the CSV, the JSON and the page.

    Where `reason` says why it is refused, it has no figures. Exposed communication may be missing alone.
    """

    num_devices: Annotated[int, Meta(ge=1)]
    bucket_cap_mb: str
    network: str
    """What joins the devices, in a word or two."""
    scaling: str
    batch_size: int
    """Per device (weak) or global (strong)."""
    comm_hook: str
    accumulate: int
    unit: str
    num_buckets: int
    asked: bool = True
    """By the user; or made to draw the line."""
    step_ms: Interval | None = None
    images_per_s: Interval | None = None
    """Units per second, counted in `unit`."""
    efficiency: Interval | None = None
    """Throughput over n times that of one device."""
    exposed_comm_ms: Interval | None = None
    extrapolated_ms: float | None = None
    """Of the wait for the slowest rank: what was not measured, because fewer ranks were calibrated."""
    lost: Losses | None = None
    timeline: SimulatedStep | None = None
    """The step of the estimate, on the slowest rank."""
    reason: str = ""

    def __post_init__(self) -> None:
        figures = [f for f in (self.step_ms, self.images_per_s, self.efficiency) if f is not None]
        if len(figures) != (0 if self.reason else 3):
            raise ValueError("a prediction has neither figures nor a reason for none, or both")

    @property
    def wait_ms(self) -> float | None:
        """Of the step: waiting for the slowest rank."""
        return None if self.lost is None else self.lost.rank_spread_ms

    @property
    def caution(self) -> str:
        """What of the step is extrapolated, where that is much of it."""
        if self.step_ms is None or self.extrapolated_ms is None:
            return ""
        return _extrapolation(self.extrapolated_ms, self.step_ms.estimate)


@dataclass(frozen=True)
class _Simulated:
    """A step; its ms, units per second, efficiency and exposed communication; more of it when asked."""

    step: SimulatedStep
    figures: tuple[float, float, float, float]
    extrapolated_ms: Callable[[], float]
    losses: Callable[[], Losses]


def predict(
    calibration: Calibration,
    scenario: Scenario,
    *,
    resamples: int = 200,
    model_error_pct: float | None = None,
    step_alone: bool = False,
) -> Prediction:
    """Predict one scenario. Deterministic: the `resamples` draws behind the intervals are seeded.

    `model_error_pct` is the half-width of the model's error, instead of the calibration's own; `step_alone`
    refuses by the width of the step's interval, whatever that of throughput and efficiency. Raises UsageError
    where the scenario asks for what its network or batch cannot give.
    """
    scenario = as_calibrated(calibration, scenario)
    simulated = _simulated(calibration, scenario)
    rng = np.random.default_rng(0)
    draws = [_simulated(*_resampled(calibration, scenario, rng)).figures for _ in range(resamples)]
    error_pct = (calibration.model_error_pct if model_error_pct is None else model_error_pct) or 0.0
    wider = _widening(calibration)
    errors = (*[error_pct / 100] * 3, 0.0)
    step_ms, images_per_s, efficiency, exposed = (
        _interval(simulated.figures[i], [figures[i] for figures in draws], wider, error)
        for i, error in enumerate(errors)
    )

    def made(**found: Any) -> Prediction:
        return Prediction(
            num_devices=scenario.num_devices,
            bucket_cap_mb=str(scenario.bucket_cap_mb),
            network=scenario.network_name,
            scaling=scenario.scaling,
            batch_size=scenario.batch_per_device or 0,
            comm_hook=scenario.comm_hook,
            accumulate=scenario.accumulate,
            unit=calibration.identity.unit,
            num_buckets=len(simulated.step.buckets),
            **found,
        )

    width = width_of(step_ms) if step_alone else width_of(step_ms, images_per_s, efficiency)
    if width > MOST_HALF_WIDTH:
        much = _extrapolation(simulated.extrapolated_ms(), step_ms.estimate)
        return made(reason=refusal(width, much=much, error_pct=error_pct))
    # The model's error is one of the step; the part that is communication carries all of it.
    reach = error_pct / 100 * step_ms.estimate
    exposed = replace(
        exposed,
        low=max(exposed.estimate - math.hypot(exposed.estimate - exposed.low, reach), 0.0),
        high=exposed.estimate + math.hypot(exposed.high - exposed.estimate, reach),
    )
    return made(
        step_ms=step_ms,
        images_per_s=images_per_s,
        efficiency=efficiency,
        exposed_comm_ms=None if is_exposed_refused(exposed, step_ms) else exposed,
        extrapolated_ms=simulated.extrapolated_ms(),
        lost=simulated.losses(),
        timeline=simulated.step,
    )


def efficiency_of(calibration: Calibration, scenario: Scenario) -> float:
    """Predict the efficiency of one scenario without an interval."""
    return _simulated(calibration, as_calibrated(calibration, scenario)).figures[2]


def width_of(*figures: Interval) -> float:
    """The widest half interval over its value; infinite where one is unbounded or its value 0."""
    return max(_half_width(figure) for figure in figures)


def is_exposed_refused(exposed_ms: Interval, step_ms: Interval) -> bool:
    """Whether exposed communication is known neither to half its value nor to a small share of the step."""
    half_ms = (exposed_ms.high - exposed_ms.low) / 2
    return width_of(exposed_ms) > MOST_HALF_WIDTH and not half_ms <= LITTLE_OF_STEP * step_ms.estimate


def refusal(width: float, *, much: str = "", error_pct: float = 0.0) -> str:
    """Say why a prediction of this half-width over its value is not shown, and what would narrow it.

    The width goes as 1 / sqrt(rounds). `much` says what of the step is extrapolated, `error_pct` is the
    model's error that the interval holds.
    """
    size = f"±{100 * width:,.0f}%" if width < 100 else "unbounded"
    times = (min(width, 1e9) / MOST_HALF_WIDTH) ** 2
    if error_pct / 100 > MOST_HALF_WIDTH:
        off = f"the simulation was off by up to {error_pct:.0f}% on held-out cases"
        remedy = f"{off}; calibrate on a quieter machine"
    elif times > MOST_TIMES:
        remedy = f"calibrate on a quieter machine; {command('doctor')} says what disturbs it"
    else:
        longer = f"{times:.1f} times the --max-time or --rounds"
        remedy = f"calibrate longer with {speaker('run')} --calibrate, {longer}"
    noisy = f"{much} of a noisy calibration; " if much else ""
    return f"not predicted: the interval would be {size}; {noisy}{remedy}"


def _extrapolation(extrapolated_ms: float, step_ms: float) -> str:
    """Say what of a step is rank spread beyond the ranks that were calibrated; empty below a fifth of it."""
    if extrapolated_ms <= MUCH_OF_STEP * step_ms:
        return ""
    return f"{extrapolated_ms:,.0f} ms of {step_ms:,.0f} ms are extrapolated rank spread"


def _half_width(figure: Interval) -> float:
    if not (math.isfinite(figure.low) and math.isfinite(figure.high)):
        return math.inf
    if figure.estimate <= 0:
        return math.inf if figure.high > 0 else 0.0
    return figure.half_width


def _resampled(
    calibration: Calibration, scenario: Scenario, rng: np.random.Generator
) -> tuple[Calibration, Scenario, float]:
    """Draw another calibration, measured network and place within the network's band.

    The order of the draws decides the ends of every interval: a new figure is drawn last.
    """

    def again(samples: Samples) -> Samples:
        return tuple(rng.choice(samples, len(samples))) if len(samples) > 1 else samples

    def curves(allreduce: tuple[AllReduceTimes, ...]) -> tuple[AllReduceTimes, ...]:
        return tuple(replace(t, points=tuple((s, again(times)) for s, times in t.points)) for t in allreduce)

    def drawn(names: Sequence[str]) -> dict[str, Any]:
        return {name: again(getattr(calibration, name)) for name in names}

    found = replace(calibration, allreduce=curves(calibration.allreduce))
    if isinstance(scenario.network, MeasuredNetwork):
        other = replace(scenario.network, allreduce=curves(scenario.network.allreduce))
        scenario = replace(scenario, network=other)
    steps = drawn(("forward_ms", "data_ms", "backward_ms", "optimizer_ms"))
    slow = drawn(("compute_slowdown", "comm_slowdown"))
    place = float(rng.triangular(-1, 0, 1))
    cores = drawn(("comm_core_share",) if _is_on_shared_cores(calibration, scenario) else ())
    rest = drawn(("single_step_ms", "copy_ms", "residual_ms", "rank_spread", "slowest_spread"))
    scale = float(np.median(steps["backward_ms"])) / (float(np.median(calibration.backward_ms)) or 1.0)
    parameters = tuple(replace(p, ready_ms=p.ready_ms * scale) for p in calibration.parameters)
    return replace(found, parameters=parameters, **steps, **slow, **cores, **rest), scenario, place


def _is_on_shared_cores(calibration: Calibration, scenario: Scenario) -> bool:
    own = any(times.num_ranks == calibration.num_ranks > 1 for times in calibration.allreduce)
    return calibration.identity.device_type == "cpu" and scenario.network is not None and own


def _simulated(c: Calibration, scenario: Scenario, place: float = 0.0) -> _Simulated:
    """Simulate a scenario from the medians of a calibration; `place` is that in the network's band."""
    n, times = scenario.num_devices, scenario.accumulate
    batch = batch_per_device(scenario)
    size = batch / c.identity.batch_per_device
    sizes = [p.num_bytes for p in c.parameters]
    layout = assign_cap(sizes, scenario.bucket_cap_mb, kinds=[p.kind for p in c.parameters])
    comm, slowdown, micro = cost_band(c, scenario).at(place), c.slowdown(), c.compute()
    if _is_on_shared_cores(c, scenario):
        slowdown, comm = on_shared_cores(
            slowdown,
            core_share=median(c.comm_core_share),
            calibrated=(own_curves(c.allreduce)[c.num_ranks], c.num_ranks),
            asked=(comm, n),
            num_bytes=sum(sizes),
        )

    def step_of(micro: Compute) -> Compute:
        before_ms = times * micro.before_ms + (times - 1) * micro.backward_ms
        return Compute(
            before_ms=size * before_ms, backward_ms=size * micro.backward_ms, after_ms=micro.after_ms
        )

    # A rank's compute was measured beside other ranks, which may slow it; one device has no others.
    by_itself = median(c.single_step_ms or (micro.total_ms,)) / micro.total_ms
    quiet = by_itself if n == 1 else 1.0
    own, single = step_of(micro.scaled(quiet)), step_of(micro.scaled(by_itself))
    slowest = c.spread.factor(n)
    ready_ms = [min(p.ready_ms, micro.backward_ms) * quiet * size * slowest for p in c.parameters]
    work = make_work(sizes, ready_ms, layout, comm, wire_share=wire_share(scenario.comm_hook))
    compute = own.scaled(slowest)
    copy_ms, residual_ms = (0.0, 0.0) if n == 1 else (median(c.copy_ms), median(c.residual_ms))
    step = simulate(work, compute, slowdown=slowdown, copy_ms=copy_ms, residual_ms=residual_ms)
    per_sample = c.identity.units_per_sample
    units_per_s = batch * per_sample * n * times * 1000 / step.step_ms
    of_single = batch * per_sample * times * 1000 / single.total_ms

    def extrapolated_ms() -> float:
        return own.total_ms * max(slowest - c.spread.factor(min(n, c.num_ranks)), 0.0)

    def losses() -> Losses:
        without_copies = simulate(work, compute, slowdown=slowdown)
        network_ms = max(step.exposed_comm_ms - max(step.step_ms - without_copies.step_ms, 0.0), 0.0)
        latency = min(comm(1.0) * len(layout) / step.comm_ms, 1.0) if step.comm_ms > 0 else 0.0
        return Losses(
            bandwidth_ms=network_ms * (1 - latency),
            latency_ms=network_ms * latency,
            handling_ms=step.exposed_comm_ms - network_ms,
            rank_spread_ms=own.total_ms * (slowest - 1),
            sharing_ms=own.total_ms - single.total_ms,
        )

    figures = (step.step_ms, units_per_s, units_per_s / n / of_single, step.exposed_comm_ms)
    return _Simulated(step, figures, extrapolated_ms, losses)


def _widening(calibration: Calibration) -> float:
    """Hesterberg's factor for few rounds (source: `bench.stats.two_runs.ratio_of_medians`)."""
    rounds = min((len(s) for s in (calibration.backward_ms, calibration.forward_ms) if len(s) > 1), default=0)
    if not rounds:
        return 1.0
    factor = scipy.stats.t.ppf(0.975, rounds - 1) / scipy.stats.norm.ppf(0.975)
    return float(factor * math.sqrt(rounds / (rounds - 1)))


def _interval(estimate: float, draws: Sequence[float], wider: float, error: float) -> Interval:
    """Form the 95% interval of `draws` about `estimate`; without draws only the model's error is left.

    On the logarithm, `wider` is a factor for few rounds, and the error, a share, is added in quadrature.
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

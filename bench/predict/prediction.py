"""Predicts step time, throughput and exposed communication elsewhere, with intervals.

An interval holds what the calibration's own rounds leave open (each input is moved by what they do), what is
not known of the network (the band of its curve), and the model's error where that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev
from typing import Annotated, Any, TypeAlias

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

NETWORK_END = 0.776
"""Within its band a network is anywhere, most likely in the middle: 95% of a triangle lie this far out."""

PARTS = ("forward_ms", "data_ms", "backward_ms", "optimizer_ms")
SLOWDOWNS = ("compute_slowdown", "comm_slowdown")

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


@dataclass(frozen=True)
class _Simulated:
    """A step; its ms, units per second, efficiency and exposed communication; more of it when asked."""

    step: SimulatedStep
    figures: tuple[float, float, float, float]
    losses: Callable[[], Losses]


def predict(
    calibration: Calibration,
    scenario: Scenario,
    *,
    with_interval: bool = True,
    model_error_pct: float | None = None,
    step_alone: bool = False,
) -> Prediction:
    """Predict one scenario; without `with_interval` the intervals hold the model's error alone.

    `model_error_pct` is the half-width of the model's error, instead of the calibration's own; `step_alone`
    refuses by the width of the step's interval, whatever that of throughput and efficiency. Raises UsageError
    where the scenario asks for what its network or batch cannot give.
    """
    scenario = as_calibrated(calibration, scenario)
    simulated = _simulated(calibration, scenario)
    pairs = list(_varied(calibration, scenario)) if with_interval else []
    ends = [tuple(_simulated(*inputs).figures for inputs in pair) for pair in pairs]
    error_pct = (calibration.model_error_pct if model_error_pct is None else model_error_pct) or 0.0
    errors = (*[error_pct / 100] * 3, 0.0)
    step_ms, images_per_s, efficiency, exposed = (
        _interval(simulated.figures[i], [(low[i], high[i]) for low, high in ends], error)
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
        return made(reason=refusal(width, error_pct=error_pct))
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


def refusal(width: float, *, error_pct: float = 0.0) -> str:
    """Say why a prediction of this half-width over its value is not shown, and what would narrow it.

    The width goes as 1 / sqrt(rounds); `error_pct` is the model's error that the interval holds.
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
    return f"not predicted: the interval would be {size}; {remedy}"


def _half_width(figure: Interval) -> float:
    if not (math.isfinite(figure.low) and math.isfinite(figure.high)):
        return math.inf
    if figure.estimate <= 0:
        return math.inf if figure.high > 0 else 0.0
    return figure.half_width


Inputs: TypeAlias = tuple[Calibration, Scenario, float]
"""A calibration, a scenario, and the place within the network's band."""


def _varied(c: Calibration, scenario: Scenario) -> Iterator[tuple[Inputs, Inputs]]:
    """Yield each input at both ends of its 95% interval, the others as they are.

    Parts of a step get longer together, and so do an all-reduce's times over sizes.
    """
    yield (c, scenario, -NETWORK_END), (c, scenario, NETWORK_END)
    middle = median(c.backward_ms)
    paces = [end / middle if middle else 1.0 for end in _ends(c.backward_ms)]
    slower, faster = ((_paced(c, pace), scenario, 0.0) for pace in paces)
    yield slower, faster
    for name in ("copy_ms", "residual_ms", "slowest_spread", "single_step_ms", *SLOWDOWNS, "comm_core_share"):
        samples: Samples = getattr(c, name)
        if len(samples) > 1:
            least = 1.0 if name in SLOWDOWNS else min(*samples, 0.0)
            moved: list[dict[str, Any]] = [{name: (max(end, least),)} for end in _ends(samples)]
            low, high = (replace(c, **ends) for ends in moved)
            yield (low, scenario, 0.0), (high, scenario, 0.0)
    if isinstance(scenario.network, MeasuredNetwork):
        low_net, high_net = (
            replace(scenario.network, allreduce=ends) for ends in _curves(scenario.network.allreduce)
        )
        yield (c, replace(scenario, network=low_net), 0.0), (c, replace(scenario, network=high_net), 0.0)
    else:
        low, high = (replace(c, allreduce=ends) for ends in _curves(c.allreduce))
        yield (low, scenario, 0.0), (high, scenario, 0.0)


def _paced(c: Calibration, pace: float) -> Calibration:
    steps: dict[str, Any] = {name: (pace * median(getattr(c, name)),) for name in PARTS}
    parameters = tuple(replace(p, ready_ms=pace * p.ready_ms) for p in c.parameters)
    return replace(c, parameters=parameters, **steps)


def _ends(samples: Samples) -> tuple[float, float]:
    """The 95% interval of a median: Student's, whose error is sqrt(pi / 2) of the mean's."""
    middle, count = median(samples), len(samples)
    if count == 1:
        return middle, middle
    error = math.sqrt(math.pi / 2 / count) * stdev(samples)
    reach = float(scipy.stats.t.ppf(0.975, count - 1)) * error
    return middle - reach, middle + reach


def _curves(allreduce: tuple[AllReduceTimes, ...]) -> tuple[tuple[AllReduceTimes, ...], ...]:
    """All-reduces whose every time is as short, or as long, as its repetitions leave open."""

    def moved(sign: int) -> tuple[AllReduceTimes, ...]:
        def of(times: Samples) -> float:
            reach = (max(times) - min(times)) / 2 / math.sqrt(len(times))
            return max(median(times) + sign * reach, min(times))

        return tuple(replace(one, points=tuple((s, (of(t),)) for s, t in one.points)) for one in allreduce)

    return moved(-1), moved(1)


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
        calibrated = own_curves(c.allreduce)[c.num_ranks]
        share = median(c.comm_core_share)
        slowdown = on_shared_cores(
            slowdown, core_share=share, calibrated=calibrated, asked=comm, num_bytes=sum(sizes)
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
    slowest = median(c.slowest_spread or (1.0,)) if n > 1 else 1.0
    ready_ms = [min(p.ready_ms, micro.backward_ms) * quiet * size * slowest for p in c.parameters]
    work = make_work(sizes, ready_ms, layout, comm, wire_share=wire_share(scenario.comm_hook))
    compute = own.scaled(slowest)
    copy_ms, residual_ms = (0.0, 0.0) if n == 1 else (median(c.copy_ms), median(c.residual_ms))
    step = simulate(work, compute, slowdown=slowdown, copy_ms=copy_ms, residual_ms=residual_ms)
    per_sample = c.identity.units_per_sample
    units_per_s = batch * per_sample * n * times * 1000 / step.step_ms
    of_single = batch * per_sample * times * 1000 / single.total_ms

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
    return _Simulated(step, figures, losses)


def _interval(estimate: float, pairs: Sequence[tuple[float, float]], error: float) -> Interval:
    """Form the 95% interval about `estimate` from what each input at its ends gives, on the logarithm.

    Inputs are independent, so their reaches add in quadrature, and with them the model's `error`, a share.
    """
    if estimate <= 0:
        ends = [end for pair in pairs for end in pair]
        return Interval(estimate, min(ends, default=estimate), max(ends, default=estimate))
    reaches = [[math.log(estimate / end) if end > 0 else math.inf for end in pair] for pair in pairs]
    below = math.hypot(math.log1p(error), *(max(*pair, 0.0) for pair in reaches))
    above = math.hypot(math.log1p(error), *(max(*(-one for one in pair), 0.0) for pair in reaches))
    return Interval(estimate, estimate * math.exp(-below), estimate * math.exp(above))

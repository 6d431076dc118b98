"""Predicts step time, throughput and exposed communication elsewhere, with intervals.

An interval holds what the calibration's own rounds leave open (each input is moved by what they do), what is
not known of the network (the band of its curve), and the model's error where that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev
from typing import Annotated, Any, NamedTuple, TypeAlias

import scipy
from msgspec import Meta

from ..buckets import assign_cap
from ..case import wire_share
from ..stats.interval import Interval
from .allreduce import Samples, on_shared_cores
from .calibration import Calibration
from .networks import MeasuredNetwork
from .scenario import OWN, Scenario, as_calibrated, batch_per_device, cost_band
from .timeline import Compute, make_work, simulate

MOST_HALF_WIDTH = 0.5
"""A figure whose 95% half-width is a larger share of its value says its order of magnitude at most."""

PARTS = ("forward_ms", "data_ms", "backward_ms", "optimizer_ms")
SLOWDOWNS = ("compute_slowdown", "comm_slowdown")


class Estimate(NamedTuple):
    """What one simulated step gives, without intervals."""

    step_ms: float
    images_per_s: float
    """Units per second, whatever the workload counts."""
    efficiency: float
    """Throughput over n times that of one device."""
    exposed_comm_ms: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One scenario's outcome: a row of the table, of the CSV, the JSON and the page.

    Where `reason` says why it is refused, it has no figures, which are those of `Estimate`.
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
    step_ms: Interval | None = None
    images_per_s: Interval | None = None
    efficiency: Interval | None = None
    exposed_comm_ms: Interval | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        figures = self.step_ms, self.images_per_s, self.efficiency, self.exposed_comm_ms
        if sum(figure is not None for figure in figures) != (0 if self.reason else len(figures)):
            raise ValueError("a prediction has neither figures nor a reason for none, or both")


def predict(
    calibration: Calibration, scenario: Scenario, *, model_error_pct: float | None = None
) -> Prediction:
    """Predict one scenario; `model_error_pct` is the model's error, if it is not the calibration's.

    Raises UsageError where the scenario asks for what its network or batch cannot give.
    """
    scenario = as_calibrated(calibration, scenario)
    middle = estimate(calibration, scenario)
    pairs = [(estimate(*one), estimate(*other)) for one, other in _varied(calibration, scenario)]
    error = ((calibration.model_error_pct if model_error_pct is None else model_error_pct) or 0.0) / 100
    step_ms, images_per_s, efficiency = (
        _interval(middle[i], [(low[i], high[i]) for low, high in pairs], error) for i in range(3)
    )
    # The model's error is one of the step; the part that is communication carries all of it.
    exposed_ms = middle.exposed_comm_ms
    apart = [[one.exposed_comm_ms - exposed_ms for one in pair] for pair in pairs]
    below, above = (
        math.hypot(error * middle.step_ms, *(max(*(sign * ms for ms in pair), 0.0) for pair in apart))
        for sign in (-1, 1)
    )
    half_widths = (figure.half_width for figure in (step_ms, images_per_s, efficiency))
    width = max(half if math.isfinite(half) else math.inf for half in half_widths)
    size = f"±{100 * width:,.0f}%" if width < 100 else "unbounded"
    refusal = f"not predicted: the interval would be {size}; calibrate longer, or on a quieter machine"
    figures: dict[str, Any] = {
        "step_ms": step_ms,
        "images_per_s": images_per_s,
        "efficiency": efficiency,
        "exposed_comm_ms": Interval(exposed_ms, max(exposed_ms - below, 0.0), exposed_ms + above),
    }
    return Prediction(
        num_devices=scenario.num_devices,
        bucket_cap_mb=str(scenario.bucket_cap_mb),
        network=scenario.network_name,
        scaling=scenario.scaling,
        batch_size=scenario.batch_size or 0,
        comm_hook=scenario.comm_hook,
        accumulate=scenario.accumulate,
        unit=calibration.identity.unit,
        **(figures if width <= MOST_HALF_WIDTH else {"reason": refusal}),
    )


def estimate(c: Calibration, scenario: Scenario, end: str = "estimate") -> Estimate:
    """Simulate a scenario from the medians of a calibration; `end` is that of the network's band."""
    scenario = as_calibrated(c, scenario)
    n, times, batch = scenario.num_devices, scenario.accumulate, batch_per_device(scenario)
    size, micro = batch / c.identity.batch_per_device, c.compute()
    compute = Compute(
        before_ms=size * (times * micro.before_ms + (times - 1) * micro.backward_ms),
        backward_ms=size * micro.backward_ms,
        after_ms=micro.after_ms,
    )
    # A rank's compute was measured beside other ranks, which may slow it; one device has no others.
    single_ms = compute.total_ms * median(c.single_step_ms or (micro.total_ms,)) / micro.total_ms
    step_ms, exposed_ms = single_ms, 0.0
    if n > 1:
        sizes = [p.num_bytes for p in c.parameters]
        layout = assign_cap(sizes, scenario.bucket_cap_mb, kinds=[p.kind for p in c.parameters])
        cost, slowdown = getattr(cost_band(scenario), end), c.slowdown()
        if c.identity.device_type == "cpu" and scenario.network_name != OWN:
            slowdown = on_shared_cores(
                slowdown,
                core_share=median(c.comm_core_share),
                calibrated=MeasuredNetwork(OWN, c.allreduce).curve(c.num_ranks),
                asked=cost,
                num_bytes=sum(sizes),
            )
        ready_ms = [size * min(p.ready_ms, micro.backward_ms) for p in c.parameters]
        step = simulate(
            make_work(sizes, ready_ms, layout, cost, wire_share=wire_share(scenario.comm_hook)),
            compute,
            slowdown=slowdown,
            copy_ms=median(c.copy_ms),
            residual_ms=median(c.residual_ms),
        )
        step_ms, exposed_ms = step.step_ms, step.exposed_comm_ms
    per_device = 1000 * batch * times * c.identity.units_per_sample
    return Estimate(step_ms, n * per_device / step_ms, single_ms / step_ms, exposed_ms)


Inputs: TypeAlias = tuple[Calibration, Scenario, str]


def _varied(c: Calibration, scenario: Scenario) -> Iterator[tuple[Inputs, Inputs]]:
    """Yield each input at both ends of its 95% interval, the others as they are.

    Parts of a step get longer together, and so do an all-reduce's times over sizes.
    """
    yield (c, scenario, "low"), (c, scenario, "high")
    middle = median(c.backward_ms)
    paces = [end / middle if middle else 1.0 for end in _ends(c.backward_ms)]
    slower, faster = ((_paced(c, pace), scenario, "estimate") for pace in paces)
    yield slower, faster
    for name in ("copy_ms", "residual_ms", "single_step_ms", *SLOWDOWNS, "comm_core_share"):
        samples: Samples = getattr(c, name)
        if len(samples) > 1:
            least = 1.0 if name in SLOWDOWNS else min(*samples, 0.0)
            moved: list[dict[str, Any]] = [{name: (max(end, least),)} for end in _ends(samples)]
            low, high = (replace(c, **ends) for ends in moved)
            yield (low, scenario, "estimate"), (high, scenario, "estimate")
    if isinstance(scenario.network, MeasuredNetwork):
        quick, slow = (replace(scenario, network=_moved(scenario.network, sign)) for sign in (-1, 1))
        yield (c, quick, "estimate"), (c, slow, "estimate")


def _paced(c: Calibration, pace: float) -> Calibration:
    steps: dict[str, Any] = {name: (pace * median(getattr(c, name)),) for name in PARTS}
    return replace(c, parameters=tuple(replace(p, ready_ms=pace * p.ready_ms) for p in c.parameters), **steps)


def _ends(samples: Samples) -> tuple[float, float]:
    """The 95% interval of a median: Student's, whose error is sqrt(pi / 2) of the mean's."""
    middle, count = median(samples), len(samples)
    if count == 1:
        return middle, middle
    error = math.sqrt(math.pi / 2 / count) * stdev(samples)
    reach = float(scipy.stats.t.ppf(0.975, count - 1)) * error
    return middle - reach, middle + reach


def _moved(network: MeasuredNetwork, sign: int) -> MeasuredNetwork:
    """The network whose every time is as short, or as long, as its repetitions leave open."""

    def of(times: Samples) -> float:
        reach = (max(times) - min(times)) / 2 / math.sqrt(len(times))
        return max(median(times) + sign * reach, min(times))

    moved = (replace(one, points=tuple((s, (of(t),)) for s, t in one.points)) for one in network.allreduce)
    return replace(network, allreduce=tuple(moved))


def _interval(middle: float, pairs: Sequence[tuple[float, float]], error: float) -> Interval:
    """Form the 95% interval about `middle` from what each input at its ends gives, on the logarithm.

    Inputs are independent, so their reaches add in quadrature, and with them the model's `error`, a share.
    """
    reaches = [[math.log(middle / end) if end > 0 else math.inf for end in pair] for pair in pairs]
    below = math.hypot(math.log1p(error), *(max(*pair, 0.0) for pair in reaches))
    above = math.hypot(math.log1p(error), *(max(*(-one for one in pair), 0.0) for pair in reaches))
    return Interval(middle, middle * math.exp(-below), middle * math.exp(above))

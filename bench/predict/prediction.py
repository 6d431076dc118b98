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

from ..common.errors import UsageError
from ..plan.buckets import PYTORCH_CAPS, Caps, fill_buckets
from ..plan.case import get_wire_share
from ..plan.settings import MAX_DEVICES
from ..stats.interval import Interval
from .allreduce import CostBand, CostCurve, Samples, carry_slowdown, combine_levels, compute_port_factor
from .calibration import Calibration
from .networks import MeasuredNetwork, NetworkModel
from .timeline import Compute, simulate_ms

PARTS = ("forward_ms", "data_ms", "backward_ms", "optimizer_ms")
SLOWDOWNS = ("compute_slowdown", "comm_slowdown")

HIDDEN_SHARES = 0.5, 1.0, 0.0
"""Share of the shorter network level that is hidden behind the longer: unknown, so the band has both ends."""

MEASURED_NETWORK = "the network as measured"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One point to predict.

    `network` joins the nodes, `intra` the GPUs of a node. Without either it is what was calibrated. A
    measured network replaces `intra` too.
    """

    num_devices: int
    network: NetworkModel | MeasuredNetwork | None = None
    intra: NetworkModel | None = None
    gpus_per_node: int | None = None
    nics_per_node: int | None = None
    """NICs that share a node's work; by default the network's own count, or one per GPU."""
    bucket_cap_mb: Caps = PYTORCH_CAPS
    batch_size: int | None = None
    """Per device (weak) or in all (strong)."""
    scaling: str = "weak"
    """`weak`, `strong`, or as calibrated (empty)."""
    comm_hook: str = "none"
    accumulate: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MAX_DEVICES:
            raise UsageError(f"{self.num_devices} devices cannot be predicted; give 1 to {MAX_DEVICES}")

    @property
    def networks(self) -> list[NetworkModel | MeasuredNetwork]:
        """Networks that join the devices, the inner level first."""
        levels = (self.network,) if isinstance(self.network, MeasuredNetwork) else (self.intra, self.network)
        return [net for net in levels if net is not None]

    @property
    def network_name(self) -> str:
        """Names of the networks that join the devices, in a word or two each."""
        return " + ".join(net.name for net in self.networks)


def fill_scenario(calibration: Calibration, scenario: Scenario) -> Scenario:
    """Fill in what a scenario does not name: network, scaling, and batch."""
    scaling, batch = scenario.scaling or calibration.scaling, calibration.identity.batch_per_device
    usual = batch * calibration.num_ranks if scaling == "strong" else batch
    network = scenario.network
    if network is None and scenario.intra is None:
        network = MeasuredNetwork(MEASURED_NETWORK, calibration.allreduce)
    return replace(scenario, scaling=scaling, batch_size=scenario.batch_size or usual, network=network)


def compute_cost_band(scenario: Scenario, slowed: float = 1.0) -> CostBand:
    """Cost an all-reduce of a scenario `fill_scenario`, whose kernels take `slowed` times as long as alone.

    Raises UsageError where the scenario names no network for what it asks.
    """
    n, network, inside = scenario.num_devices, scenario.network, scenario.intra
    if n == 1:
        return CostBand.from_curve(CostCurve())
    if isinstance(network, MeasuredNetwork):
        return network.compute_band(n).scale(slowed)
    if network is not None and network.level == "intra":
        network, inside = None, inside or network
    per_node = min(scenario.gpus_per_node or (1 if inside is None else 8), n)
    nodes = -(-n // per_node)
    if nodes > 1 and network is None:
        raise UsageError(
            f"{scenario.network_name} joins the GPUs of one node, {n} GPUs at {per_node} per node are "
            f"{nodes}; name what joins the nodes, as --network ib-400g"
        )
    if network is not None and nodes > 1 and network.whole:
        return network.compute_band(n).scale(slowed)
    if per_node > 1 and inside is None:
        raise UsageError(f"{per_node} GPUs per node need --intra, what joins them, such as nvlink-h100")
    intra = (
        CostBand.from_curve(CostCurve()) if inside is None else inside.compute_band(per_node).scale(slowed)
    )
    if network is None or nodes == 1:
        return intra
    inter = network.compute_band(nodes, nics=scenario.nics_per_node or network.nics or per_node)
    inter = inter.scale(compute_port_factor(nodes, num_ranks=n, slowed=slowed))
    return CostBand(*map(combine_levels, intra, inter, HIDDEN_SHARES))


class SimulatedStep(NamedTuple):
    """Outcome of one simulated step, without intervals."""

    step_ms: float
    images_per_s: float
    """Units per second, whatever the workload counts."""
    efficiency: float
    """Throughput over n times that of one device."""
    exposed_comm_ms: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One scenario's outcome, figures as those of `SimulatedStep`: a row of table, JSON and page."""

    num_devices: Annotated[int, Meta(ge=1)]
    bucket_cap_mb: str
    network: str
    """Network that joins the devices, in a word or two."""
    scaling: str
    batch_size: int
    """Per device (weak) or global (strong)."""
    comm_hook: str
    accumulate: int
    unit: str
    step_ms: Interval
    images_per_s: Interval
    efficiency: Interval
    exposed_comm_ms: Interval


def predict(
    calibration: Calibration, scenario: Scenario, *, model_error_pct: float | None = None
) -> Prediction:
    """Predict one scenario; `model_error_pct` is the model's error, if it is not the calibration's.

    Raises UsageError where the scenario asks for what its network or batch cannot give.
    """
    scenario = fill_scenario(calibration, scenario)
    middle = simulate_scenario(calibration, scenario)
    pairs = [
        (simulate_scenario(*one), simulate_scenario(*other))
        for one, other in _yield_inputs(calibration, scenario)
    ]
    error = ((calibration.model_error_pct if model_error_pct is None else model_error_pct) or 0.0) / 100
    step_ms, images_per_s, efficiency = (
        _combine_interval(middle[i], [(low[i], high[i]) for low, high in pairs], error) for i in range(3)
    )
    # What is not known of the step is not known of the part of it that is communication.
    below, above = step_ms.estimate - step_ms.low, step_ms.high - step_ms.estimate
    exposed_ms = middle.exposed_comm_ms
    exposed = Interval(exposed_ms, max(exposed_ms - below, 0.0), exposed_ms + above)
    # A step is seldom shorter than that of one device, and then it was measured so.
    if efficiency.estimate <= 1:
        efficiency = replace(efficiency, high=min(efficiency.high, 1.0))
    if scenario.num_devices == 1:
        efficiency, exposed = Interval(1.0, 1.0, 1.0), Interval(0.0, 0.0, 0.0)
    return Prediction(
        num_devices=scenario.num_devices,
        bucket_cap_mb=scenario.bucket_cap_mb,
        network=scenario.network_name,
        scaling=scenario.scaling,
        batch_size=scenario.batch_size or 0,
        comm_hook=scenario.comm_hook,
        accumulate=scenario.accumulate,
        unit=calibration.identity.unit,
        step_ms=step_ms,
        images_per_s=images_per_s,
        efficiency=efficiency,
        exposed_comm_ms=exposed,
    )


def simulate_scenario(c: Calibration, scenario: Scenario, end: str = "estimate") -> SimulatedStep:
    """Simulate a scenario from the medians of a calibration; `end` is that of the network's band."""
    scenario = fill_scenario(c, scenario)
    n, times, batch = scenario.num_devices, scenario.accumulate, scenario.batch_size or 0
    if scenario.scaling == "strong":
        if batch % n:
            raise UsageError(
                f"the global batch of {batch} does not divide over {n} devices; "
                f"give --batch-size a multiple of {n}"
            )
        batch //= n  # per device and micro-batch
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
        layout = fill_buckets(sizes, scenario.bucket_cap_mb, kinds=[p.kind for p in c.parameters])
        cost, slowdown = getattr(compute_cost_band(scenario), end), c.get_slowdown()
        if c.identity.device_type == "cpu" and scenario.network_name != MEASURED_NETWORK:
            slowdown = carry_slowdown(
                slowdown,
                core_share=median(c.comm_core_share),
                calibrated=c.make_curve(),
                asked=cost,
                num_bytes=sum(sizes),
            )
        beside = getattr(compute_cost_band(scenario, slowdown.comm), end)
        if c.num_ranks > 1 and scenario.intra is None:  # a slow-down that was measured across the network
            beside = cost.scale(slowdown.comm)
        share = get_wire_share(scenario.comm_hook)
        step_ms = simulate_ms(
            [size * min(p.ready_ms, micro.backward_ms) for p in c.parameters],
            layout,
            lambda num_bytes: cost(num_bytes * share),
            compute,
            slowdown=replace(slowdown, beside_ms=lambda num_bytes: beside(num_bytes * share)),
            copy_ms=median(c.copy_ms),
            residual_ms=median(c.residual_ms),
        )
        # What one device takes beside its compute is no communication.
        wrapper_ms = median(c.residual_ms) if c.num_ranks == 1 else 0.0
        exposed_ms = max(step_ms - compute.total_ms - wrapper_ms, 0.0)
    per_device = 1000 * batch * times * c.identity.units_per_sample
    return SimulatedStep(step_ms, n * per_device / step_ms, single_ms / step_ms, exposed_ms)


Inputs: TypeAlias = tuple[Calibration, Scenario, str]


def _yield_inputs(c: Calibration, scenario: Scenario) -> Iterator[tuple[Inputs, Inputs]]:
    """Yield each input at both ends of its 95% interval, the others as they are.

    Parts of a step get longer together, and so do an all-reduce's times over sizes.
    """
    yield (c, scenario, "low"), (c, scenario, "high")
    # Nothing is ten times as fast as its median.
    middle = median(c.backward_ms) or 1.0
    ends = _compute_ends(c.backward_ms, middle / 10) if any(c.backward_ms) else (middle, middle)
    moved = [[_scale_pace(c, end / middle) for end in ends]]
    for name in ("copy_ms", "residual_ms", "single_step_ms", *SLOWDOWNS, "comm_core_share"):
        samples: Samples = getattr(c, name)
        if len(samples) > 1:
            least = {"single_step_ms": median(samples) / 10, **dict.fromkeys(SLOWDOWNS, 1.0)}
            ends = _compute_ends(samples, least.get(name, min(*samples, 0.0)))
            changes: list[dict[str, Any]] = [{name: (end,)} for end in ends]
            moved.append([replace(c, **change) for change in changes])
    for one, other in moved:
        yield (one, scenario, "estimate"), (other, scenario, "estimate")
    if isinstance(scenario.network, MeasuredNetwork):
        quick, slow = (replace(scenario, network=scenario.network.shift_times(sign)) for sign in (-1, 1))
        yield (c, quick, "estimate"), (c, slow, "estimate")


def _scale_pace(c: Calibration, pace: float) -> Calibration:
    steps: dict[str, Any] = {name: (pace * median(getattr(c, name)),) for name in PARTS}
    return replace(c, parameters=tuple(replace(p, ready_ms=pace * p.ready_ms) for p in c.parameters), **steps)


def _compute_ends(samples: Samples, least: float) -> tuple[float, float]:
    """Compute the 95% interval of a median, by Student: its error is sqrt(pi / 2) of the mean's."""
    middle, count = median(samples), len(samples)
    if count == 1:
        return middle, middle
    error = math.sqrt(math.pi / 2 / count) * stdev(samples)
    reach = float(scipy.stats.t.ppf(0.975, count - 1)) * error
    return max(middle - reach, least), max(middle + reach, least)


def _combine_interval(middle: float, pairs: Sequence[tuple[float, float]], error: float) -> Interval:
    """Form the 95% interval about `middle` from what each input at its ends gives, on the logarithm.

    Inputs are independent, so their reaches add in quadrature, and with them the model's `error`, a share.
    """
    reaches = [[math.log(middle / end) if end > 0 else math.inf for end in pair] for pair in pairs]
    below = math.hypot(math.log1p(error), *(max(*pair, 0.0) for pair in reaches))
    above = math.hypot(math.log1p(error), *(max(*(-one for one in pair), 0.0) for pair in reaches))
    return Interval(middle, middle * math.exp(-below), middle * math.exp(above))

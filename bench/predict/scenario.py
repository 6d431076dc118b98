"""Describes what is asked for (devices, network, batch) and what an all-reduce costs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..buckets import PYTORCH_CAPS, BucketCaps
from ..errors import UsageError
from ..settings import MOST_DEVICES
from .allreduce import (
    AllReduceTimes,
    CostBand,
    CostCurve,
    at_ranks,
    hierarchical,
    measured_curve,
    ring_steps,
    tree_steps,
)
from .calibration import Calibration
from .networks import MeasuredNetwork, NetworkModel

PIPELINED = 0.5
"""Share of the shorter network level hidden behind the longer; unknown between 0 and 1: the band is both."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One point to predict.

    `network` joins the nodes, `intra` the GPUs of a node. Without a network the calibration's own all-reduce
    curve is carried over to `num_devices` by the ring law. A measured one replaces `intra` too.
    """

    num_devices: int
    network: NetworkModel | MeasuredNetwork | None = None
    intra: NetworkModel | None = None
    gpus_per_node: int | None = None
    nics_per_node: int | None = None
    """NICs that share a node's work; by default the network's own count, or one per GPU."""
    bucket_cap_mb: BucketCaps = PYTORCH_CAPS
    batch_per_device: int | None = None
    scaling: str = "weak"
    """`weak`, `strong`, or as calibrated (empty), which `as_calibrated` fills in."""
    comm_hook: str = "none"
    accumulate: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MOST_DEVICES:
            raise UsageError(f"{self.num_devices} devices cannot be predicted; give 1 to {MOST_DEVICES}")

    @property
    def network_name(self) -> str:
        """What joins the devices, in a word or two."""
        if isinstance(self.network, MeasuredNetwork):
            return self.network.name
        named = [net.name for net in (self.intra, self.network) if net is not None]
        return " + ".join(named) or "the network as measured"

    @property
    def network_source(self) -> str:
        """What its cost rests on, and what is assumed."""
        measured = f": {self.network.source}" if isinstance(self.network, MeasuredNetwork) else ""
        named = [f"{net.name}: {net.source}" for net in (self.intra, self.network) if net is not None]
        if named and not measured:
            return "; ".join(named)
        return (
            f"{self.network_name}{measured}; assumed on other numbers of ranks: the ring law for bytes, a "
            "tree's or ring's steps for latency"
        )


def as_calibrated(calibration: Calibration, scenario: Scenario) -> Scenario:
    """Fill in what a scenario does not name: scaling, and the batch per device (weak) or in all (strong)."""
    scaling, batch = scenario.scaling or calibration.scaling, calibration.identity.batch_per_device
    usual = batch * calibration.num_ranks if scaling == "strong" else batch
    return replace(scenario, scaling=scaling, batch_per_device=scenario.batch_per_device or usual)


def batch_per_device(scenario: Scenario) -> int:
    """Count samples per device and micro-batch of a scenario `as_calibrated`; strong scaling divides them.

    Raises UsageError where the batch does not divide over the devices.
    """
    batch = scenario.batch_per_device or 0
    if scenario.scaling == "weak":
        return batch
    if batch % scenario.num_devices:
        raise UsageError(
            f"the global batch of {batch} does not divide over {scenario.num_devices} devices; "
            f"give --batch-size a multiple of {scenario.num_devices}"
        )
    return batch // scenario.num_devices


def cost_band(calibration: Calibration, scenario: Scenario) -> CostBand:
    """Cost an all-reduce of a scenario.

    Raises UsageError where the scenario names no network for what it asks.
    """
    n, network, inside = scenario.num_devices, scenario.network, scenario.intra
    if n == 1:
        return CostBand.exact(CostCurve())
    if isinstance(network, MeasuredNetwork):
        return _nearest(network.allreduce, n)
    if network is None and inside is None:
        return _nearest(calibration.allreduce, n)
    if inside is None and network is not None and network.level == "intra":
        inside = network
    per_node = min(scenario.gpus_per_node or (1 if inside is None else 8), n)
    nodes = -(-n // per_node)
    if nodes > 1 and (network is None or network.level == "intra"):
        name = "the network" if inside is None else inside.name
        raise UsageError(
            f"{name} joins the GPUs of one node, {n} GPUs at {per_node} per node are {nodes}; "
            "name what joins the nodes, as --network ib-400g"
        )
    if nodes > 1 and network is not None and (network.whole or network.whole_job):
        return network.job_band(n, nodes)
    if per_node > 1 and inside is None:
        raise UsageError(f"{per_node} GPUs per node need --intra, what joins them, such as nvlink-h100")
    intra = inside.band(per_node) if inside is not None else CostBand.exact(CostCurve())
    if nodes == 1 or network is None:
        return intra
    inter = network.band(nodes, nics=scenario.nics_per_node or network.nics or per_node)
    return CostBand(
        hierarchical(intra.estimate, inter.estimate, overlap=PIPELINED),
        hierarchical(intra.low, inter.low, overlap=1.0),
        hierarchical(intra.high, inter.high, overlap=0.0),
    )


def own_curves(allreduce: tuple[AllReduceTimes, ...]) -> dict[int, CostCurve]:
    """Make the measured curves, by number of ranks."""
    return {times.num_ranks: measured_curve(times.points) for times in allreduce if times.num_ranks > 1}


def _nearest(allreduce: tuple[AllReduceTimes, ...], wanted: int) -> CostBand:
    """Carry over the curve of the nearest number of ranks.

    Latency grows as a tree's or a ring's steps, at best not at all.
    """
    curves = own_curves(allreduce)
    if not curves:
        raise UsageError(
            "the calibration holds no all-reduce over 2 ranks or more; name one, as --intra nvlink-h100"
        )
    measured = min(curves, key=lambda n: (abs(n - wanted), n))
    curve = curves[measured]
    if measured == wanted or not curve.points:
        return CostBand.exact(curve)

    def carried(steps: Callable[[int], int]) -> CostCurve:
        hop_ms = curve.points[0][1] / steps(measured)
        return at_ranks(curve, measured=measured, wanted=wanted, hop_ms=hop_ms, steps=steps)

    slow, quick = carried(ring_steps), carried(tree_steps)
    backend = next(times.backend for times in allreduce if times.num_ranks == measured)
    estimate = quick if backend == "nccl" else slow
    return CostBand(estimate, quick, slow) if wanted > measured else CostBand.exact(estimate)

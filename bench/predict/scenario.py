"""Describes what is asked for (devices, network, batch) and what an all-reduce costs there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddp_bench.bench.buckets import PYTORCH_CAPS, BucketCaps
from ddp_bench.bench.case import wire_share
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.predict.allreduce import (
    AllReduceTimes,
    CostBand,
    CostCurve,
    at_ranks,
    hierarchical,
    measured_curve,
    tree_steps,
)
from ddp_bench.bench.predict.calibration import Calibration
from ddp_bench.bench.predict.networks import MeasuredNetwork, NetworkModel
from ddp_bench.bench.settings import MOST_DEVICES

PIPELINED = 0.5
"""Share of the shorter network level hidden behind the longer; unknown between 0 and 1: the band is both."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One point to predict.

    `network` joins the nodes, `intra` the GPUs of a node. Without a network the calibration's own all-reduce
    curve is carried over to `num_devices` by the ring law. `measured` replaces both.
    """

    num_devices: int
    network: NetworkModel | None = None
    intra: NetworkModel | None = None
    gpus_per_node: int | None = None
    nics_per_node: int | None = None
    """NICs that share a node's work; by default the network's own count, or one per GPU."""
    measured: MeasuredNetwork | None = None
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
    def elsewhere(self) -> bool:
        """Whether another network than the calibrated one joins the nodes."""
        return self.network is not None or self.measured is not None

    @property
    def inside(self) -> NetworkModel | None:
        """What joins the GPUs of a node."""
        of_node = self.network if self.network is not None and self.network.level == "intra" else None
        return self.intra or of_node

    @property
    def network_name(self) -> str:
        """What joins the devices, in a word or two."""
        if self.measured is not None:
            return self.measured.name
        named = [net.name for net in (self.intra, self.network) if net is not None]
        return " + ".join(named) or "the network as measured"

    @property
    def network_source(self) -> str:
        """What its cost rests on, and what is assumed."""
        named = [f"{net.name}: {net.source}" for net in (self.intra, self.network) if net is not None]
        if named and self.measured is None:
            return "; ".join(named)
        measured = f": {self.measured.source}" if self.measured is not None else ""
        return (
            f"{self.network_name}{measured}; assumed on other numbers of ranks: the ring law for bytes, a "
            "tree's or ring's steps for latency"
        )

    @property
    def wire_share(self) -> float:
        """Share of fp32 gradients' bytes that is sent."""
        return wire_share(self.comm_hook)


def as_calibrated(calibration: Calibration, scenario: Scenario) -> Scenario:
    """Fill in what a scenario does not name: scaling, and the batch per device (weak) or in all (strong)."""
    scaling, batch = scenario.scaling or calibration.scaling, calibration.identity.batch_per_device
    usual = batch * calibration.num_ranks if scaling == "strong" else batch
    return replace(scenario, scaling=scaling, batch_per_device=scenario.batch_per_device or usual)


def batch_per_device(calibration: Calibration, scenario: Scenario) -> int:
    """Count samples per device and micro-batch; strong scaling divides the batch size over the devices.

    Raises UsageError where it does not divide.
    """
    scenario = as_calibrated(calibration, scenario)
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
    n = scenario.num_devices
    if n == 1:
        return CostBand.exact(CostCurve())
    if scenario.measured is not None:
        return _nearest(scenario.measured.allreduce, n)
    if scenario.network is None and scenario.intra is None:
        return _nearest(calibration.allreduce, n)
    inside, network = scenario.inside, scenario.network
    per_node = min(scenario.gpus_per_node or (1 if inside is None else 8), n)
    nodes = -(-n // per_node)
    if nodes > 1 and (network is None or network.level == "intra"):
        name = "the network" if inside is None else inside.name
        raise UsageError(
            f"{name} joins the GPUs of one node, {n} GPUs at {per_node} per node are {nodes}; "
            "name what joins the nodes, as --network ib-400g"
        )
    if nodes > 1 and network is not None and network.whole_job:
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
    curves = own_curves(allreduce)
    if not curves:
        raise UsageError(
            "the calibration holds no all-reduce over 2 ranks or more; name one, as --network ib-400g"
        )
    nearest = min(curves, key=lambda n: (abs(n - wanted), n))
    backend = next(times.backend for times in allreduce if times.num_ranks == nearest)
    return _carried(curves[nearest], nearest, wanted, backend=backend)


def _carried(curve: CostCurve, measured: int, wanted: int, *, backend: str) -> CostBand:
    """Carry a curve to `wanted` ranks: latency grows as a tree's or a ring's steps, at best not at all."""
    if measured == wanted or not curve.points:
        return CostBand.exact(curve)
    ring = 2 * (measured - 1), 2 * (wanted - 1)
    tree = tree_steps(measured), tree_steps(wanted)

    def carried(steps: tuple[int, int]) -> CostCurve:
        hop_ms = curve.points[0][1] / steps[0]
        return at_ranks(curve, measured=measured, wanted=wanted, hop_ms=hop_ms, steps=steps)

    slow, quick = carried(ring), carried(tree)
    estimate = quick if backend == "nccl" else slow
    return CostBand(estimate, quick, slow) if wanted > measured else CostBand.exact(estimate)

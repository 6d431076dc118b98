"""Describes what is asked for (devices, network, batch) and what an all-reduce costs there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..buckets import PYTORCH_CAPS, Caps
from ..errors import UsageError
from ..settings import MOST_DEVICES
from .allreduce import CostBand, CostCurve, hierarchical
from .calibration import Calibration
from .networks import MeasuredNetwork, NetworkModel

PIPELINED = 0.5, 1.0, 0.0
"""Share of the shorter network level that is hidden behind the longer: unknown, so the band has both ends."""

OWN = "the network as measured"


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
        if not 1 <= self.num_devices <= MOST_DEVICES:
            raise UsageError(f"{self.num_devices} devices cannot be predicted; give 1 to {MOST_DEVICES}")

    @property
    def networks(self) -> list[NetworkModel | MeasuredNetwork]:
        """What joins the devices, the inner level first."""
        levels = (self.network,) if isinstance(self.network, MeasuredNetwork) else (self.intra, self.network)
        return [net for net in levels if net is not None]

    @property
    def network_name(self) -> str:
        """What joins the devices, in a word or two."""
        return " + ".join(net.name for net in self.networks)


def as_calibrated(calibration: Calibration, scenario: Scenario) -> Scenario:
    """Fill in what a scenario does not name: network, scaling, and batch."""
    scaling, batch = scenario.scaling or calibration.scaling, calibration.identity.batch_per_device
    usual = batch * calibration.num_ranks if scaling == "strong" else batch
    network = scenario.network
    if network is None and scenario.intra is None:
        network = MeasuredNetwork(OWN, calibration.allreduce)
    return replace(scenario, scaling=scaling, batch_size=scenario.batch_size or usual, network=network)


def batch_per_device(scenario: Scenario) -> int:
    """Count samples per device and micro-batch of a scenario `as_calibrated`; strong scaling divides them.

    Raises UsageError where the batch does not divide over the devices.
    """
    batch, n = scenario.batch_size or 0, scenario.num_devices
    if scenario.scaling == "weak":
        return batch
    if batch % n:
        raise UsageError(
            f"the global batch of {batch} does not divide over {n} devices; "
            f"give --batch-size a multiple of {n}"
        )
    return batch // n


def cost_band(scenario: Scenario) -> CostBand:
    """Cost an all-reduce of a scenario `as_calibrated`.

    Raises UsageError where the scenario names no network for what it asks.
    """
    n, network, inside = scenario.num_devices, scenario.network, scenario.intra
    if n == 1:
        return CostBand.exact(CostCurve())
    if isinstance(network, MeasuredNetwork):
        return network.band(n)
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
        return network.band(n)
    if per_node > 1 and inside is None:
        raise UsageError(f"{per_node} GPUs per node need --intra, what joins them, such as nvlink-h100")
    intra = CostBand.exact(CostCurve()) if inside is None else inside.band(per_node)
    if network is None or nodes == 1:
        return intra
    inter = network.band(nodes, nics=scenario.nics_per_node or network.nics or per_node)
    return CostBand(*map(hierarchical, intra, inter, PIPELINED))

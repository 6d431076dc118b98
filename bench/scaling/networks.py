"""Names networks, each with the public measurement it rests on and what is assumed.

`intra` joins the GPUs of a node, `inter` the nodes. Bandwidths are nccl-tests' bus bandwidth in 10^9 bytes/s:
bytes / time x 2 (n - 1) / n. Latencies follow NCCL's tree, 2 log2 n steps.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ddp_bench.bench.cli import did_you_mean
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.scaling.cost import CostBand, CostCurve, at_ranks, ring_factor, tree_steps

SIZES = tuple(4096 * 2**i for i in range(20))
"""4 KiB to 2 GiB, where a curve is made from a rate."""

NCCL_NET_HOP_MS = 0.014
"""A step of NCCL's Tree, protocol Simple, across the network: `hwLatencies` in `src/graph/tuning.cc`. NCCL
chooses by it; for us it is assumed, not measured."""

NCCL_NVLINK_HOP_MS = 0.004  # across NVLink, from the same table
TCP_SHARE = 1448 / 1514
"""Payload of a full Ethernet frame under TCP over IPv4 with timestamps."""

LINK_HOP_MS = 0.1
"""One step between two hosts of `link:RATE`; assumed."""


@dataclass(frozen=True, kw_only=True)
class NetworkModel:
    """One level of network; `band(n)` is its all-reduce cost over n GPUs (intra) or n nodes (inter)."""

    name: str
    level: str
    busbw_gb_per_s: tuple[tuple[int, float], ...]
    """By message size as measured over `num_ranks`; one point is a rate for every size, per NIC if inter."""
    source: str
    num_ranks: int = 8
    hop_ms: float = NCCL_NET_HOP_MS
    low: float = 0.95
    """Times as low as this share of the estimate are possible."""
    high: float = 1.1
    """Times as high as this."""
    whole_job: tuple[tuple[int, float], ...] = ()
    """Bus bandwidth of the whole job by nodes, NVLink inside included, where that is what was measured."""
    nics: int | None = None
    """NICs of a node; None is one per GPU."""

    def band(self, num_members: int, *, nics: int = 1) -> CostBand:
        """Cost an all-reduce over GPUs or nodes; `nics` of a node share the work between nodes."""
        if num_members < 2:
            return CostBand.exact(CostCurve())
        share = nics if self.level == "inter" else 1
        curve = self._curve(num_members).with_lanes(share)
        return CostBand(curve, curve.scaled(self.low), curve.scaled(self.high))

    def job_band(self, num_ranks: int, num_nodes: int) -> CostBand:
        """Cost an all-reduce of the whole job, between the points of `whole_job` on log-log axes.

        Beyond the last it stays there, and the decline between the last two goes on at the pessimistic end.
        """
        known = CostCurve(self.whole_job)
        last_nodes, last_rate = self.whole_job[-1]
        rate = known(min(num_nodes, last_nodes))
        decline = math.log(last_rate / self.whole_job[-2][1]) / math.log(last_nodes / self.whole_job[-2][0])
        beyond = max(num_nodes / last_nodes, 1.0) ** decline
        curve = rate_curve(
            rate, factor=ring_factor(num_ranks), latency_ms=tree_steps(num_ranks) * self.hop_ms
        )
        return CostBand(curve, curve.scaled(self.low), curve.scaled(self.high / beyond))

    def _curve(self, num_members: int) -> CostCurve:
        if len(self.busbw_gb_per_s) == 1:
            rate = self.busbw_gb_per_s[0][1]
            return rate_curve(
                rate, factor=ring_factor(num_members), latency_ms=tree_steps(num_members) * self.hop_ms
            )
        measured = CostCurve(
            tuple(
                (float(size), ring_factor(self.num_ranks) * size / rate / 1e6)
                for size, rate in self.busbw_gb_per_s
            )
        )
        steps = tree_steps(self.num_ranks), tree_steps(num_members)
        return at_ranks(
            measured, measured=self.num_ranks, wanted=num_members, hop_ms=self.hop_ms, steps=steps
        )


def rate_curve(gb_per_s: float, *, factor: float, latency_ms: float) -> CostCurve:
    """Latency plus `factor` x bytes at a rate of 10^9 bytes/s."""
    return CostCurve(tuple((float(size), latency_ms + factor * size / gb_per_s / 1e6) for size in SIZES))


H200_BUSBW = tuple(
    (size * 1024, rate)
    for size, rate in (
        *((64, 6.2), (512, 48.0), (1024, 75.0), (4096, 145.0), (16384, 256.0)),
        *((32768, 301.0), (65536, 369.0), (131072, 415.0), (1048576, 466.0)),
    )
)


def _like_h200(peak: float) -> tuple[tuple[int, float], ...]:
    return tuple((size, min(rate * peak / 466.0, rate)) for size, rate in H200_BUSBW)


def _rate(gb_per_s: float) -> tuple[tuple[int, float], ...]:
    return ((SIZES[-1], gb_per_s),)


NVLINK2_GB_PER_S = 21.9

_NVLINK_HOP = f"{1000 * NCCL_NVLINK_HOP_MS:.0f} us a hop (NCCL's tuning model)"
_NET_HOP = f"{1000 * NCCL_NET_HOP_MS:.0f} us a hop (NCCL's tuning model)"
_NVSWITCH = f"assumed: shape over sizes as on 8 x H200, {_NVLINK_HOP}"
_ETH_10G = (
    "10 GbE, 8 nodes: 523 us + 8.57e-10 s/byte of link, as fitted in public; "
    "assumed: on other numbers of nodes latency grows as a tree's"
)

NETWORKS = {
    net.name: net
    for net in (
        NetworkModel(
            name="nvlink-h200",
            level="intra",
            busbw_gb_per_s=H200_BUSBW,
            hop_ms=NCCL_NVLINK_HOP_MS,
            source="nccl-tests all_reduce_perf on 8 x H200, 64 KiB to 1 GiB: 466 GB/s at the top; "
            f"assumed beyond 8: {_NVLINK_HOP}",
        ),
        NetworkModel(
            name="nvlink-h100",
            level="intra",
            busbw_gb_per_s=_like_h200(368.0),
            hop_ms=NCCL_NVLINK_HOP_MS,
            low=368 / 480,
            source=f"nccl-tests on 8 x H100: ring 365-370 GB/s, 480 with NVLS; {_NVSWITCH}",
        ),
        NetworkModel(
            name="nvlink-a100",
            level="intra",
            busbw_gb_per_s=_like_h200(208.0),
            hop_ms=NCCL_NVLINK_HOP_MS,
            low=0.85,
            source=f"nccl-tests on an A100 pair joined by NVLink: 208 GB/s; {_NVSWITCH}",
        ),
        NetworkModel(
            name="nvlink-v100",
            level="intra",
            busbw_gb_per_s=_like_h200(6 * NVLINK2_GB_PER_S),
            hop_ms=NCCL_NVLINK_HOP_MS,
            source=f"{_NVSWITCH}, a ring over each of a V100's six links, each as nvlink2-link",
        ),
        NetworkModel(
            name="nvlink2-link",
            level="intra",
            busbw_gb_per_s=_rate(NVLINK2_GB_PER_S),
            num_ranks=2,
            hop_ms=NCCL_NVLINK_HOP_MS,
            source="nccl-tests on a pair joined by NVLink 2.0, 25 GB/s a way: 21.9 (nccl-tests issue 44); "
            f"assumed: the same rate for every size, {_NVLINK_HOP}",
        ),
        NetworkModel(
            name="pcie-4",
            level="intra",
            busbw_gb_per_s=_rate(20.0),
            hop_ms=NCCL_NET_HOP_MS,
            high=1.3,
            source=f"nccl-tests on A100s across PCIe 4.0: 20 GB/s; assumed: for every size, {_NET_HOP}",
        ),
        NetworkModel(
            name="pcie-5",
            level="intra",
            busbw_gb_per_s=_rate(28.0),
            hop_ms=NCCL_NET_HOP_MS,
            high=1.3,
            source=f"nccl-tests on 8 x RTX 5090 on PCIe 5.0: 28 GB/s; assumed: for every size, {_NET_HOP}",
        ),
        *(
            NetworkModel(
                name=f"ib-{gbit}g",
                level="inter",
                busbw_gb_per_s=_rate(gbit / 8 * 0.92),
                low=0.95,
                high=1.3,
                source=f"InfiniBand {what}, {gbit} Gbit/s per port; assumed: 92% of it at every size, "
                f"a port per GPU, {_NET_HOP}",
            )
            for gbit, what in ((100, "EDR"), (200, "HDR"), (400, "NDR"))
        ),
        NetworkModel(
            name="roce-400g",
            level="inter",
            busbw_gb_per_s=_rate(400 / 8 * 0.92),
            whole_job=((2, 310.0), (4, 180.0)),
            source="nccl-tests on 8 x H100 per node over RoCE: 310 GB/s on 2 nodes, 180 on 4; "
            f"assumed: 180 beyond, at worst declining on, {_NET_HOP}",
        ),
        *(
            NetworkModel(
                name=f"eth-{gbit}g",
                level="inter",
                busbw_gb_per_s=_rate(gbit / 8 * share),
                # alpha of an 8-node ring, 14 steps, told as 6 of a tree
                hop_ms=0.523 / 6,
                high=1.2 if gbit == 10 else 1.6,
                nics=1,
                source=source,
            )
            for gbit, share, source in (
                (10, 8 / 8.57, _ETH_10G),
                (25, TCP_SHARE, "25 GbE; assumed: TCP payload at line rate, latency as measured on 10 GbE"),
                (100, TCP_SHARE, "100 GbE; assumed: TCP payload at line rate, latency as measured on 10 GbE"),
            )
        ),
    )
}

_LINK = re.compile(r"link:(?P<rate>[0-9]+(?:\.[0-9]+)?)(?P<unit>kbit|mbit|gbit)")
_BIT_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def network(name: str, *, level: str | None = None) -> NetworkModel:
    """Look up a network; `link:350mbit` is one TCP link of that rate per node.

    Raises UsageError, naming the known ones, where there is none or it joins the other level.
    """
    link = _LINK.fullmatch(name)
    if link and float(link["rate"]) > 0:
        rate = float(link["rate"]) * _BIT_PER_S[link["unit"]] / 8e9
        return NetworkModel(
            name=name,
            level="inter",
            busbw_gb_per_s=_rate(rate * TCP_SHARE),
            hop_ms=LINK_HOP_MS,
            low=0.98,
            nics=1,
            source=f"one TCP link per node; assumed: all but headers is payload ({TCP_SHARE:.1%}), "
            f"{1000 * LINK_HOP_MS:.0f} us a hop",
        )
    known = [net.name for net in NETWORKS.values() if level in (None, net.level)]
    if name not in known:
        words = [*known, "link:RATE"] if level != "intra" else known
        raise UsageError(f"unknown network {name!r}; {did_you_mean(name, words)} (RATE as 350mbit or 10gbit)")
    return NETWORKS[name]

"""Networks: those of networks.toml and of a user's file, `link:RATE`, and all-reduces that were measured."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ..common.errors import UsageError
from ..common.values import suggest_known
from ..plan.buckets import compute_ring_factor
from ..results.disk import MAX_JSON_BYTES, read_text
from .allreduce import (
    AllReduceTimes,
    CostBand,
    CostCurve,
    Samples,
    carry_to_ranks,
    count_ring_steps,
    count_tree_steps,
    make_curve,
)

SIZES = tuple(4096 * 2**i for i in range(20))
"""4 KiB to 2 GiB, where a curve is made from a rate."""

TCP_SHARE = 1448 / 1514
"""Payload of a full Ethernet frame under TCP over IPv4 with timestamps."""

LINK_HOP_MS = 0.1
"""One step between two hosts of `link:RATE`; assumed."""

Level: TypeAlias = Literal["intra", "inter"]
Rate: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=2**50)]


class NetworkModel(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One level of network, as networks.toml explains it; `band(n)` is its cost over n GPUs or nodes."""

    name: str
    level: Level
    busbw_gb_per_s: Rate | Annotated[tuple[tuple[Bytes, Rate], ...], Meta(min_length=2)]
    source: str = "assumed"
    num_ranks: Annotated[int, Meta(ge=2, le=2**20)] = 8
    hop_ms: Annotated[float, Meta(ge=0, le=1e3)] = 0.014
    low: Annotated[float, Meta(gt=0, le=1)] = 0.95
    high: Annotated[float, Meta(ge=1, le=1e3)] = 1.1
    by_ranks: tuple[tuple[Annotated[int, Meta(ge=2, le=2**20)], Rate], ...] = ()
    whole: bool = False
    nics: Annotated[int, Meta(ge=1, le=2**20)] | None = None

    def compute_band(self, num_members: int, *, nics: int = 1) -> CostBand:
        """Cost an all-reduce over GPUs or nodes; `nics` of a node share the work between nodes."""
        if num_members < 2:
            return CostBand.from_curve(CostCurve())
        curve = self._make_curve(num_members).add_lanes(nics)
        return CostBand(curve, curve.scale(self.low), curve.scale(self.high))

    def _make_curve(self, num_members: int) -> CostCurve:
        times_the_rate = 1.0
        if self.by_ranks:
            rate, most = CostCurve(self.by_ranks), self.by_ranks[-1][0]
            times_the_rate = rate(min(num_members, most)) / rate(self.num_ranks)
        if isinstance(self.busbw_gb_per_s, float):
            latency_ms, factor = count_tree_steps(num_members) * self.hop_ms, compute_ring_factor(num_members)
            gb_per_s = self.busbw_gb_per_s * times_the_rate
            return CostCurve(tuple((s, latency_ms + factor * s / gb_per_s / 1e6) for s in SIZES))
        factor = compute_ring_factor(self.num_ranks)
        measured = make_curve((size, (factor * size / rate / 1e6,)) for size, rate in self.busbw_gb_per_s)
        carried = carry_to_ranks(
            measured, measured=self.num_ranks, wanted=num_members, hop_ms=self.hop_ms, steps=count_tree_steps
        )
        return carried.scale(1 / times_the_rate)


@dataclass(frozen=True)
class MeasuredNetwork:
    """All-reduces that a calibration measured, this one's or another's; none where it had one device."""

    name: str
    """Name of a word or two: it stands in legends."""
    allreduce: tuple[AllReduceTimes, ...]
    source = "assumed on other numbers of ranks: the ring law for bytes, a tree's or ring's steps for latency"

    def shift_times(self, sign: int) -> MeasuredNetwork:
        """Return the network whose every time is as short, or as long, as its repetitions leave open."""

        def shift(times: Samples) -> float:
            reach = (max(times) - min(times)) / 2 / math.sqrt(len(times))
            return max(median(times) + sign * reach, min(times))

        moved = (
            replace(one, points=tuple((s, (shift(t),)) for s, t in one.points)) for one in self.allreduce
        )
        return replace(self, allreduce=tuple(moved))

    def compute_band(self, num_ranks: int) -> CostBand:
        """Carry the curve over; latency grows as a tree's or a ring's steps.

        Raises UsageError where there is none.
        """
        if not self.allreduce:
            raise UsageError(
                f"{self.name} has no all-reduce over 2 ranks or more; name one, as --intra nvlink-h100"
            )
        (times,) = self.allreduce
        measured, curve = times.num_ranks, make_curve(times.points)
        if measured == num_ranks or not curve.points:
            return CostBand.from_curve(curve)

        def carry_curve(steps: Callable[[int], int]) -> CostCurve:
            hop_ms = curve.points[0][1] / steps(measured)
            return carry_to_ranks(curve, measured=measured, wanted=num_ranks, hop_ms=hop_ms, steps=steps)

        slow, quick = carry_curve(count_ring_steps), carry_curve(count_tree_steps)
        estimate = quick if times.backend.startswith("nccl") else slow
        return CostBand(estimate, quick, slow) if num_ranks > measured else CostBand.from_curve(estimate)


def read_networks(path: Path) -> dict[str, NetworkModel]:
    """Read a file of networks, by name. Raises UsageError for what is none."""
    text = read_text(path, most_bytes=MAX_JSON_BYTES, follow=True)
    found: dict[str, NetworkModel] = {}
    name = ""
    try:
        for name, table in tomllib.loads(text).items():
            found[name] = msgspec.convert(table | {"name": name}, NetworkModel)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        why = " ".join(f"{name}: {error}".removeprefix(": ").split())
        raise UsageError(
            f"{path} is no file of networks: {why}; docs/predict.md says how one is written"
        ) from None
    return found


NETWORKS = read_networks(Path(__file__).with_name("networks.toml"))
"""Those that have names of their own."""

_FILE = re.compile(r"(?P<path>.+\.toml)(?::(?P<name>.*))?", re.DOTALL)
_LINK = re.compile(r"link:(?P<rate>[0-9]+(?:\.[0-9]+)?)(?P<unit>kbit|mbit|gbit)")
_BIT_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def find_network(name: str, *, level: Level | None = None) -> NetworkModel:
    """Look up a network: ours, FILE.toml:NAME, or `link:350mbit`, one TCP link of that rate per node.

    Raises UsageError, naming the known ones, where there is none or it joins the other level.
    """
    link = _LINK.fullmatch(name)
    if link and float(link["rate"]) > 0 and level != "intra":
        return NetworkModel(
            name=name,
            level="inter",
            busbw_gb_per_s=float(link["rate"]) * _BIT_PER_S[link["unit"]] / 8e9 * TCP_SHARE,
            hop_ms=LINK_HOP_MS,
            low=0.98,
            nics=1,
            source=f"one TCP link per node; assumed: all but headers is payload ({TCP_SHARE:.1%}), "
            f"{1000 * LINK_HOP_MS:.0f} us a hop",
        )
    own = _FILE.fullmatch(name)
    known = read_networks(Path(own["path"])) if own else NETWORKS
    wanted = {net.name: net for net in known.values() if level in (None, net.level)}
    if found := wanted.get((own["name"] or "") if own else name):
        return found
    if own:
        path = own["path"]
        raise UsageError(f"name a network of {path}, as {path}:NAME; it has {', '.join(wanted)}")
    words = [*wanted, *(["link:RATE"] if level != "intra" else [])]
    raise UsageError(f"unknown network {name!r}; {suggest_known(name, words)} (RATE as 350mbit or 10gbit)")

"""Networks: those of networks.toml and of a user's file, `link:RATE`, and the JSON log of nccl-tests."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ..cli import did_you_mean
from ..errors import UsageError
from ..results.disk import MOST_JSON_BYTES, read_text
from .allreduce import (
    AllReduceTimes,
    CostBand,
    CostCurve,
    at_ranks,
    ring_factor,
    tree_steps,
)

SIZES = tuple(4096 * 2**i for i in range(20))
"""4 KiB to 2 GiB, where a curve is made from a rate."""

TCP_SHARE = 1448 / 1514
"""Payload of a full Ethernet frame under TCP over IPv4 with timestamps."""

LINK_HOP_MS = 0.1
"""One step between two hosts of `link:RATE`; assumed."""

Level: TypeAlias = Literal["intra", "inter"]
Rate: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Bytes: TypeAlias = Annotated[int, Meta(ge=0, le=2**50)]


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
    whole_job: tuple[tuple[Annotated[int, Meta(ge=1, le=2**20)], Rate], ...] = ()
    nics: Annotated[int, Meta(ge=1, le=2**20)] | None = None

    def __post_init__(self) -> None:
        nodes = [nodes for nodes, _ in self.whole_job]
        if len(nodes) == 1 or nodes != sorted(set(nodes)):
            raise ValueError("whole_job has two numbers of nodes or more, from few to many")
        if not isinstance(self.busbw_gb_per_s, float):
            sizes, times = zip(*((s, s / rate) for s, rate in self.busbw_gb_per_s), strict=True)
            if sizes[0] == 0 or list(sizes) != sorted(set(sizes)) or list(times) != sorted(times):
                raise ValueError("busbw_gb_per_s goes from small to large, and a larger message takes longer")

    def band(self, num_members: int, *, nics: int = 1) -> CostBand:
        """Cost an all-reduce over GPUs or nodes; `nics` of a node share the work between nodes."""
        if num_members < 2:
            return CostBand.exact(CostCurve())
        curve = self._curve(num_members).with_lanes(nics)
        return CostBand(curve, curve.scaled(self.low), curve.scaled(self.high))

    def job_band(self, num_ranks: int, num_nodes: int) -> CostBand:
        """Cost an all-reduce of the whole job, between the points of `whole_job` on log-log axes.

        Beyond the last it stays there, and the decline between the last two goes on at the pessimistic end.
        """
        if not self.whole_job:
            return self.band(num_ranks)
        *_, (nodes, rate), (last_nodes, last_rate) = self.whole_job
        decline = math.log(last_rate / rate) / math.log(last_nodes / nodes)
        beyond = max(num_nodes / last_nodes, 1.0) ** decline
        known = CostCurve(self.whole_job)
        curve = self._of_rate(known(min(num_nodes, last_nodes)), num_ranks)
        return CostBand(curve, curve.scaled(self.low), curve.scaled(self.high / beyond))

    def _curve(self, num_members: int) -> CostCurve:
        if isinstance(self.busbw_gb_per_s, float):
            return self._of_rate(self.busbw_gb_per_s, num_members)
        factor = ring_factor(self.num_ranks)
        measured = CostCurve(
            tuple((float(size), factor * size / rate / 1e6) for size, rate in self.busbw_gb_per_s)
        )
        carried = at_ranks(
            measured, measured=self.num_ranks, wanted=num_members, hop_ms=self.hop_ms, steps=tree_steps
        )
        if not self.by_ranks:
            return carried
        rate = CostCurve(self.by_ranks)
        return carried.scaled(rate(self.num_ranks) / rate(min(num_members, self.by_ranks[-1][0])))

    def _of_rate(self, gb_per_s: float, num_members: int) -> CostCurve:
        latency_ms, factor = tree_steps(num_members) * self.hop_ms, ring_factor(num_members)
        return CostCurve(tuple((float(s), latency_ms + factor * s / gb_per_s / 1e6) for s in SIZES))


@dataclass(frozen=True)
class MeasuredNetwork:
    """All-reduces that were measured elsewhere: by nccl-tests, or in another run."""

    name: str
    """In a word or two: it stands in legends."""
    source: str
    allreduce: tuple[AllReduceTimes, ...]
    """Of 2 ranks or more, one per number of ranks."""


def networks_of(text: str, *, source: str) -> dict[str, NetworkModel]:
    """Read a file of networks, by name. Raises UsageError, naming `source`, for what is none."""
    found: dict[str, NetworkModel] = {}
    name = ""
    try:
        for name, table in tomllib.loads(text).items():
            shaped = _shaped(table, NETWORKS | found)
            found[name] = msgspec.convert({**shaped, "name": name}, NetworkModel)
    except (ValueError, OverflowError, RecursionError) as error:
        why = " ".join(f"{name}: {error}".removeprefix(": ").split())
        raise UsageError(
            f"{source} is no file of networks: {why}; docs/predict.md says how one is written"
        ) from None
    return found


def _shaped(table: Any, known: Mapping[str, NetworkModel]) -> dict[str, Any]:
    """A network's table, its rate spread over sizes where it is to have the shape of another."""
    if not isinstance(table, dict):
        raise ValueError(f"{str(table)[:40]!r} is no table of a network")
    if "shape_of" not in table:
        return table
    other, peak = known.get(str(table["shape_of"])), table.get("busbw_gb_per_s")
    if other is None or isinstance(other.busbw_gb_per_s, float) or not isinstance(peak, int | float):
        raise ValueError("shape_of names a network with rates by size, and busbw_gb_per_s is the highest")
    top = other.busbw_gb_per_s[-1][1]
    rates = [[size, min(rate * peak / top, rate)] for size, rate in other.busbw_gb_per_s]
    return {key: value for key, value in table.items() if key != "shape_of"} | {"busbw_gb_per_s": rates}


NETWORKS: dict[str, NetworkModel] = {}
"""Those that have names, in networks.toml."""
_OURS = Path(__file__).with_name("networks.toml")
NETWORKS.update(networks_of(_OURS.read_text(encoding="utf-8"), source=_OURS.name))

_LINK = re.compile(r"link:(?P<rate>[0-9]+(?:\.[0-9]+)?)(?P<unit>kbit|mbit|gbit)")
_BIT_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FILE = re.compile(r"(?P<path>.+\.toml)(?::(?P<name>[^/]*))?")


def network(name: str, *, level: Level | None = None) -> NetworkModel:
    """Look up a network; `link:350mbit` is one TCP link of that rate per node.

    Raises UsageError, naming the known ones, where there is none or it joins the other level.
    """
    link = _LINK.fullmatch(name)
    if link and float(link["rate"]) > 0:
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
    known = [net.name for net in NETWORKS.values() if level in (None, net.level)]
    if name not in known:
        words = [*known, "link:RATE"] if level != "intra" else known
        raise UsageError(f"unknown network {name!r}; {did_you_mean(name, words)} (RATE as 350mbit or 10gbit)")
    return NETWORKS[name]


def named_networks(name: str, *, level: Level | None = None) -> list[NetworkModel]:
    """Look up what `network` knows, FILE.toml:NAME, or all of FILE.toml of that level, or that join nodes."""
    named = _FILE.fullmatch(name)
    if named is None:
        return [network(name, level=level)]
    path = Path(named["path"])
    of_file = networks_of(read_text(path, most_bytes=MOST_JSON_BYTES, follow=True), source=str(path))
    of_level = {key: net for key, net in of_file.items() if level in (None, net.level)}
    found = [net for key, net in of_level.items() if named["name"] in (None, key)]
    if named["name"] is None and level is None:
        found = [net for net in found if net.level == "inter"] or found
    if not found:
        wanted = f"network {named['name']!r}" if named["name"] else "network"
        known = f"; it has {', '.join(of_level)}" if of_level else ""
        raise UsageError(f"{path} has no {wanted}{f' of level {level}' if level else ''}{known}")
    return found


_Number: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]


class _Timing(Struct):
    """Of a message: us, and 10^9 bytes/s; `-C` times the CPU instead."""

    time: Annotated[float, Meta(gt=0, le=1e15)] | None = None
    alg_bw: _Number = 0.0
    bus_bw: _Number = 0.0
    cpu_time: Any = None


class _Result(Struct):
    size: Bytes
    redop: Literal["sum", "prod", "min", "max", "avg"]
    in_place: _Timing | None = None
    out_of_place: _Timing | None = None


class _Config(Struct):
    """`devices` has one entry per process."""

    devices: list[Any]
    nthreads: Annotated[int, Meta(ge=1, le=2**20)]
    ngpus: Annotated[int, Meta(ge=1, le=2**20)]


class _Log(Struct):
    """Before nccl-tests 2.17.9 the key after the results was spelt the second way."""

    nccl_version: Any
    results: tuple[_Result, ...]
    config: Any = None
    average_bus_bandwidth: Any = None
    average_bus_bandwidith: Any = None


def parse_nccl_log(text: str, *, source: str = "the log") -> AllReduceTimes:
    """Read what one run of `all_reduce_perf` wrote as JSON (`-J FILE`), versions 1 to 3: its in-place times.

    DDP reduces in place. The ranks are those that the log tells, or follow from bus over algorithm bandwidth.
    Raises UsageError where it is of another collective, cut off, or has a result that is not understood.
    """
    log = _whole_log(text, source)
    again = "run all_reduce_perf again"
    points: list[tuple[int, tuple[float, ...]]] = []
    by_bandwidth = 0.0
    for result in log.results:
        place = result.in_place or result.out_of_place
        if place is not None and place.cpu_time is not None:
            raise UsageError(f"{source} has times of the CPU, not of the all-reduce; {again} without -C")
        if place is None or place.time is None:
            raise UsageError(f"{source}: the result of {result.size} bytes holds no time; {again}")
        if result.size:
            points.append((result.size, (place.time / 1000,)))
            by_bandwidth = place.bus_bw / place.alg_bw if place.alg_bw else 0.0
    if not points:
        raise UsageError(f"{source} has no message above 0 bytes; run all_reduce_perf with -b 4K -e 1G")
    try:
        config = msgspec.convert(log.config, _Config)
        num_ranks = len(config.devices) * config.nthreads * config.ngpus
    except msgspec.ValidationError:
        num_ranks = max(round(2 / max(2 - by_bandwidth, 1e-3)), 1)
    if num_ranks < 2:
        raise UsageError(f"{source} is of one rank, which communicates nothing; run it over 2 GPUs or more")
    if abs(by_bandwidth - ring_factor(num_ranks)) > 0.05:
        raise UsageError(
            f"{source}: busbw / algbw is {by_bandwidth:.2f}, an all-reduce over {num_ranks} ranks has "
            f"{ring_factor(num_ranks):.2f}; give the log of all_reduce_perf"
        )
    return AllReduceTimes(num_ranks=num_ranks, backend="nccl", points=tuple(points))


def _whole_log(text: str, source: str) -> _Log:
    if not text.lstrip().startswith("{"):
        raise UsageError(f"{source} is no log of nccl-tests in JSON; write one with all_reduce_perf -J FILE")
    try:
        log = msgspec.convert(json.loads(text), _Log)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{source} is no log of nccl-tests' all_reduce_perf ({error}); write one with -J FILE"
        ) from None
    except (ValueError, RecursionError):
        raise UsageError(
            f"{source} is cut off: it is not valid JSON to its end; run all_reduce_perf again"
        ) from None
    if log.average_bus_bandwidth is None and log.average_bus_bandwidith is None:
        raise UsageError(
            f"{source} is cut off before its last part (average_bus_bandwidth); run all_reduce_perf again"
        )
    return log

"""Networks: those of networks.toml and of a user's file, `link:RATE`, and all-reduces that were measured."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
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
    measured_curve,
    ring_factor,
    ring_steps,
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
    nics: Annotated[int, Meta(ge=1, le=2**20)] | None = None

    def __post_init__(self) -> None:
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

    def _curve(self, num_members: int) -> CostCurve:
        times_the_rate = 1.0
        if self.by_ranks:
            rate, most = CostCurve(self.by_ranks), self.by_ranks[-1][0]
            times_the_rate = rate(min(num_members, most)) / rate(self.num_ranks)
        if isinstance(self.busbw_gb_per_s, float):
            latency_ms, factor = tree_steps(num_members) * self.hop_ms, ring_factor(num_members)
            gb_per_s = self.busbw_gb_per_s * times_the_rate
            return CostCurve(tuple((s, latency_ms + factor * s / gb_per_s / 1e6) for s in SIZES))
        factor = ring_factor(self.num_ranks)
        measured = CostCurve(
            tuple((float(size), factor * size / rate / 1e6) for size, rate in self.busbw_gb_per_s)
        )
        carried = at_ranks(
            measured, measured=self.num_ranks, wanted=num_members, hop_ms=self.hop_ms, steps=tree_steps
        )
        return carried.scaled(1 / times_the_rate)


@dataclass(frozen=True)
class MeasuredNetwork:
    """All-reduces that were measured: by the calibration, in another run, or by nccl-tests."""

    name: str
    """In a word or two: it stands in legends."""
    allreduce: tuple[AllReduceTimes, ...]
    source: str = (
        "assumed on other numbers of ranks: the ring law for bytes, a tree's or ring's steps for latency"
    )

    def curve(self, num_ranks: int) -> CostCurve:
        """Give the curve over exactly so many ranks; without points where it was not measured."""
        return next(
            (measured_curve(t.points) for t in self.allreduce if t.num_ranks == num_ranks), CostCurve()
        )

    def band(self, num_ranks: int) -> CostBand:
        """Carry over the curve of the nearest number of ranks; latency grows as a tree's or a ring's steps.

        Raises UsageError where there is none.
        """
        known = [times for times in self.allreduce if times.num_ranks > 1]
        if not known:
            raise UsageError(
                f"{self.name} has no all-reduce over 2 ranks or more; name one, as --intra nvlink-h100"
            )
        nearest = min(known, key=lambda times: (abs(times.num_ranks - num_ranks), times.num_ranks))
        measured, curve = nearest.num_ranks, measured_curve(nearest.points)
        if measured == num_ranks or not curve.points:
            return CostBand.exact(curve)

        def carried(steps: Callable[[int], int]) -> CostCurve:
            hop_ms = curve.points[0][1] / steps(measured)
            return at_ranks(curve, measured=measured, wanted=num_ranks, hop_ms=hop_ms, steps=steps)

        slow, quick = carried(ring_steps), carried(tree_steps)
        estimate = quick if nearest.backend == "nccl" else slow
        return CostBand(estimate, quick, slow) if num_ranks > measured else CostBand.exact(estimate)


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


def network(name: str, *, level: Level | None = None) -> NetworkModel:
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
    path, of_file, one = name.rpartition(".toml:")
    known = NETWORKS
    if of_file or name.endswith(".toml"):
        path = f"{path}.toml" if of_file else name
        known = networks_of(read_text(Path(path), most_bytes=MOST_JSON_BYTES, follow=True), source=path)
    wanted = [net.name for net in known.values() if level in (None, net.level)]
    if one in wanted:
        return known[one]
    if known is not NETWORKS:
        raise UsageError(f"name a network of {path}, as {path}:NAME; it has {', '.join(wanted)}")
    words = [*wanted, "link:RATE"] if level != "intra" else wanted
    raise UsageError(f"unknown network {name!r}; {did_you_mean(name, words)} (RATE as 350mbit or 10gbit)")


_Number: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]


class _Timing(Struct):
    """Of a message: us, and 10^9 bytes/s; `-C` times the CPU instead and has no `time`."""

    time: Annotated[float, Meta(gt=0, le=1e15)]
    alg_bw: Annotated[float, Meta(gt=0, le=1e15)]
    bus_bw: _Number


class _Result(Struct):
    size: Bytes
    redop: Literal["sum", "prod", "min", "max", "avg"]
    in_place: _Timing


class _Config(Struct):
    """`devices` has one entry per process."""

    devices: list[Any]
    nthreads: Annotated[int, Meta(ge=1, le=2**20)]
    ngpus: Annotated[int, Meta(ge=1, le=2**20)]


class _Log(Struct):
    results: tuple[_Result, ...]
    config: _Config


def parse_nccl_log(text: str, *, source: str = "the log") -> AllReduceTimes:
    """Read what one run of `all_reduce_perf` wrote as JSON (`-J FILE`): its in-place times, as DDP reduces.

    Raises UsageError where it is of another collective, cut off, or has a result that is not understood.
    """
    try:
        log = msgspec.json.decode(text, type=_Log)
    except (ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{source} is no log of nccl-tests' all_reduce_perf ({error}); write one with -J FILE"
        ) from None
    num_ranks = len(log.config.devices) * log.config.nthreads * log.config.ngpus
    points = tuple((one.size, (one.in_place.time / 1000,)) for one in log.results if one.size)
    if num_ranks < 2 or not points:
        raise UsageError(
            f"{source} communicates nothing; run all_reduce_perf -b 4K -e 1G over 2 GPUs or more"
        )
    last = log.results[-1].in_place
    if abs(last.bus_bw / last.alg_bw - ring_factor(num_ranks)) > 0.05:
        raise UsageError(
            f"{source}: busbw / algbw is {last.bus_bw / last.alg_bw:.2f}, an all-reduce over {num_ranks} "
            f"ranks has {ring_factor(num_ranks):.2f}; give the log of all_reduce_perf"
        )
    return AllReduceTimes(num_ranks=num_ranks, backend="nccl", points=points)

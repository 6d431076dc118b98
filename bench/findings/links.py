"""Says where GPUs exchange data by a slow way: without peer access, without NVLink, or slower than it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import pandas as pd

from ddp_bench.bench.case import wire_share
from ddp_bench.bench.cli import command
from ddp_bench.bench.conditions import Manifest, part
from ddp_bench.bench.findings.caution import Caution
from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import Row, estimate, text
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.results.aggregate import bus_gb
from ddp_bench.bench.stats import Interval

LEAST_NVLINK_GB_PER_S = 15.0
"""Bus bandwidth that any NVLink exceeds: the slowest, a bridge of two workstation GPUs, has 28 GB/s one way.
PCIe 4.0 with 16 lanes reaches 20 to 25 at best, and less where several GPUs share a switch."""

LARGE_BYTES = 16 * 2**20
"""Gradients from which on the time of their all-reduces is transfer rather than latency."""

MOST_NAMED = 4
"""So many pairs a caution names; nvidia-smi shows the rest."""

Pair: TypeAlias = tuple[str, int, int]
"""A host, and the places of two GPUs among those that its ranks saw, the lower one first."""


def link_cautions(manifest: Manifest, cases: pd.DataFrame) -> list[Caution]:
    """Return what the pairs of GPUs lack that measured cases used; what is not known is not told."""
    known = _known(manifest)
    ok = cases[(cases["status"] == "ok") & (cases["device_type"] == "cuda") & (cases["num_devices"] > 1)]
    used = {text(row["case_id"]): _used(manifest, row) & known.keys() for _, row in ok.iterrows()}
    with_nvlink = {host for (host, _, _), pair in known.items() if pair.get("nvlink")}

    def has_no_peer_access(pair: Pair) -> bool:
        return known[pair].get("peer_access") is False

    def lacks_nvlink(pair: Pair) -> bool:
        slow = known[pair].get("nvlink") is False and not has_no_peer_access(pair)
        return slow and pair[0] in with_nvlink

    found = (
        _caution(
            "no peer access",
            used,
            has_no_peer_access,
            "no peer access: what these GPUs exchange goes through host memory",
            f"{command('doctor')}, line GPU links; nvidia-smi topo -p2p w shows all pairs",
        ),
        _caution(
            "no NVLink",
            used,
            lacks_nvlink,
            "no NVLink, which others on their machine have: the slowest link sets the pace of an all-reduce",
            "choose GPUs joined by NVLink with CUDA_VISIBLE_DEVICES; nvidia-smi topo -m shows them",
        ),
    )
    over_nvlink = {case_id for case_id, pairs in used.items() if _all_nvlink(known[pair] for pair in pairs)}
    slow = _slow_nvlink(ok[ok["case_id"].isin(over_nvlink)])
    return [caution for caution in (*found, slow) if caution is not None]


def bus_gb_per_s(row: Row) -> Interval | None:
    """Return the bus bandwidth of a case's buckets alone in 10^9 bytes/s, as nccl-tests defines it."""
    alone, ranks = estimate(row, "comm_ms"), finite(row["num_devices"])
    layout, buffers_ms = BucketLayout.of_cell(row["bucket_bytes"]), finite(row["buffers_ms"]) or 0.0
    if alone is None or layout is None or not ranks or not alone.estimate > buffers_ms:
        return None
    of_buckets = Interval(*(ms - buffers_ms for ms in (alone.estimate, alone.low, alone.high)))
    sent = wire_share(text(row["comm_hook"])) * sum(layout.num_bytes)
    return of_buckets.inverted(1000 * bus_gb(sent, int(ranks)))


def _all_nvlink(pairs: Iterable[Manifest]) -> bool:
    found = [pair.get("nvlink") is True for pair in pairs]
    return bool(found) and all(found)


def _slow_nvlink(cases: pd.DataFrame) -> Caution | None:
    """Name the case on one host whose large all-reduces are slower than any NVLink."""
    slow: dict[str, float] = {}
    for _, row in cases[cases["num_nodes"] == 1].iterrows():
        layout, found = BucketLayout.of_cell(row["bucket_bytes"]), bus_gb_per_s(row)
        if found is None or layout is None or sum(layout.num_bytes) < LARGE_BYTES:
            continue
        if found.estimate < LEAST_NVLINK_GB_PER_S:
            slow[text(row["case_id"])] = found.estimate
    if not slow:
        return None
    worst = min(slow, key=lambda case_id: slow[case_id])
    return Caution(
        kind="slow all-reduce",
        case_id=worst,
        text=f"the GPUs of {worst} are joined by NVLink, yet its all-reduces have a bus bandwidth of "
        f"{slow[worst]:.1f} GB/s; any NVLink has more than {LEAST_NVLINK_GB_PER_S:g}",
        advice="NCCL_DEBUG=INFO shows which way NCCL takes; look for NCCL_P2P_DISABLE, or a container "
        "without the GPUs' topology",
    )


def _caution(
    kind: str,
    used: Mapping[str, Iterable[Pair]],
    is_slow: Callable[[Pair], bool],
    what: str,
    advice: str,
) -> Caution | None:
    slow = {case_id: set(filter(is_slow, pairs)) for case_id, pairs in used.items()}
    every = set().union(*slow.values())
    if not every:
        return None
    among = len(set().union(*used.values()))
    have = "has" if len(every) == 1 else "have"
    return Caution(
        kind=kind,
        case_id=max(slow, key=lambda case_id: len(slow[case_id])),
        text=f"{len(every)} of {among} used {'pair' if among == 1 else 'pairs'} of GPUs ({_named(every)}) "
        f"{have} {what}",
        advice=advice,
    )


def _known(manifest: Manifest) -> dict[Pair, Manifest]:
    """What is known of every pair of a run's GPUs."""
    hosts = part(manifest, "hosts")
    return {
        (host, first, second): pair
        for host in hosts
        for pair in _tables(part(hosts, host), "gpu_pairs")
        for first, second in [(pair.get("first"), pair.get("second"))]
        if isinstance(first, int) and isinstance(second, int)
    }


def _used(manifest: Manifest, row: Mapping[Any, Any] | pd.Series) -> set[Pair]:
    """The pairs of GPUs between which a case copies: any two of its ranks on a host, or of DP's replicas."""
    ranks = _tables(manifest, "ranks")
    if row["mode"] == "dp":
        host = text(ranks[0].get("host")) if ranks else ""
        return {(host, a, b) for a, b in itertools.combinations(range(int(row["num_devices"])), 2)}
    places = [_place(manifest, rank) for rank in ranks[: int(row["num_devices"])]]
    own = sorted({place for place in places if place is not None})
    return {(host, a, b) for (host, a), (other, b) in itertools.combinations(own, 2) if host == other}


def _place(manifest: Manifest, rank: Manifest) -> tuple[str, int] | None:
    """Host and place of the GPU that a rank trained on; None where its UUID is not known."""
    host = text(rank.get("host"))
    uuids = [gpu.get("uuid") for gpu in _tables(part(part(manifest, "hosts"), host), "gpus")]
    own = rank.get("gpu")
    return (host, uuids.index(own)) if own and own in uuids else None


def _tables(whole: Manifest, name: str) -> list[Manifest]:
    """A list of tables in a part of a manifest; empty where it is something else."""
    found = whole.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _named(pairs: Iterable[Pair]) -> str:
    every = sorted(pairs)
    several = len({host for host, _, _ in every}) > 1
    names = [f"{f'{host} ' if several else ''}{a}-{b}" for host, a, b in every]
    return ", ".join([*names[:MOST_NAMED], *(["…"] if len(names) > MOST_NAMED else [])])

"""Says where GPUs exchange data by a slow way: without peer access, or without NVLink that others have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import pandas as pd

from ddp_bench.bench.cli import command
from ddp_bench.bench.conditions import Manifest, part
from ddp_bench.bench.findings.caution import Caution
from ddp_bench.bench.findings.numbers import plural
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.results.schema import records

Pair: TypeAlias = tuple[str, int, int]
"""A host, and the places of two GPUs among those that its ranks saw, the lower one first."""


def link_cautions(manifest: Manifest, cases: pd.DataFrame) -> list[Caution]:
    """Return a caution about the pairs of GPUs that measured cases used; what is not known is not told."""
    known = _known(manifest)
    with_nvlink = {host for (host, _, _), pair in known.items() if pair.get("nvlink")}
    slow = {
        pair
        for pair, how in known.items()
        if how.get("peer_access") is False or (how.get("nvlink") is False and pair[0] in with_nvlink)
    }
    ok = cases[(cases["status"] == "ok") & (cases["device_type"] == "cuda") & (cases["num_devices"] > 1)]
    used = {text(row["case_id"]): _used(manifest, row) & slow for row in records(ok)}
    count = len(set().union(*used.values()))
    if not count:
        return []
    return [
        Caution(
            kind="slow links",
            case_id=max(used, key=lambda case_id: len(used[case_id])),
            text=f"cases used {plural(count, 'pair')} of GPUs without peer access, or without NVLink that "
            "others of the machine have: the slowest link sets the pace of an all-reduce",
            advice=f"{command('doctor')}, line GPU links; choose GPUs with CUDA_VISIBLE_DEVICES",
        )
    ]


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


def _used(manifest: Manifest, row: Mapping[Any, Any]) -> set[Pair]:
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

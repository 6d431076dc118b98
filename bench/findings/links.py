"""Says where GPUs exchange data by a slow way: without peer access, or without NVLink that others have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import pandas as pd

from ddp_bench.bench.cli import command
from ddp_bench.bench.findings.caution import Caution
from ddp_bench.bench.findings.numbers import plural
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.manifest import Manifest, RankPlace
from ddp_bench.bench.results.schema import records

Pair: TypeAlias = tuple[str, int, int]
"""A host, and the places of two GPUs among those that its ranks saw, the lower one first."""


def link_cautions(manifest: Manifest, cases: pd.DataFrame) -> list[Caution]:
    """Return a caution about the pairs of GPUs that measured cases used; what is not known is not told."""
    known = {
        (name, pair.first, pair.second): pair
        for name, host in manifest.hosts.items()
        for pair in host.gpu_pairs
    }
    with_nvlink = {host for (host, _, _), pair in known.items() if pair.nvlink}
    slow = {
        place
        for place, pair in known.items()
        if pair.peer_access is False or (pair.nvlink is False and place[0] in with_nvlink)
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


def _used(manifest: Manifest, row: Mapping[Any, Any]) -> set[Pair]:
    """The pairs of GPUs between which a case copies: any two of its ranks on a host, or of DP's replicas."""
    ranks = manifest.ranks
    if row["mode"] == "dp":
        host = ranks[0].host if ranks else ""
        return {(host, a, b) for a, b in itertools.combinations(range(int(row["num_devices"])), 2)}
    places = [_place(manifest, rank) for rank in ranks[: int(row["num_devices"])]]
    own = sorted({place for place in places if place is not None})
    return {(host, a, b) for (host, a), (other, b) in itertools.combinations(own, 2) if host == other}


def _place(manifest: Manifest, rank: RankPlace) -> tuple[str, int] | None:
    """Host and place of the GPU that a rank trained on; None where its UUID is not known."""
    host = manifest.hosts.get(rank.host)
    uuids = [gpu.uuid for gpu in (host.gpus if host else None) or ()]
    return (rank.host, uuids.index(rank.gpu)) if rank.gpu and rank.gpu in uuids else None

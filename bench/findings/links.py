"""Says which pairs of GPUs that cases used reach each other by a slow way: without peer access, or NVLink."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import pandas as pd

from bench.conditions import Manifest, part
from bench.findings.caution import Caution
from bench.findings.wording import text

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
            "python -m bench.doctor, line GPU links; nvidia-smi topo -p2p w shows all pairs",
        ),
        _caution(
            "no NVLink",
            used,
            lacks_nvlink,
            "no NVLink, which others on their machine have: the slowest link sets the pace of an all-reduce",
            "choose GPUs joined by NVLink with CUDA_VISIBLE_DEVICES; nvidia-smi topo -m shows them",
        ),
    )
    return [caution for caution in found if caution is not None]


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

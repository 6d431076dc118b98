"""Cases that another one makes superfluous: different caps can give one bucket layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.cluster.ranks import Cluster
from bench.plan import Planned
from bench.run.prepare import LiveCase


def equal_layouts(
    cases: Sequence[LiveCase],
    cluster: Cluster,
    plan: Sequence[Planned],
    earlier_layouts: Mapping[int, Sequence[int]],
) -> list[tuple[LiveCase, str]]:
    """Those of `cases` whose bucket layout an earlier one has, with its case id; the same on every rank.

    Args:
        cases: prepared, in the plan's order.
        cluster: all ranks; the first one's layouts count.
        plan: of the run.
        earlier_layouts: bucket sizes in bytes that an earlier attempt found, by place in the plan.
    """
    here = {live.index for live in cases}
    seen: dict[tuple[Any, ...], str] = {}
    for index, sizes in earlier_layouts.items():
        if index not in here:
            case = plan[index].case
            seen[(*case.apart_from_cap, tuple(sizes))] = case.case_id
    found = []
    for live in cases:
        own = cluster.from_first(live.layout.num_bytes if live.layout is not None else None)
        if own is None:
            continue
        first = seen.setdefault((*live.case.apart_from_cap, tuple(own)), live.case.case_id)
        if first != live.case.case_id:
            found.append((live, first))
    return found

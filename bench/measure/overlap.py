"""How much of the communication is hidden: interval arithmetic on what a trace shows. Pure.

`overlap_pct` is HTA's definition (Holistic Trace Analysis, communication-computation overlap): the time in
which both run, over the time in which communication runs.
"""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Start and end, in one unit."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same covered time as disjoint spans in order; empty and backward spans vanish."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Covered time, counted once."""
    return sum(end - start for start, end in union(spans))


def intersection(first: Iterable[Span], second: Iterable[Span]) -> list[Span]:
    """Where both cover, as disjoint spans."""
    a, b = union(first), union(second)
    result: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def overlap_pct(communication: Iterable[Span], compute: Iterable[Span]) -> float | None:
    """100 x |communication and compute| / |communication|; None where nothing was communicated."""
    comm = union(communication)
    total = length(comm)
    return 100 * length(intersection(comm, compute)) / total if total > 0 else None

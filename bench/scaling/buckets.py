"""DDP's rule that puts parameters into buckets, reproduced. Pure.

The rule of `compute_bucket_assignment_by_size` in PyTorch's `reducer.cpp`: a bucket closes once its size
reaches its cap, so it may exceed it; parameters are never split; each kind (dtype and device) fills buckets
of its own and goes through the caps by itself; the last cap serves all further buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.errors import UsageError

Layout = tuple[tuple[int, ...], ...]
"""Indices of parameters by bucket, in all-reduce order; indices count in the reducer's order."""

MIB = 2**20
DEFAULT_LIMITS = (MIB, 25 * MIB)
"""`bucket_cap_mb=None`: a small first bucket, then PyTorch's default."""


def cap_limits(bucket_cap_mb: str) -> tuple[int, ...]:
    """The caps in bytes of a cap as the suite writes it: `default`, `25`, `0`, or `1/25/25` per bucket.

    0 is a bucket per parameter: every parameter reaches a cap of one byte. Raises UsageError for other text.
    """
    if bucket_cap_mb == "default":
        return DEFAULT_LIMITS
    try:
        # As DDP does: int() cuts the fraction of a byte off.
        limits = tuple(int(float(cap) * MIB) for cap in bucket_cap_mb.split("/"))
    except (ValueError, OverflowError):
        limits = (-1,)
    if min(limits) < 0:
        raise UsageError(f"bucket cap {bucket_cap_mb!r} is no number of MiB; write default, 25, 0 or 1/25/25")
    return tuple(max(limit, 1) for limit in limits)


def assign(num_bytes: Sequence[int], limits: Sequence[int], *, kinds: Sequence[str] | None = None) -> Layout:
    """The layout of parameters of `num_bytes`, in reducer order, under caps of `limits` bytes.

    Buckets stand in the order of their first parameter, as DDP launches them.
    """
    kinds = kinds or [""] * len(num_bytes)
    closed: list[tuple[int, ...]] = []
    open_buckets: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    next_cap: dict[str, int] = {}
    for index, (size, kind) in enumerate(zip(num_bytes, kinds, strict=True)):
        open_buckets.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + size
        cap = next_cap.get(kind, 0)
        if sizes[kind] >= limits[min(cap, len(limits) - 1)]:
            closed.append(tuple(open_buckets.pop(kind)))
            sizes[kind] = 0
            next_cap[kind] = cap + 1
    return tuple(sorted([*closed, *(tuple(bucket) for bucket in open_buckets.values())]))


def assign_cap(num_bytes: Sequence[int], bucket_cap_mb: str, *, kinds: Sequence[str] | None = None) -> Layout:
    """`assign` under a cap as the suite writes it (see `cap_limits`)."""
    return assign(num_bytes, cap_limits(bucket_cap_mb), kinds=kinds)


def bucket_bytes(num_bytes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Bytes of each bucket of `layout`."""
    return tuple(sum(num_bytes[index] for index in bucket) for bucket in layout)

"""Reproduces the rule by which DDP puts parameters into buckets.

The rule of `compute_bucket_assignment_by_size` in PyTorch's `reducer.cpp`: a bucket closes once its size
reaches its cap, so it may exceed it; parameters are never split; each kind (dtype and device) fills buckets
of its own and goes through the caps by itself; the last cap serves all further buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_bench.bench.layout import BucketCaps

Layout = tuple[tuple[int, ...], ...]
"""Indices of parameters by bucket, in all-reduce order; indices count in the reducer's order."""

MIB = 2**20
DEFAULT_LIMITS = (MIB, 25 * MIB)
"""`bucket_cap_mb=None`: a small first bucket, then PyTorch's default."""


def cap_limits(caps: BucketCaps) -> tuple[int, ...]:
    """Give the caps in bytes; 0 is a bucket per parameter: every parameter reaches a cap of one byte."""
    # As DDP does: int() cuts the fraction of a byte off.
    return tuple(max(int(cap * MIB), 1) for cap in caps.mib) or DEFAULT_LIMITS


def assign(num_bytes: Sequence[int], limits: Sequence[int], *, kinds: Sequence[str] | None = None) -> Layout:
    """Lay out parameters of `num_bytes`, in reducer order, under caps of `limits` bytes.

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


def assign_cap(num_bytes: Sequence[int], caps: BucketCaps, *, kinds: Sequence[str] | None = None) -> Layout:
    """Lay out parameters under DDP's caps."""
    return assign(num_bytes, cap_limits(caps), kinds=kinds)


def bucket_bytes(num_bytes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Sum the bytes of each bucket of `layout`."""
    return tuple(sum(num_bytes[index] for index in bucket) for bucket in layout)

"""DDP's gradient buckets: the caps that are asked for, the rule that fills them, and the layout they come to.

The rule of `compute_bucket_assignment_by_size` in PyTorch's `reducer.cpp`: a bucket closes once its size
reaches its cap, so it may exceed it; parameters are never split; each kind (dtype and device) fills buckets
of its own and goes through the caps by itself; the last cap serves all further buckets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from ..common.errors import UsageError
from ..common.numbers import MIB

_CAP = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?(e-0[56])?")
"""A number of MiB down to a millionth, one byte; in results the smallest stand as 1e-06."""

Caps: TypeAlias = Annotated[str, Meta(pattern=r"^(default|[0-9.e/-]{1,4096})$")]
"""DDP's `bucket_cap_mb` as `parse_bucket_caps` writes it, from the command line to cases.csv."""

PYTORCH_CAPS = "default"
"""Those of DDP where nothing is said: a small first bucket, then 25 MiB."""

ONE_BYTE_MIB = 1e-6
"""Cap that DDP is given for a cap of 0, which it does not take: one byte, which every parameter reaches."""


def parse_bucket_caps(text: str) -> Caps:
    """`default`, a number of MiB, 0 for a bucket per parameter, or a `/`-separated list, one per bucket.

    Equal caps are equal text. Raises UsageError for another text.
    """
    if text == PYTORCH_CAPS:
        return text
    caps = text.split("/")
    if text != "0" and not all(_CAP.fullmatch(cap) and float(cap) for cap in caps):
        raise UsageError(
            f"bucket cap {text!r} is not a number of MiB above 0; write default, 25, 0 for a bucket per "
            "parameter, or a list per bucket as 1/25/25"
        )
    return "/".join(f"{float(cap):.12g}" for cap in caps)


def parse_caps_mib(caps: Caps) -> tuple[float, ...]:
    """None for PyTorch's own, one for every bucket, or a cap per bucket; 0 is a bucket per parameter."""
    return () if caps == PYTORCH_CAPS else tuple(map(float, caps.split("/")))


def make_cap_arguments(caps: Caps) -> dict[str, Any]:
    """Return the arguments of DDP's constructor for these caps."""
    mib = parse_caps_mib(caps)
    if len(mib) > 1:
        return {"bucket_cap_mb_list": list(mib)}
    return {"bucket_cap_mb": mib[0] or ONE_BYTE_MIB} if mib else {}


def write_cap_code(caps: Caps) -> str:
    """Return the argument to type in a call of DDP: `bucket_cap_mb=25`; empty for PyTorch's own caps."""
    if "/" in caps:
        return f"bucket_cap_mb_list=[{caps.replace('/', ', ')}]"
    return "".join(f"{name}={cap:.12g}" for name, cap in make_cap_arguments(caps).items())


@dataclass(frozen=True)
class BucketLayout:
    """DDP's buckets in all-reduce order: bytes, and the parameter indices in each where they are known."""

    num_bytes: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = field(default=(), compare=False)
    """Type of each bucket, as `float32`: DDP never mixes types in one. Empty where they are not known."""

    @classmethod
    def parse(cls, text: str) -> BucketLayout:
        """From the `bucket_bytes` of cases.csv. Raises UsageError for another text."""
        if not re.fullmatch(r"[0-9]{1,18}(/[0-9]{1,18})*", text):
            raise UsageError(
                f"bucket_bytes {text!r} are no sizes; write bytes per bucket, as 8196000/27260928"
            )
        return cls(tuple(map(int, text.split("/"))))

    @classmethod
    def from_cell(cls, cell: object) -> BucketLayout | None:
        """Read a cell of cases.csv; None for an empty or a broken one."""
        try:
            return cls.parse(str(cell))
        except UsageError:
            return None

    def __str__(self) -> str:
        """Return the `bucket_bytes` of cases.csv: the size of each bucket, `/`-separated."""
        return "/".join(map(str, self.num_bytes))


DEFAULT_LIMITS = (MIB, 25 * MIB)
"""`bucket_cap_mb=None`: a small first bucket, then PyTorch's default."""


def compute_cap_limits(caps: Caps) -> tuple[int, ...]:
    """Give the caps in bytes; 0 is a bucket per parameter: every parameter reaches a cap of one byte."""
    # As DDP does: int() cuts the fraction of a byte off.
    return tuple(max(int(cap * MIB), 1) for cap in parse_caps_mib(caps)) or DEFAULT_LIMITS


def fill_buckets(num_bytes: Sequence[int], caps: Caps, *, kinds: Sequence[str] | None = None) -> BucketLayout:
    """Fill DDP's buckets with parameters of `num_bytes`, in the reducer's order, by which they are indexed.

    Buckets stand in the order of their first parameter, as DDP launches them.
    """
    limits, kinds = compute_cap_limits(caps), kinds or [""] * len(num_bytes)
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
    buckets = sorted([*closed, *(tuple(bucket) for bucket in open_buckets.values())])
    return BucketLayout(tuple(sum(num_bytes[i] for i in bucket) for bucket in buckets), tuple(buckets))


def compute_ring_factor(num_ranks: int) -> float:
    """2 (n - 1) / n: bytes that each rank of a ring sends per byte of message (nccl-tests PERFORMANCE.md)."""
    return 2 * (num_ranks - 1) / num_ranks

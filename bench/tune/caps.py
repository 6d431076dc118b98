"""Uniform bucket caps as a user would write them: round numbers."""

from __future__ import annotations

import math

from bench.layout import BucketCaps
from bench.scaling.buckets import MIB
from bench.scaling.search import UNIFORM_CAPS

ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8)
FINEST = 200
"""No more buckets than this are tried for, but for one per parameter."""


def uniform_caps(total_bytes: int) -> list[BucketCaps]:
    """Caps to try for gradients of `total_bytes`: the usual ones, then round numbers down to 1/200 of it."""
    lowest = math.floor(math.log10(max(total_bytes / FINEST, 1) / MIB))
    highest = math.ceil(math.log10(total_bytes / MIB))
    powers = range(lowest, highest + 1)
    more = [digit * 10.0**power for power in powers for digit in ROUND]
    sensible = [f"{cap:.6g}" for cap in more if total_bytes / FINEST <= cap * MIB <= 2 * total_bytes]
    written = (BucketCaps.parse(cap) for cap in sensible if "e" not in cap)
    return list(dict.fromkeys([*UNIFORM_CAPS, *written]))

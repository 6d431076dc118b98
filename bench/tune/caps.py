"""Bucket caps as a user would write them: round numbers for a uniform cap, short ones for a list. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.scaling.buckets import MIB, Layout, cap_limits
from bench.scaling.search import UNIFORM_CAPS

ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8)
FINEST = 200
"""No more buckets than this are tried for, but for one per parameter."""


def uniform_caps(total_bytes: int) -> list[str]:
    """Caps to try for gradients of `total_bytes`: the usual ones, then round numbers down to 1/200 of it."""
    lowest = math.floor(math.log10(max(total_bytes / FINEST, 1) / MIB))
    highest = math.ceil(math.log10(total_bytes / MIB))
    powers = range(lowest, highest + 1)
    more = [digit * 10.0**power for power in powers for digit in ROUND]
    sensible = [f"{cap:.6g}" for cap in more if total_bytes / FINEST <= cap * MIB <= 2 * total_bytes]
    return list(dict.fromkeys([*UNIFORM_CAPS, *(cap for cap in sensible if "e" not in cap)]))


def list_caps(num_bytes: Sequence[int], layout: Layout) -> str:
    """The shortest list of caps, as `1/5/12.5`, under which DDP arrives at a contiguous `layout`.

    A bucket closes with its last parameter where its cap lies above its size without that parameter and not
    above its whole size; in between the shortest decimal is taken, or the cap before it, if that fits. The
    last cap serves all further buckets; the last bucket closes anyway. A list of one is a uniform cap.
    """
    caps: list[str] = []
    for bucket in layout:
        whole = sum(num_bytes[i] for i in bucket)
        without = whole - num_bytes[bucket[-1]]
        last = bucket is layout[-1]
        if not (caps and without < cap_limits(caps[-1])[0] <= (math.inf if last else whole)):
            caps.append(_shortest(without, whole))
        else:
            caps.append(caps[-1])
    while len(caps) > 1 and caps[-1] == caps[-2]:
        caps.pop()
    return "/".join(caps)


def _shortest(above: int, most: int) -> str:
    """The decimal of fewest places, in MiB, that DDP takes for more than `above` and at most `most` bytes."""
    for places in range(7):
        scale = 10**places
        text = f"{math.floor(most / MIB * scale) / scale:.{places}f}"
        if float(text) > 0 and above < cap_limits(text)[0] <= most:
            return text
    return text

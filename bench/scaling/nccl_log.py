"""Reads the text that nccl-tests' `all_reduce_perf` prints as a cost curve."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bench.errors import UsageError
from bench.scaling.cost import CostCurve, measured_curve, ring_factor

_HEADER = re.compile(r"#\s+size\s+count\s+type\s+redop\s+root")
_END = re.compile(r"#\s*Avg bus bandwidth")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b")
_UNITS = re.compile(r"#\s+\(B\)\s+\(elements\).*\((?P<time>us|ms|s)\)")
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_MOST_BYTES = 2**50
_OUT_OF_PLACE, _BOTH = 9, 13
"""Columns of a line: size, count, type, redop, root, then time, algbw, busbw, #wrong once or twice."""


@dataclass(frozen=True)
class NcclLog:
    """What one log says: ranks of the all-reduce and its in-place cost curve (DDP reduces in place)."""

    num_ranks: int
    curve: CostCurve


def parse_nccl_log(text: str, *, source: str = "the log") -> NcclLog:
    """Read the log of one run of `all_reduce_perf`.

    The ranks are those listed at its head, or follow from bus over algorithm bandwidth. Raises UsageError
    where the log is of another collective, cut off, or has a line that is not understood.
    """
    lines = text.splitlines()
    if not any(_HEADER.search(line) for line in lines):
        raise UsageError(
            f"{source} is no log of nccl-tests: it has no table of sizes; give all_reduce_perf's text"
        )
    if not any(_END.match(line) for line in lines):
        raise UsageError(
            f"{source} is cut off before its last line (Avg bus bandwidth); run all_reduce_perf again"
        )
    units = next((found["time"] for line in lines if (found := _UNITS.search(line))), "us")
    points: list[tuple[int, tuple[float]]] = []
    ratios = []
    rows = [line for line in lines if re.match(r"\s*\d", line)]
    if len({len(row.split()) for row in rows}) > 1:
        raise UsageError(
            f"{source} is cut off: its lines have more and less columns; run all_reduce_perf again"
        )
    for line in rows:
        size, ms, ratio = _row(line, units, source)
        if size > 0:
            points.append((size, (ms,)))
            ratios.append(ratio)
    if not points:
        raise UsageError(f"{source} has no message above 0 bytes; run all_reduce_perf with -b 4K -e 1G")
    num_ranks = len({rank for line in lines if (found := _RANK.match(line)) for rank in [found[1]]})
    by_bandwidth = ratios[-1]
    if not num_ranks:
        num_ranks = max(round(2 / max(2 - by_bandwidth, 1e-3)), 1)
    if num_ranks < 2:
        raise UsageError(f"{source} is of one rank, which communicates nothing; run it over 2 GPUs or more")
    if abs(by_bandwidth - ring_factor(num_ranks)) > 0.05:
        raise UsageError(
            f"{source}: busbw / algbw is {by_bandwidth:.2f}, an all-reduce over {num_ranks} ranks has "
            f"{ring_factor(num_ranks):.2f}; give the log of all_reduce_perf"
        )
    return NcclLog(num_ranks, measured_curve(points))


def _row(line: str, units: str, source: str) -> tuple[int, float, float]:
    """Bytes, in-place ms (out-of-place where there is none), bus over algorithm bandwidth."""
    cells = line.split()
    if len(cells) not in (_OUT_OF_PLACE, _BOTH) or cells[3] not in ("sum", "prod", "min", "max", "avg"):
        raise UsageError(
            f"{source}: the line {line.strip()!r} is not all_reduce_perf's or is cut off; run it again"
        )
    try:
        place = 9 if len(cells) == _BOTH else 5
        size = int(cells[0])
        time, algbw, busbw = (float(cell) for cell in cells[place : place + 3])
    except ValueError:
        raise UsageError(f"{source}: the line {line.strip()!r} holds no numbers; run it again") from None
    if not (size <= _MOST_BYTES and all(map(math.isfinite, (time, algbw, busbw))) and time > 0 <= algbw):
        raise UsageError(f"{source}: the line {line.strip()!r} has an impossible number; run it again")
    return size, time * _MS[units], busbw / algbw if algbw > 0 else 0.0

"""Reads what nccl-tests' `all_reduce_perf` prints, or writes as JSON (`-J`), as a cost curve."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.scaling.cost import CostCurve, measured_curve, ring_factor

_HEADER = re.compile(r"#\s+size\s+count\s+type\s+redop\s+root")
_CPU_TIME = re.compile(r"#\s+size\s.*\bcputime\b")
_END = re.compile(r"#\s*Avg bus bandwidth")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b")
_BACKEND = re.compile(r"#\s+Backend\s+(\w+)")
"""A line of `bench.export`: nccl-tests knows NCCL alone."""
_UNITS = re.compile(r"#\s+\(B\)\s+\(elements\).*\((?P<time>us|ms|s)\)")
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_MOST_BYTES = 2**50
_MOST_RANKS = 2**20
_OUT_OF_PLACE, _BOTH = 9, 13
"""Columns of a line: size, count, type, redop, root, then time, algbw, busbw, #wrong once or twice."""
_OPERATIONS = ("sum", "prod", "min", "max", "avg")
_AVERAGE = ("average_bus_bandwidth", "average_bus_bandwidith")
"""The key after the results in JSON; before nccl-tests 2.17.9 it was spelt the second way."""


@dataclass(frozen=True)
class NcclLog:
    """What one log says: ranks of the all-reduce and its in-place cost curve (DDP reduces in place)."""

    num_ranks: int
    curve: CostCurve
    backend: str = "nccl"


@dataclass(frozen=True)
class _Row:
    """One message: bytes, in-place ms (out-of-place where there is none), bus over algorithm bandwidth."""

    size: int
    ms: float
    ratio: float


def parse_nccl_log(text: str, *, source: str = "the log") -> NcclLog:
    """Read the log of one run of `all_reduce_perf`: its text, or its JSON where it begins with `{`.

    The ranks are those listed at its head, or follow from bus over algorithm bandwidth. Raises UsageError
    where the log is of another collective, cut off, or has a line that is not understood.
    """
    if text.lstrip().startswith("{"):
        rows, num_ranks = _of_json(text, source)
        backend = "nccl"
    else:
        rows, num_ranks = _of_text(text, source)
        named = next((found[1] for line in text.splitlines() if (found := _BACKEND.match(line))), None)
        backend = named or "nccl"
    rows = [row for row in rows if row.size > 0]
    if not rows:
        raise UsageError(f"{source} has no message above 0 bytes; run all_reduce_perf with -b 4K -e 1G")
    by_bandwidth = rows[-1].ratio
    if not num_ranks:
        num_ranks = max(round(2 / max(2 - by_bandwidth, 1e-3)), 1)
    if num_ranks < 2:
        raise UsageError(f"{source} is of one rank, which communicates nothing; run it over 2 GPUs or more")
    if abs(by_bandwidth - ring_factor(num_ranks)) > 0.05:
        raise UsageError(
            f"{source}: busbw / algbw is {by_bandwidth:.2f}, an all-reduce over {num_ranks} ranks has "
            f"{ring_factor(num_ranks):.2f}; give the log of all_reduce_perf"
        )
    return NcclLog(num_ranks, measured_curve((row.size, (row.ms,)) for row in rows), backend)


def _of_text(text: str, source: str) -> tuple[list[_Row], int]:
    """The messages of a log in text, and how many ranks it lists."""
    lines = text.splitlines()
    if not any(_HEADER.search(line) for line in lines):
        raise _no_log(source)
    if not any(_END.match(line) for line in lines):
        raise UsageError(
            f"{source} is cut off before its last line (Avg bus bandwidth); run all_reduce_perf again"
        )
    if any(_CPU_TIME.search(line) for line in lines):
        raise _cpu_time(source)
    units = next((found["time"] for line in lines if (found := _UNITS.search(line))), "us")
    table = [line for line in lines if re.match(r"\s*\d", line)]
    if len({len(line.split()) for line in table}) > 1:
        raise UsageError(
            f"{source} is cut off: its lines have more and less columns; run all_reduce_perf again"
        )
    ranks = {listed[1] for line in lines if (listed := _RANK.match(line))}
    return [_row_of_line(line, units, source) for line in table], len(ranks)


def _row_of_line(line: str, units: str, source: str) -> _Row:
    cells, what = line.split(), f"the line {line.strip()!r}"
    if len(cells) not in (_OUT_OF_PLACE, _BOTH) or cells[3] not in _OPERATIONS:
        raise UsageError(f"{source}: {what} is not all_reduce_perf's or is cut off; run it again")
    place = 9 if len(cells) == _BOTH else 5
    return _row((cells[0], *cells[place : place + 3]), what, units, source)


def _row(cells: Sequence[Any], what: str, units: str, source: str) -> _Row:
    """Size, time, algorithm and bus bandwidth as numbers that are possible."""
    try:
        size = int(cells[0])
        time, algbw, busbw = (float(cell) for cell in cells[1:])
    except (ValueError, TypeError, OverflowError):
        raise UsageError(f"{source}: {what} holds no numbers; run it again") from None
    if not (size <= _MOST_BYTES and all(map(math.isfinite, (time, algbw, busbw))) and time > 0 <= algbw):
        raise UsageError(f"{source}: {what} has an impossible number; run it again")
    return _Row(size, time * _MS[units], busbw / algbw if algbw > 0 else 0.0)


def _of_json(text: str, source: str) -> tuple[list[_Row], int]:
    """The messages of a log in JSON, versions 1 to 3, and how many ranks it tells; times are in us."""
    try:
        log = json.loads(text)
    except RecursionError:
        raise _no_log(source) from None
    except ValueError:
        raise UsageError(
            f"{source} is cut off: it is not valid JSON to its end; run all_reduce_perf again"
        ) from None
    results = log.get("results")
    if not isinstance(results, list) or "nccl_version" not in log:
        raise _no_log(source)
    if not any(key in log for key in _AVERAGE):
        raise UsageError(
            f"{source} is cut off before its last part (average_bus_bandwidth); run all_reduce_perf again"
        )
    return [_row_of_result(result, source) for result in results], _ranks_of_json(log)


def _row_of_result(result: Any, source: str) -> _Row:
    told = result if isinstance(result, dict) else {}
    what = f"the result of {str(told.get('size'))[:40]} bytes"
    place = told.get("in_place") or told.get("out_of_place")
    if told.get("redop") not in _OPERATIONS or not isinstance(place, dict):
        raise UsageError(f"{source}: {what} is not all_reduce_perf's or is cut off; run it again")
    if "cpu_time" in place:
        raise _cpu_time(source)
    return _row((told.get("size"), *map(place.get, ("time", "alg_bw", "bus_bw"))), what, "us", source)


def _ranks_of_json(log: Mapping[str, Any]) -> int:
    """Ranks as the configuration tells them: `devices` has one entry per process; 0 where it tells none."""
    config = log.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("devices"), list):
        return 0
    numbers: list[Any] = [len(config["devices"]), config.get("nthreads"), config.get("ngpus")]
    if not all(type(number) is int and 0 < number <= _MOST_RANKS for number in numbers):
        return 0
    return math.prod(numbers)


def _no_log(source: str) -> UsageError:
    return UsageError(
        f"{source} is no log of nccl-tests: it has no table of sizes; give all_reduce_perf's text or JSON"
    )


def _cpu_time(source: str) -> UsageError:
    return UsageError(f"{source} has times of the CPU, not of the all-reduce; run all_reduce_perf without -C")

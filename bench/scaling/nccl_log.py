"""Reads what nccl-tests' `all_reduce_perf` writes as JSON (`-J FILE`), versions 1 to 3, as a cost curve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.scaling.cost import CostCurve, measured_curve, ring_factor

_MOST_BYTES = 2**50
_MOST_RANKS = 2**20
_OPERATIONS = ("sum", "prod", "min", "max", "avg")
_AVERAGE = ("average_bus_bandwidth", "average_bus_bandwidith")
"""The key after the results; before nccl-tests 2.17.9 it was spelt the second way."""


@dataclass(frozen=True)
class NcclLog:
    """What one log says: ranks of the all-reduce and its in-place cost curve (DDP reduces in place)."""

    num_ranks: int
    curve: CostCurve


def parse_nccl_log(text: str, *, source: str = "the log") -> NcclLog:
    """Read the log of one run of `all_reduce_perf`.

    The ranks are those that it tells, or follow from bus over algorithm bandwidth. Raises UsageError where
    the log is of another collective, cut off, or has a result that is not understood.
    """
    log = _whole(text, source)
    results = [_result(result, source) for result in log["results"]]
    results = [(size, ms, ratio) for size, ms, ratio in results if size > 0]
    if not results:
        raise UsageError(f"{source} has no message above 0 bytes; run all_reduce_perf with -b 4K -e 1G")
    by_bandwidth = results[-1][2]
    num_ranks = _num_ranks(log) or max(round(2 / max(2 - by_bandwidth, 1e-3)), 1)
    if num_ranks < 2:
        raise UsageError(f"{source} is of one rank, which communicates nothing; run it over 2 GPUs or more")
    if abs(by_bandwidth - ring_factor(num_ranks)) > 0.05:
        raise UsageError(
            f"{source}: busbw / algbw is {by_bandwidth:.2f}, an all-reduce over {num_ranks} ranks has "
            f"{ring_factor(num_ranks):.2f}; give the log of all_reduce_perf"
        )
    return NcclLog(num_ranks, measured_curve((size, (ms,)) for size, ms, _ in results))


def _whole(text: str, source: str) -> Mapping[str, Any]:
    """The log, with its results."""
    no_log = UsageError(f"{source} is no log of nccl-tests in JSON; write one with all_reduce_perf -J FILE")
    if not text.lstrip().startswith("{"):
        raise no_log
    try:
        log: dict[str, Any] = json.loads(text)
    except RecursionError:
        raise no_log from None
    except ValueError:
        raise UsageError(
            f"{source} is cut off: it is not valid JSON to its end; run all_reduce_perf again"
        ) from None
    if not isinstance(log.get("results"), list) or "nccl_version" not in log:
        raise no_log
    if not any(key in log for key in _AVERAGE):
        raise UsageError(
            f"{source} is cut off before its last part (average_bus_bandwidth); run all_reduce_perf again"
        )
    return log


def _result(result: Any, source: str) -> tuple[int, float, float]:
    """Of one message: bytes, in-place ms (out-of-place where there is none), bus over algorithm bandwidth."""
    told = result if isinstance(result, dict) else {}
    what = f"the result of {str(told.get('size'))[:40]} bytes"
    place = told.get("in_place") or told.get("out_of_place")
    if told.get("redop") not in _OPERATIONS or not isinstance(place, dict):
        raise UsageError(f"{source}: {what} is not all_reduce_perf's or is cut off; run it again")
    if "cpu_time" in place:
        raise UsageError(
            f"{source} has times of the CPU, not of the all-reduce; run all_reduce_perf without -C"
        )
    try:
        size = int(told["size"])
        us, algbw, busbw = (float(place[key]) for key in ("time", "alg_bw", "bus_bw"))
    except (KeyError, ValueError, TypeError, OverflowError):
        raise UsageError(f"{source}: {what} holds no numbers; run it again") from None
    if not (size <= _MOST_BYTES and all(map(math.isfinite, (us, algbw, busbw))) and us > 0 <= algbw):
        raise UsageError(f"{source}: {what} has an impossible number; run it again")
    return size, us / 1000, busbw / algbw if algbw > 0 else 0.0


def _num_ranks(log: Mapping[str, Any]) -> int:
    """Ranks as the configuration tells them: `devices` has one entry per process; 0 where it tells none."""
    config = log.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("devices"), list):
        return 0
    numbers: list[Any] = [len(config["devices"]), config.get("nthreads"), config.get("ngpus")]
    if not all(type(number) is int and 0 < number <= _MOST_RANKS for number in numbers):
        return 0
    return math.prod(numbers)

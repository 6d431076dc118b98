"""Cases by hand and what is concluded from them, for the tests of findings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from made import made_manifest
from report_runs import Row, case, run

from ddp_bench.bench.findings.findings import Conclusion, conclude
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.stats import Interval

CPU = {"device_type": "cpu"}
NAN = math.nan

SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 100.0), case("ddp", 2, 160.0)
CAP_1, CAP_25 = (case("ddp", 2, 160.0, bucket_cap_mb=cap) for cap in ("1", "25"))


def over(
    first: Row, second: Row, low: float, high: float, *, num_rounds: int = 20, margin: float = 0.05
) -> Comparison:
    estimate = 1.0 if math.isnan(low) else math.sqrt(low * high)
    return Comparison(first["case_id"], second["case_id"], Interval(estimate, low, high), margin, num_rounds)


FAILED = {"status": "failed", "reason": "ValueError: late bug (net.py:6, in late)"}


def concluded(*cases: Row, by: tuple[Comparison, ...] = (), **settings: Any) -> Conclusion:
    data = run(cases, timed_blocks=[])
    manifest = made_manifest(settings=settings, timing={"measuring_s": 100.0})
    return conclude(Path("results/made run"), manifest, data.cases, data.blocks, by)


def exposing(low: float, high: float) -> Row:
    return {"exposed_comm_ms": (low + high) / 2, "exposed_comm_ms_low": low, "exposed_comm_ms_high": high}

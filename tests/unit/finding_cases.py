"""Cases by hand and what is concluded from them, for the tests of findings."""

import math
from dataclasses import replace

from report_runs import case, measured, run

from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.results.columns import COMPARISONS, make_frame
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.stats.interval import Interval

CPU = {"device_type": "cpu"}
NAN = math.nan

SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 100.0), case("ddp", 2, 160.0)
CAP_1, CAP_25 = (case("ddp", 2, 160.0, bucket_cap_mb=cap) for cap in ("1", "25"))


def pair(first, second):
    return first["case_id"], second["case_id"]


def over(first, second, low, high, *, num_rounds=20, margin=0.05):
    estimate = 1.0 if math.isnan(low) else math.sqrt(low * high)
    return Comparison(*pair(first, second), Interval(estimate, low, high), margin, num_rounds)


FAILED = {"status": "failed", "reason": "ValueError: late bug (net.py:6, in late)"}


def made_run(cases, by=(), *, manifest=None, folder="results/made run", **more):
    """A run of these cases and comparisons, without blocks."""
    return replace(
        run(cases, manifest, path=folder, timed_blocks=[]),
        comparisons=make_frame([one.to_row() for one in by], COMPARISONS),
        **more,
    )


def concluded(*cases, by=(), **settings):
    manifest = {"settings": settings, "timing": {"measuring_s": 100.0}}
    return conclude_run(made_run(cases, by, manifest=manifest))


def exposing(low, high):
    return {"exposed_comm_ms": (low + high) / 2, "exposed_comm_ms_low": low, "exposed_comm_ms_high": high}


def hiding(low, high):
    return {"hidden_pct": (low + high) / 2, "hidden_pct_low": low, "hidden_pct_high": high}


ENDS = {
    "faster": (1.28, 1.34),
    "little faster": (1.01, 1.03),
    "equal": (0.98, 1.02),
    "open": (0.9, 1.15),
    "little slower": (0.97, 0.99),
    "slower": (0.75, 0.84),
    "too few": (NAN, NAN),
}
"""Intervals of a ratio, one for each answer."""

COMMUNICATIONS = {
    "hidden": exposing(11, 13) | hiding(66, 76),
    "alone unknown": exposing(11, 13),
    "vague": exposing(11, 13) | hiding(-40, 120),
    "little": exposing(-2, 4),
    "open": exposing(-20, 40),
    "none hidden": exposing(60, 70) | hiding(-30, -10),
    "hardly hidden": exposing(60, 70) | hiding(-20, 10) | measured(comm_ms=65.0),
    "too few": exposing(NAN, NAN) | {"exposed_comm_ms": 12.0},
}


def said_of_each():
    """Every answer that a run can give, under what makes it so: the words that people read."""
    stages = {f"dp_{name}_ms": 5.0 for name in ("replicate", "scatter", "gather", "reduce")}
    cpu_dp, cpu_ddp = (
        case(mode, 2, 160.0, scaling="strong", batch_per_device=5, **CPU) for mode in ("dp", "ddp")
    )
    hook = case("ddp", 2, 200.0, case_id="hook", comm_hook="bf16")
    static = case("ddp", 2, 160.0, case_id="static", static_graph=True)
    step = measured(step_ms=100.0, comm_ms=40.0)
    single, compiled = (
        case(mode, n, 120.0 * n, compile="default", compile_s=41.2) | {"case_id": f"{mode}-compiled"}
        for mode, n in (("single", 1), ("ddp", 2))
    )
    found = {"on CPU cores": ((SINGLE, cpu_dp | stages, cpu_ddp), ())}
    for name, (low, high) in ENDS.items():
        few = {"num_rounds": 4 if math.isnan(low) else 20}
        found[f"DDP against DP: {name}"] = (SINGLE, DP, DDP), (over(DDP, DP, low, high, **few),)
        alone = case("ddp", 2, 100.0, speedup=(low * high) ** 0.5, speedup_low=low, speedup_high=high)
        found[f"DDP alone: {name}"] = (SINGLE, alone | ({"speedup": 1.1} if math.isnan(low) else {})), ()
        found[f"one cap: {name}"] = (SINGLE, DDP, CAP_1), (over(CAP_1, DDP, low, high, **few),)
        two = over(CAP_1, DDP, low, high, **few), over(CAP_25, DDP, 0.7, 0.72)
        found[f"two caps: {name}"] = (SINGLE, DDP, CAP_1, CAP_25), two
        eager = case("ddp", 2, 160.0, compile="off"), case("single", 1, 100.0, compile="off")
        by = over(compiled, eager[0], low, high, **few), over(single, eager[1], 1.1, 1.2)
        found[f"compiled: {name}"] = (*eager, single, compiled), by
    found["loses against one device"] = (SINGLE, DP, case("ddp", 2, 80.0)), (over(DDP, DP, 1.5, 1.7),)
    found["open beside the best"] = (
        (SINGLE, DDP, CAP_1, CAP_25),
        (over(CAP_1, DDP, 0.8, 1.3), over(CAP_25, DDP, 1.17, 1.19)),
    )
    found["several open"] = (
        (SINGLE, DDP, CAP_1, CAP_25),
        (over(CAP_1, DDP, 0.8, 1.3), over(CAP_25, DDP, 0.91, 1.06)),
    )
    found["changes the training"] = (SINGLE, DDP, hook), (over(hook, DDP, 1.4, 1.5),)
    found["another setting"] = ((SINGLE, DDP, static, CAP_1), (over(static, DDP, 0.99, 1.01),))
    for name, values in COMMUNICATIONS.items():
        found[f"communication: {name}"] = (SINGLE, DDP | step | values), ()
    told = []
    for name, (cases, by) in found.items():
        made = concluded(*cases, by=by)
        said = [*(f"[{one.label}] {one.said}" for one in made.verdicts), *made.notes]
        saved = made.step.savings if made.step else ()
        said += [f"Saving, {one.ms.estimate:.3g} ms: {one.label}: {one.remedy}" for one in saved]
        said += [f"Next, {made.next_step.why}"] if made.next_step else []
        told += [f"# {name}", *(line for line in said if line not in told)]
    return told

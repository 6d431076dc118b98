"""Several launches as one comparison: rounds kept apart, the spread between launches inside the interval."""

import re
from pathlib import Path

import numpy as np
import pytest
from gate_runs import made_run, rounds_of, with_rounds

from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.judge import compare_metric, launch_ratio, typical_sides
from ddp_bench.bench.gate.runs import LAUNCH, GateCase, GateRun, merged
from ddp_bench.bench.results.schema import GATED
from ddp_bench.bench.stats import paired_ratio


def run_of(images_per_s, *, status="ok", memory=None):
    row = {"status": status, "mode": "ddp", "num_devices": "2", "case_id": "ddp-n2"}
    case = GateCase(
        case_id="ddp-n2",
        row=row,
        rounds=rounds_of(
            images_per_s,
            images_per_s,
            step_ms=dict.fromkeys(images_per_s, 100.0),
            exposed_comm_ms={r: -value for r, value in images_per_s.items()},
            peak_mem_mib=memory,
        ),
    )
    return GateRun(Path("run"), {}, (case,))


def test_rounds_of_launches_stay_apart():
    (case,) = merged([run_of({1: 5.0, 2: 6.0}, memory=10.0), run_of({1: 7.0}, memory=12.0)]).cases
    assert case.rounds["images_per_s"] == {1: 5.0, 2: 6.0, LAUNCH + 1: 7.0}
    assert case.rounds["speedup"] == case.rounds["images_per_s"]
    assert case.rounds["exposed_comm_ms"] == {1: -5.0, 2: -6.0, LAUNCH + 1: -7.0}
    assert case.rounds["peak_mem_mib"] == {0: 12.0}


def test_a_case_that_failed_once_has_failed():
    (case,) = merged([run_of({1: 5.0}), run_of({}, status="timeout")]).cases
    assert not case.ok
    assert case.row["status"] == "timeout"


def test_one_launch_is_the_paired_ratio():
    left, right = {r: 10.0 + r for r in range(9)}, {r: 11.0 + r * r for r in range(9)}
    assert launch_ratio(left, right, confidence=0.98) == paired_ratio(left, right, confidence=0.98)


@pytest.mark.parametrize(("num_launches", "covered"), [(3, 0.85), (5, 0.88)])
def test_the_interval_holds_the_spread_between_launches(num_launches, covered):
    """Launches that differ by 2% (sd): the truth is 1, and rounds alone claim to know better."""
    rng = np.random.default_rng(7)
    inside, inside_rounds_alone, trials = 0, 0, 400
    for _ in range(trials):
        candidate, baseline = {}, {}
        for launch in range(num_launches):
            bias = rng.normal(0, 0.02)
            for r in range(30):
                candidate[launch * LAUNCH + r] = float(np.exp(bias + rng.normal(0, 0.05)))
                baseline[launch * LAUNCH + r] = 1.0
        whole = launch_ratio(candidate, baseline, confidence=0.95)
        rounds = paired_ratio(candidate, baseline, confidence=0.95)
        inside += whole.low <= 1 <= whole.high
        inside_rounds_alone += rounds.low <= 1 <= rounds.high
    assert inside / trials >= covered, "few launches know their spread roughly"
    assert inside_rounds_alone / trials <= 0.75


def false_verdicts(trials, *, disturbed):
    """Verdicts on exposed communication of equal code, in launches that differ."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(trials):
        sides = []
        for _ in range(2):
            bias = rng.normal(0, 1.5, 3)
            rounds = {i * LAUNCH + r: 20 + bias[i] + rng.normal(0, 2) for i in range(3) for r in range(20)}
            if disturbed and not sides:
                rounds[5] = -3.0
            steps = dict.fromkeys(rounds, 25.0)
            sides.append(with_rounds(run_of({1: 5.0}).cases[0], exposed_comm_ms=rounds, step_ms=steps))
        more = {"confidence": 0.995, "threshold": 0.05, "blocked": "", "interleaved": True}
        found += compare_metric(*sides, GATED["exposed_comm_ms"], **more).verdict in ("regressed", "improved")
    return found


@pytest.mark.parametrize("trials", [100, pytest.param(1000, marks=pytest.mark.campaign)])
def test_a_disturbed_round_below_zero_brings_no_false_verdicts(trials):
    usual = false_verdicts(trials, disturbed=False)
    assert false_verdicts(trials, disturbed=True) <= usual + 0.04 * trials


def drifting(seed):
    """Both sides of a slower and slower machine that pauses at times; the candidate takes 2% longer."""
    rng = np.random.default_rng(seed)
    pace = np.linspace(1, 2, 30) * np.exp(rng.normal(0, 0.1, 30))
    base, other = (pace * np.exp(rng.normal(0, 0.2, (3, 30))) for _ in range(2))
    cases = (("single", 1), ("dp", 2), ("ddp", 2))
    return {k: list(100 * b) for k, b in zip(cases, base, strict=True)}, {
        k: list(102 * o) for k, o in zip(cases, other, strict=True)
    }


def shown(cell):
    """A number as printed, and half a unit of its last digit."""
    (written,) = re.findall(r"^[\d,]+\.?\d*", cell)
    return float(written.replace(",", "")), 0.5 * 10.0 ** -len(written.partition(".")[2])


def test_what_stands_beside_a_paired_ratio_has_that_quotient():
    contradicted = 0
    for seed in range(10):
        base, other = drifting(seed)
        gate = compare(
            made_run(base), made_run(other), thresholds=dict.fromkeys(GATED, 0.05), interleaved=True
        )
        assert len(gate.comparisons) == 7
        for comparison in gate.comparisons:
            baseline, candidate, ratio = gate_output.cells(comparison)[3:6]
            (b, b_off), (c, c_off), (r, r_off) = map(shown, (baseline, candidate, ratio))
            assert c / b == pytest.approx(r, abs=r_off + c / b * (b_off / b + c_off / c))
        for key in base:
            medians = np.median(1 / np.array(other[key])) / np.median(1 / np.array(base[key]))
            paired = np.median(np.array(base[key]) / np.array(other[key]))
            contradicted += (medians - 1) * (paired - 1) < 0
    assert contradicted > 0, "medians of each side by itself would not agree"


def test_typical_sides_lie_where_the_sides_lie():
    left, right = {r: 90.0 + r for r in range(9)}, {r: 45.0 + r / 2 for r in range(9)}
    assert typical_sides(left, right, 2.0) == pytest.approx((94.0, 47.0))

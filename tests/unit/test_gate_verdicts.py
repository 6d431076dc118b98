"""Verdicts on simulated rounds of known truth, and how the error is divided."""

import re
from dataclasses import replace

import numpy as np
import pytest
from gate_runs import (
    STEADY,
    gated,
    made_run,
    of_metric,
)
from made import made_manifest
from scipy import stats

from ddp_bench.bench.gate.decide import Policy, decide
from ddp_bench.bench.gate.headline import describe_verdict as sentence
from ddp_bench.bench.gate.judge import Change, EndErrors, judge
from ddp_bench.bench.gate.main import DEFAULT_LAUNCHES
from ddp_bench.bench.stats.interval import Interval


def simulated(rng, *, slower=1.0, drift=0.0, num_rounds=20, sd=0.02, tail=30.0):
    """Step times in ms with a drift and Student's t noise of `tail` degrees of freedom."""
    trend = np.linspace(1, 1 + drift, num_rounds)
    medians = {("single", 1): 100.0, ("dp", 2): 190.0 * slower, ("ddp", 2): 120.0 * slower}
    return {
        key: (ms * np.exp(sd * rng.standard_t(tail, size=num_rounds)) * trend).tolist()
        for key, ms in medians.items()
    }


@pytest.mark.parametrize(
    ("low", "estimate", "high", "expected"),
    [
        (0.85, 0.90, 0.95, "regressed"),
        (1.06, 1.10, 1.14, "improved"),
        (0.98, 1.00, 1.02, "no regression"),
        (0.97, 0.98, 0.99, "no regression"),  # surely a change, surely within the threshold
        (0.85, 0.95, 1.05, "undecided"),
        (0.80, 0.90, 1.01, "undecided"),  # beyond the threshold, but may be no change
        (0.93, 0.96, 0.99, "undecided"),  # a change, but perhaps within the threshold
        (0.96, 1.00, 1.06, "no regression"),  # surely not slower by the threshold
        (-np.inf, np.nan, np.inf, "undecided"),
        (np.nan, 0.94, np.nan, "regressed"),  # one exact reading
        (np.nan, 0.96, np.nan, "no regression"),
    ],
)
def test_a_regression_needs_the_interval_and_the_threshold(low, estimate, high, expected):
    assert judge(Interval(estimate, low, high), higher_is_better=True, threshold=0.05) == expected
    turned = {"regressed": "improved", "improved": "regressed"}.get(expected, expected)
    mirrored = Interval(2 - estimate, 2 - high, 2 - low)
    assert judge(mirrored, higher_is_better=False, threshold=0.05) == expected
    if expected in ("regressed", "improved"):
        assert judge(Interval(estimate, low, high), higher_is_better=False, threshold=0.05) == turned


@pytest.mark.parametrize("noise", [{"sd": 0.02}, {"sd": 0.015, "tail": 2.0}, {"sd": 0.01, "drift": 0.05}])
def test_ten_percent_slower_is_caught(noise):
    rng = np.random.default_rng(2)
    for _ in range(15):
        # Where a machine drifts by itself, separate runs tell by their ratios alone.
        gate = gated(
            simulated(rng, **noise), simulated(rng, slower=1.1, **noise), ratios_only="drift" in noise
        )
        assert gate.exit_code == 1
        assert {c.case_id for c in gate.select_verdict("regressed")} == {"dp-n2", "ddp-n2"}, (
            "single is as before"
        )


def test_faster_passes_as_improved_and_a_quiet_copy_as_no_regression():
    rng = np.random.default_rng(3)
    base = simulated(rng, sd=0.005)
    faster = gated(base, simulated(rng, sd=0.005, slower=0.8))
    assert faster.exit_code == 0
    assert {c.case_id for c in faster.select_verdict("improved")} == {"dp-n2", "ddp-n2"}
    assert re.match(r"Pass, no regression: D.* on 2 CPU cores is 2.\.\d% faster \(", sentence(faster))
    same = gated(base, base)
    assert same.exit_code == 0
    assert {c.verdict for c in same.comparisons} == {"no regression"}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("quiet", ["baseline", "candidate"])
def test_a_pass_needs_the_throughput_of_every_case(interleaved, quiet):
    """DDP's rounds scatter on one side; all else is known to be as before."""
    steady = {key: [*series] * 4 for key, series in STEADY.items()}
    wild = {**steady, ("ddp", 2): [ms * (1.0, 1.6)[i % 2] for i, ms in enumerate(steady["ddp", 2])]}
    sides = (steady, wild) if quiet == "baseline" else (wild, steady)
    gate = gated(*sides, interleaved=interleaved)
    rates = {c.case_id: c.verdict for c in of_metric(gate, "images_per_s")}
    assert rates == {"single-n1": "no regression", "dp-n2": "no regression", "ddp-n2": rates["ddp-n2"]}
    assert rates["ddp-n2"] in ("undecided", "regressed", "improved")
    assert gate.exit_code != 0 or rates["ddp-n2"] == "improved"


def in_turns(rng, *, launches, rounds, between, sd=0.03, slower=1.0):
    """Both sides of a gate in turns, whose launches differ by `between` and whose rounds scatter by `sd`."""
    return first_launches(simulated_launches(rng, launches, rounds, between, sd, slower), launches)


def simulated_launches(rng, launches, rounds, between, sd, slower=1.0):
    """Step times of both sides by case, in ms: a row for each launch."""
    return [
        {
            key: ms
            * factor
            * np.exp(rng.normal(0, between, (launches, 1)) + rng.normal(0, sd, (launches, rounds)))
            for key, ms in ((("single", 1), 100.0), (("ddp", 2), 120.0))
        }
        for factor in (1.0, slower)
    ]


def first_launches(sides, launches):
    """The two runs as a gate has them after so many launches."""
    steps = [{key: ms[:launches].ravel().tolist() for key, ms in side.items()} for side in sides]
    return [made_run(side, launches=launches) for side in steps]


def codes(trials, **how):
    rng = np.random.default_rng(5)
    return [gated(*in_turns(rng, **how), interleaved=True).exit_code for _ in range(trials)]


def by_default(trials, **how):
    """Exit codes of gates as the action's command has them, and how many launches each took."""
    rng, found = np.random.default_rng(5), []
    for _ in range(trials):
        sides = simulated_launches(rng, DEFAULT_LAUNCHES[-1], 20, **how)
        for launches in DEFAULT_LAUNCHES:
            gate = gated(*first_launches(sides, launches), interleaved=True, looks=DEFAULT_LAUNCHES)
            if not gate.needs_more_launches:
                break
        found.append((gate.exit_code, gate.num_launches))
    return [np.array(column) for column in zip(*found, strict=True)]


def test_of_equal_code_with_too_few_rounds_none_passes():
    assert set(codes(30, launches=2, rounds=3, between=0.01)) == {3}


@pytest.mark.parametrize(("between", "sd", "most"), [(0.003, 0.02, 6), (0.02, 0.05, 24)])
def test_of_equal_code_nearly_all_pass_by_default_and_a_quiet_machine_needs_the_fewest_launches(
    between, sd, most
):
    found, launches = by_default(30, between=between, sd=sd)
    assert np.sum(found == 0) >= 28
    assert 1 not in found
    assert launches.mean() > 1.5 * 6 if most > 6 else set(launches) == {most}


@pytest.mark.parametrize(("slower", "least"), [(1.07, 0.9), (1.10, 0.95)])
def test_a_slow_down_beyond_the_threshold_is_caught_in_turns(slower, least):
    found, _ = by_default(20, between=0.02, sd=0.05, slower=slower)
    assert np.sum(found == 1) >= least * 20
    assert 0 not in found


def test_what_would_decide_is_the_whole_command_with_its_minutes():
    rng = np.random.default_rng(6)
    sides = in_turns(rng, launches=3, rounds=6, between=0.005)
    gate = gated(*sides, interleaved=True)
    assert gate.exit_code == 3
    timed = [replace(side, manifest=made_manifest(timing={"total_s": 20.0})) for side in sides]
    asked = "--interleave main --strict --launches 3,4 --html x.html --max-time 9s --quiet "
    asked += "-- --workload net:make --rounds 6"
    found = gated(*timed, looks=(1,), asked=asked.split()).more
    given = re.fullmatch(
        r"python -m bench.gate --interleave main --strict --launches (\d+) --html x.html "
        "-- --workload net:make --rounds 6",
        found.command,
    )
    assert given
    assert int(given[1]) > 3
    assert found.minutes == pytest.approx(int(given[1]) / 3, abs=0.1)


def test_what_can_make_it_a_regression_divides_the_error_and_each_of_them_may_hold_a_pass_up():
    one = {("single", 1): STEADY["single", 1]}
    narrow, wide = gated(one, one), gated(STEADY, STEADY)
    assert narrow.errors == EndErrors(worse=0.01, better=0.01)
    assert wide.errors == EndErrors(worse=0.01, better=pytest.approx(0.01 / 3)), "the rates of three cases"
    named = gated(STEADY, STEADY, named={"speedup": 0.05})
    for five in (gated(STEADY, STEADY, strict=True), named):
        assert five.errors == EndErrors(worse=0.01, better=pytest.approx(0.01 / 5)), "and two speed-ups"
    few, many = (
        next(c.ratio for c in of_metric(g, "images_per_s") if c.case_id == "single-n1")
        for g in (narrow, wide)
    )
    assert many.low == pytest.approx(few.low), "the end by which it passes"
    assert many.high > few.high + 0.001, "the end by which it would be a regression"


@pytest.mark.parametrize(
    ("launches", "of_pass", "of_regression"),
    [(6, 1 / 2, 1 / 6), (7, 1 / 6, 1 / 6), (12, 1 / 6, 1 / 6), (24, 1 / 6, 1 / 2)],
)
def test_the_looks_divide_both_errors(launches, of_pass, of_regression):
    """Oracle: Student's one-sided limits of the mean over launches."""
    rng = np.random.default_rng(9)
    sides = in_turns(rng, launches=launches, rounds=6, between=0.01)
    gate = gated(*sides, interleaved=True, looks=DEFAULT_LAUNCHES)
    wanted = 0.01 * of_pass, 0.01 * of_regression / 2
    assert (gate.errors.worse, gate.errors.better) == pytest.approx(wanted)
    (change,) = [c for c in of_metric(gate, "images_per_s") if c.case_id == "ddp-n2"]
    ends = stats.t.ppf([0.01 * of_pass, 1 - 0.01 * of_regression / 2], launches - 1) * change.error
    assert np.log([change.ratio.low, change.ratio.high]) == pytest.approx(
        np.log(change.ratio.estimate) + ends, abs=1e-9
    )
    shares = [gate.policy.compute_look_shares(look) for look in DEFAULT_LAUNCHES]
    both = [sum(one.worse for one in shares), sum(one.better for one in shares)]
    assert both == pytest.approx([1.0, 1.0])


def of_verdicts(*verdicts):
    """Changes with a reading, those after `informs` only informing."""
    cut = verdicts.index("informs") if "informs" in verdicts else len(verdicts)
    ratio = Interval(1.0, 0.9, 1.1)
    return [
        Change(
            case_id="c",
            label="c",
            name="c",
            stand_in=False,
            metric=None,
            verdict=one,
            ratio=ratio,
            decides=i < cut,
        )
        for i, one in enumerate(verdicts)
        if one != "informs"
    ]


@pytest.mark.parametrize(
    ("verdicts", "expected", "code"),
    [
        (["no regression", "improved"], "pass", 0),
        (["no regression", "informs", "regressed", "undecided", "informational"], "pass", 0),
        (["no regression", "undecided"], "undecided", 3),
        (["informs", "no regression"], "undecided", 3),  # nothing decides
        (["regressed", "undecided", "missing"], "regression", 1),
        (["missing", "undecided"], "missing", 1),
        (["not comparable", "missing"], "not comparable", 3),
    ],
)
def test_one_rule_decides_by_the_changes_that_can_fail_a_gate(verdicts, expected, code):
    found = decide(of_verdicts(*verdicts), Policy())
    assert (found.verdict, found.exit_code) == (expected, code)
    assert all(one.decides for one in found.reasons)
    lenient = decide(of_verdicts(*verdicts), Policy(allow_missing=True))
    assert lenient.verdict == ("undecided" if expected == "missing" else expected)

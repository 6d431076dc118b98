"""Verdicts on simulated rounds of known truth."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from gate_runs import MANIFEST, STEADY, failed, made_run, noisy, plan, with_rounds, write_run
from made import made_manifest
from scipy.stats import binomtest

from ddp_bench.bench import stats
from ddp_bench.bench.errors import NotComparableError, UsageError
from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.judge import judge
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.gate.runs import model_change
from ddp_bench.bench.results.schema import GATED
from ddp_bench.bench.stats import Interval

FIVE = dict.fromkeys(GATED, 0.05)


def simulated(rng, *, slower=1.0, drift=0.0, num_rounds=20, **noise):
    trend = np.linspace(1, 1 + drift, num_rounds)
    medians = {("single", 1): 100.0, ("dp", 2): 190.0 * slower, ("ddp", 2): 120.0 * slower}
    return {
        key: [
            float(ms * d) for ms, d in zip(noisy(rng, ms, num_rounds=num_rounds, **noise), trend, strict=True)
        ]
        for key, ms in medians.items()
    }


def gated(baseline, candidate, **options):
    return compare(made_run(baseline), made_run(candidate), **{"thresholds": FIVE, **options})


@pytest.mark.parametrize(
    ("low", "estimate", "high", "expected"),
    [
        (0.85, 0.90, 0.95, "regressed"),
        (1.06, 1.10, 1.14, "improved"),
        (0.98, 1.00, 1.02, "unchanged"),
        (0.97, 0.98, 0.99, "unchanged"),  # surely a change, surely within the threshold
        (0.85, 0.95, 1.05, "inconclusive"),
        (0.80, 0.90, 1.01, "inconclusive"),  # beyond the threshold, but may be no change
        (0.93, 0.96, 0.99, "inconclusive"),  # a change, but perhaps within the threshold
        (1.00, 1.00, 1.06, "inconclusive"),
        (-np.inf, np.nan, np.inf, "inconclusive"),
        (np.nan, 0.94, np.nan, "regressed"),  # one exact reading
        (np.nan, 0.96, np.nan, "unchanged"),
    ],
)
def test_a_regression_needs_the_interval_and_the_threshold(low, estimate, high, expected):
    assert judge(Interval(estimate, low, high), higher_is_better=True, threshold=0.05) == expected
    turned = {"regressed": "improved", "improved": "regressed"}.get(expected, expected)
    assert judge(Interval(estimate, low, high), higher_is_better=False, threshold=0.05) == turned


@pytest.mark.parametrize(
    "noise",
    [
        {"sd": 0.03, "tail": 2.0},
        *(pytest.param(n, marks=pytest.mark.campaign) for n in ({"sd": 0.02}, {"sd": 0.05}, {"drift": 0.1})),
    ],
)
def test_a_against_a_hardly_ever_regresses(noise, monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 200)
    rng = np.random.default_rng(1)
    trials = 100
    alarms = sum(
        gated(simulated(rng, **noise), simulated(rng, **noise)).exit_code == 1 for _ in range(trials)
    )
    assert binomtest(alarms, trials, 0.01, alternative="greater").pvalue > 0.01


@pytest.mark.parametrize("noise", [{"sd": 0.02}, {"sd": 0.015, "tail": 2.0}, {"sd": 0.01, "drift": 0.05}])
def test_ten_percent_slower_is_caught(noise, monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 200)
    rng = np.random.default_rng(2)
    for _ in range(15):
        gate = gated(simulated(rng, **noise), simulated(rng, slower=1.1, **noise))
        assert gate.exit_code == 1
        assert {c.case_id for c in gate.having("regressed")} == {"dp-n2", "ddp-n2"}, "single is as before"


def test_faster_passes_as_improved_and_a_quiet_copy_as_unchanged():
    rng = np.random.default_rng(3)
    base = simulated(rng, sd=0.005)
    faster = gated(base, simulated(rng, sd=0.005, slower=0.8))
    assert faster.exit_code == 0
    assert {c.case_id for c in faster.having("improved")} == {"dp-n2", "ddp-n2"}
    same = gated(base, base)
    assert same.exit_code == 0
    assert {c.verdict for c in same.comparisons} == {"unchanged"}


def test_what_cannot_be_told_is_no_pass():
    rng = np.random.default_rng(4)
    noise = {"sd": 0.3, "num_rounds": 4}
    sides = simulated(rng, **noise), simulated(rng, slower=1.1, **noise)
    for interleaved in (False, True):
        gate = gated(*sides, interleaved=interleaved)
        assert {c.verdict for c in gate.comparisons} == {"inconclusive"}
        assert gate.exit_code == 3
        assert re.search(r"^undecided: .*--rounds", gate_output.verdict(gate))
    wide = {("single", 1): [100.0, 130, 80, 110, 90, 120]}
    assert re.search(r"^undecided: .*--rounds \d+", gate_output.verdict(gated(wide, wide)))


def test_more_comparisons_make_each_interval_wider():
    one = {("single", 1): STEADY["single", 1]}
    narrow, wide = gated(one, one), gated(STEADY, STEADY)
    assert narrow.confidence == pytest.approx(0.98)
    # images/s of three cases and the speed-up of two; efficiency is the same evidence as speed-up.
    assert wide.confidence == pytest.approx(1 - 0.02 / 5)
    widths = [
        next(c.ratio for c in g.comparisons if c.case_id == "single-n1" and c.ratio) for g in (narrow, wide)
    ]
    assert widths[1].high - widths[1].low > widths[0].high - widths[0].low


def test_worst_first():
    slow = {**STEADY, ("dp", 2): [ms * 1.2 for ms in STEADY["dp", 2]]}
    worse = {**slow, ("ddp", 2): [ms * 1.5 for ms in STEADY["ddp", 2]]}
    order = [(c.case_id, c.verdict) for c in gated(STEADY, worse).comparisons if c.metric == "images_per_s"]
    assert order == [("ddp-n2", "regressed"), ("dp-n2", "regressed"), ("single-n1", "unchanged")]


def test_a_case_that_failed_or_is_gone_fails_the_gate():
    base = made_run(STEADY)
    without = replace(base, cases=base.cases[:2])
    for candidate, reason in (
        (without, "not in the candidate"),
        (failed(base, "ddp-n2"), "failed: no such luck"),
    ):
        gate = compare(base, candidate, thresholds=FIVE)
        assert [(c.case_id, c.reason) for c in gate.having("missing")] == [("ddp-n2", reason)]
        assert gate.comparisons[0].verdict == "missing"
        assert gate.exit_code == 1
        assert compare(base, candidate, thresholds=FIVE, allow_missing=True).exit_code == 0
    assert compare(without, base, thresholds=FIVE).only_in_candidate == ("ddp-n2",)


def test_the_reference_of_every_ratio_failing_takes_the_ratios_with_it():
    base = made_run(STEADY)
    broken = failed(base, "single-n1")
    broken = replace(broken, cases=tuple(with_rounds(c, speedup={}, efficiency={}) for c in broken.cases))
    gate = compare(base, broken, thresholds=FIVE)
    assert [(c.case_id, c.metric) for c in gate.having("missing")] == [("single-n1", None)]
    assert gate.exit_code == 1
    assert set(gate.only_in_baseline) == {
        f"{metric} of {case}" for case in ("dp-n2", "ddp-n2") for metric in ("speed-up", "efficiency")
    }


def test_a_pass_that_the_candidate_left_out_is_a_note_and_no_regression():
    candidate, exposed = made_run(STEADY), dict(enumerate([20.0, 21, 19, 20.5, 19.5, 20.2]))
    base = replace(
        candidate,
        cases=tuple(
            with_rounds(c, exposed_comm_ms=exposed) if c.case_id == "ddp-n2" else c for c in candidate.cases
        ),
    )
    gate = compare(base, candidate, thresholds=FIVE)
    assert gate.exit_code == 0
    assert gate.only_in_baseline == ("exposed communication of ddp-n2",)
    assert any("exposed communication of ddp-n2" in note for note in gate_output.notes(gate))
    assert compare(candidate, base, thresholds=FIVE).exit_code == 0


OTHER = {
    "torch": {"versions": {"torch": "2.16.0", "python": "3.12.1"}},
    "CPU": {"environment": {**MANIFEST["environment"], "cpu_model": "Another CPU"}},
    "CPU cores": {"environment": {**MANIFEST["environment"], "num_cores": 4}},
    "GPUs": {"environment": {**MANIFEST["environment"], "gpus": [{"name": "A"}, {"name": "A"}]}},
    "model parameters": {"model": {"num_params": 11, "gradient_bytes": 40}},
    "data workers": {"settings": {"data": "/images", "data_workers": 4}},
}


@pytest.mark.parametrize("name", OTHER)
def test_other_conditions_are_not_comparable_but_for_ratios(name):
    slow = {key: [ms * 1.5 for ms in series] for key, series in STEADY.items()}
    base, other = made_run(STEADY), made_run(slow, **OTHER[name])
    gate = compare(base, other, thresholds=FIVE)
    assert name in [d.name for d in gate.differences if d.blocking]
    assert {c.verdict for c in gate.comparisons} == {"not comparable"}
    assert all(c.ratio is None for c in gate.comparisons)
    assert gate.exit_code == 3
    ratios = compare(base, other, thresholds=FIVE, ratios_only=True)
    assert {c.metric for c in ratios.comparisons if c.metric} == {"speedup", "efficiency"}
    assert ratios.exit_code == 0, "everything is 1.5x slower, so no ratio changed"


def test_conditions_that_may_be_the_change_itself_are_told_and_do_not_block():
    other = made_run(STEADY, git={"commit": "abc"}, versions={"torch": "2.15.0", "python": "3.13.0"})
    gate = compare(made_run(STEADY), other, thresholds=FIVE)
    assert [(d.name, d.blocking) for d in gate.differences] == [
        ("python", False),
        ("ddp-bench commit", False),
    ]
    assert gate.exit_code == 0


def test_a_manifest_that_does_not_tell_its_machine_is_not_comparable_even_to_its_like():
    unknown = made_run(STEADY, environment={})
    assert compare(unknown, unknown, thresholds=FIVE).exit_code == 3


def test_too_few_rounds_or_nothing_in_common():
    base = made_run(STEADY)
    short = made_run({key: series[:2] for key, series in STEADY.items()}, path="short")
    for pair in ((base, short), (short, base)):
        with pytest.raises(NotComparableError, match=r"short: single-n1 has 2 rounds.*--rounds"):
            compare(*pair, thresholds=FIVE)
    first, second = replace(base, cases=base.cases[:1]), replace(base, cases=base.cases[1:])
    with pytest.raises(NotComparableError, match="no case is in both"):
        compare(first, second, thresholds=FIVE)
    nothing = failed(first, "single-n1")
    with pytest.raises(UsageError, match="no case with status ok"):
        compare(nothing, base, thresholds=FIVE)
    assert compare(first, first, thresholds=FIVE, ratios_only=True).exit_code == 3, (
        "single alone has no ratio"
    )


def test_cases_are_joined_by_their_swept_settings_where_the_ids_differ():
    base = made_run(STEADY)
    renamed = replace(base, cases=tuple(replace(c, case_id=f"new-{c.case_id}") for c in base.cases))
    gate = compare(base, renamed, thresholds=FIVE)
    assert gate.exit_code == 0
    assert gate.only_in_candidate == ()
    swapped = replace(base, cases=(replace(base.cases[0], row=base.cases[1].row), *base.cases[1:]))
    with pytest.raises(UsageError, match="single-n1 has another mode"):
        compare(base, swapped, thresholds=FIVE)


def test_exposed_communication_from_nothing_to_much_is_a_regression():
    base = made_run(STEADY)

    def exposed(values):
        by_round = dict(enumerate(values))
        return replace(base, cases=tuple(with_rounds(c, exposed_comm_ms=by_round) for c in base.cases[2:]))

    nothing, much = exposed([-0.4, 0.3, -0.2, 0.5, 0.1, -0.1]), exposed([50.0, 51, 49, 50.5, 49.5, 50.2])
    row = next(
        c for c in compare(nothing, much, thresholds=FIVE).comparisons if c.metric == "exposed_comm_ms"
    )
    assert row.verdict == "regressed"
    back = next(
        c for c in compare(much, nothing, thresholds=FIVE).comparisons if c.metric == "exposed_comm_ms"
    )
    assert back.verdict == "improved"


@pytest.mark.parametrize(
    ("mib", "verdict"), [(1000.0, "unchanged"), (1060.0, "regressed"), (900.0, "improved")]
)
def test_peak_memory_is_exact(mib, verdict):
    base = made_run(STEADY)

    def with_memory(value):
        return replace(base, cases=tuple(with_rounds(c, peak_mem_mib={0: value}) for c in base.cases))

    gate = compare(with_memory(1000.0), with_memory(mib), thresholds=FIVE)
    rows = [c for c in gate.comparisons if c.metric == "peak_mem_mib"]
    assert [c.verdict for c in rows] == [verdict] * 3
    assert all(np.isnan(c.ratio.low) for c in rows if c.ratio)
    assert gate.confidence == pytest.approx(1 - 0.02 / 5), "no interval, so no share of the 2%"


def test_a_candidate_that_keeps_no_count_of_memory_lost_nothing():
    """An older checkout counted it on CPU cores."""
    run = made_run(STEADY)
    counted = replace(run, cases=tuple(with_rounds(c, peak_mem_mib={0: 512.0}) for c in run.cases))
    for base, candidate in ((counted, run), (run, counted)):
        gate = compare(base, candidate, thresholds=FIVE)
        assert gate.exit_code == 0
        assert "peak_mem_mib" not in {c.metric for c in gate.comparisons if c.metric}


def test_thresholds_are_per_metric():
    slow = {**STEADY, ("ddp", 2): [ms * 1.08 for ms in STEADY["ddp", 2]]}
    gate = gated(STEADY, slow, thresholds={**FIVE, "images_per_s": 0.2})
    assert {c.metric for c in gate.having("regressed") if c.metric} == {"speedup", "efficiency"}


def test_a_run_from_before_a_setting_existed_has_the_default_of_it():
    """Otherwise the change that adds a DDP setting finds every DDP case of its base missing."""
    run = made_run(STEADY)
    now = replace(run, cases=tuple(replace(c, row={**c.row, "static_graph": "False"}) for c in run.cases))
    older = replace(run, cases=tuple(replace(c, case_id=f"old-{c.case_id}") for c in run.cases))
    assert all("static_graph" not in case.row for case in older.cases)
    for pair in ((older, now), (now, older)):
        gate = compare(*pair, thresholds=FIVE)
        assert "missing" not in {c.verdict for c in gate.comparisons}
        assert gate.only_in_candidate == ()


GROWN = {"num_params": 11_900_000, "gradient_bytes": 47_600_000}
SMALL = {"num_params": 11_689_512, "gradient_bytes": 46_758_048}


def test_a_changed_model_is_compared_on_request_and_the_change_named():
    slow = {key: [ms * 1.5 for ms in series] for key, series in STEADY.items()}
    base, other = made_run(STEADY, model=SMALL), made_run(slow, model=GROWN)
    refused = compare(base, other, thresholds=FIVE)
    assert refused.exit_code == 3
    assert gate_output.verdict(refused).startswith(
        "not comparable: the runs differ in model parameters, gradient bytes; --allow-changed-model compares"
    )
    allowed = compare(base, other, thresholds=FIVE, allow_changed_model=True)
    assert allowed.exit_code == 1
    assert [(d.name, d.blocking) for d in allowed.differences] == [
        ("model parameters", False),
        ("gradient bytes", False),
    ]
    change = "model changed: 11.7M \N{RIGHTWARDS ARROW} 11.9M parameters (+1.8%)"
    assert f"{change}." in gate_output.notes(allowed)
    assert "11.7M \N{RIGHTWARDS ARROW} 11.9M parameters" in gate_output.markdown(allowed)
    assert json.loads(gate_output.as_json(allowed))["model_change"] == change


def test_only_the_model_may_change_and_only_from_one_known_to_another():
    base = made_run(STEADY, model=SMALL)
    for other in (
        made_run(STEADY, model={}),
        made_run(STEADY, model=GROWN, versions={"torch": "2.16.0", "python": "3.12.1"}),
    ):
        gate = compare(base, other, thresholds=FIVE, allow_changed_model=True)
        assert gate.exit_code == 3
        assert any(d.blocking for d in gate.differences)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({}, {}, ""),
        ({}, {"num_params": 5}, ""),
        (SMALL, SMALL, ""),
        ({"num_params": 250}, {"num_params": 125}, "250 > 125 parameters (-50.0%)"),
        (SMALL, {**SMALL, "num_params": 11_689_513}, "11,689,512 > 11,689,513 parameters (+1)"),
        (
            SMALL,
            {**SMALL, "gradient_bytes": 46_758_052},
            "gradients of 46,758,048 bytes > 46,758,052 bytes (+4)",
        ),
        (SMALL, {**SMALL, "gradient_bytes": 23_379_024}, "gradients of 44.6 MiB > 22.3 MiB (-50.0%)"),
        (
            {"arch": "resnet18", **SMALL},
            {"arch": "resnet34", "num_params": 21_797_672},
            "resnet18 > resnet34, 11.7M > 21.8M parameters (+86.5%)",
        ),
    ],
)
def test_how_a_model_changed_is_said_with_its_unit(then, now, said):
    expected = f"model changed: {said}".replace(">", "\N{RIGHTWARDS ARROW}") if said else ""
    assert model_change(made_manifest(model=then), made_manifest(model=now)) == expected


def test_another_architecture_is_a_changed_model(tmp_path):
    base, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", planned=plan(arch="resnet34"))
    assert main([str(base), str(other), "--quiet"]) == 3
    assert main([str(base), str(other), "--quiet", "--allow-changed-model"]) == 0

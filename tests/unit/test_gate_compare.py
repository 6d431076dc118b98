"""Cases, metrics and conditions of two runs that a gate compares, and what it says of the others."""

from dataclasses import replace

import numpy as np
import pytest
from gate_runs import (
    STEADY,
    changed,
    failed,
    gated,
    in_one_launch,
    made_run,
    of_metric,
    of_modes,
    renamed,
    slowed,
    with_exposed,
    with_rounds,
)

from ddp_bench.bench.common.errors import NotComparableError, UsageError
from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.headline import describe_verdict as sentence
from ddp_bench.bench.gate.page import make_page
from ddp_bench.bench.page.render import render_html


def test_cases_that_share_devices_are_shown_and_not_judged():
    base, slow = (
        replace(run, cases=(*run.cases[:2], changed(ddp, oversubscribed=True)))
        for run in (made_run(STEADY), made_run(slowed(1.5, "ddp")))
        for ddp in run.cases[2:]
    )
    gate = gated(base, slow)
    assert gate.exit_code == 0
    shown = [c for c in gate.comparisons if c.case_id == "ddp-n2"]
    assert {c.verdict for c in shown} == {"not gated"}
    assert all(c.ratio is not None for c in shown)
    gate = gated(of_modes(base, "ddp"), of_modes(slow, "ddp"))
    assert gate.exit_code == 3, "nothing was judged"
    assert "its devices" in sentence(gate)


def test_worst_first():
    worse = slowed(1.5, "ddp", steps=slowed(1.2, "dp"))
    order = [(c.case_id, c.verdict) for c in of_metric(gated(STEADY, worse), "images_per_s")]
    assert order == [("ddp-n2", "regressed"), ("dp-n2", "regressed"), ("single-n1", "no regression")]


def test_a_case_that_failed_or_is_gone_fails_the_gate():
    base = made_run(STEADY)
    without, broken = of_modes(base, "single", "dp"), failed(base, "ddp-n2")
    for candidate, reason in ((without, "not in the candidate"), (broken, "failed: no such luck")):
        gate = gated(base, candidate)
        assert [(c.case_id, c.reason) for c in gate.select_verdict("missing")] == [("ddp-n2", reason)]
        assert gate.comparisons[0].verdict == "missing"
        assert gate.exit_code == 1
        assert gated(base, candidate, allow_missing=True).exit_code == 0
        is_alike = gate.more is not None and "its options" in gate.more.why
        assert is_alike == (reason == "not in the candidate"), "one that failed would fail again"
    more = gated(without, base)
    assert more.only_in_candidate == ("DDP, 2 CPU cores, cap default",)
    assert "✘ not in the baseline" in render_html(make_page(more)), "the chart marks it"


def test_the_reference_of_every_ratio_failing_takes_the_ratios_with_it():
    base = made_run(STEADY)
    gate = gated(base, with_rounds(failed(base, "single-n1"), speedup={}))
    assert [(c.case_id, c.metric) for c in gate.select_verdict("missing")] == [("single-n1", None)]
    assert gate.exit_code == 1
    assert set(gate.only_in_baseline) == {
        "speed-up of DP emulated on 2 CPU cores",
        "speed-up of DDP on 2 CPU cores",
    }


def test_a_pass_that_the_candidate_left_out_is_a_note_and_no_regression():
    candidate, base = made_run(STEADY), with_exposed([20.0, 21, 19, 20.5, 19.5, 20.2])
    gate = gated(base, candidate)
    assert gate.exit_code == 0
    assert gate.only_in_baseline == ("exposed communication of DDP on 2 CPU cores",)
    assert any("exposed communication of DDP on 2 CPU cores" in note for note in gate_output.list_notes(gate))
    assert gated(candidate, base).exit_code == 0


OTHER = {
    "torch": {"versions": {"torch": "2.16.0", "python": "3.12.1"}},
    "CPU": {"environment": {"cpu_model": "Another CPU", "num_cores": 2, "gpus": []}},
    "model parameters": {"model": {"num_params": 11_900_000, "gradient_bytes": 40}},
}


@pytest.mark.parametrize("name", OTHER)
def test_other_conditions_are_not_comparable_but_for_ratios(name):
    other = made_run(slowed(1.5), **OTHER[name])
    gate = gated(STEADY, other)
    assert name in [d.name for d in gate.differences if d.blocking]
    assert {c.verdict for c in gate.comparisons} == {"not comparable"}
    assert all(c.ratio is None for c in gate.comparisons)
    assert gate.exit_code == 3
    ratios = gated(STEADY, other, ratios_only=True)
    assert {c.metric for c in ratios.comparisons if c.metric} == {"speedup"}
    assert ratios.exit_code == 0, "everything is 1.5x slower, so no ratio changed"
    assert f"{name} differs (" in sentence(gate)
    assert "--ratios-only still compares speed-up." in gate_output.list_facts(gate)
    assert {c.verdict for c in gated(STEADY, other, interleaved=True).comparisons} & {"regressed"}
    single = {("single", 1): STEADY["single", 1]}
    alone = gated(single, made_run(single, **OTHER[name]))
    assert not any("--ratios-only" in fact for fact in gate_output.list_facts(alone)), "no ratios"


OPTIONS = {"command": "ddp-bench run --modes ddp --gpus 2 --out results/x --batch-size 16"}


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("torch", "python -m bench.gate --interleave REF --python PYTHON -- "),
        ("CPU", "python -m bench.gate --interleave REF -- "),
        ("batch_per_device", "python -m bench.run --modes ddp --gpus 2 --batch-size 16"),
        ("link", "python -m bench.lab --hosts 2 --rate 1gbit -- python -m bench.run --modes ddp"),
    ],
)
def test_sides_that_are_not_comparable_are_told_the_command_that_makes_them_so(name, starts):
    """Options are measured anew as those of the baseline; sides of another machine or torch, in turns."""
    base = made_run(STEADY, **OPTIONS, **({"link": "1gbit"} if name == "link" else {}))
    other = made_run(STEADY, **OTHER.get(name, {}))
    if name not in OTHER:
        base, other = (
            replace(run, cases=tuple(changed(case, **{name: value}) for case in run.cases))
            for run, value in ((base, "16"), (other, "32"))
        )
    gate = gated(base, other)
    assert [one.name for one in gate.blocking] == [name]
    assert gate.more.command.startswith(starts)
    lines = [
        sentence(gate),
        *gate_output.list_facts(gate),
        *gate_output.list_warnings(gate),
        *gate_output.list_notes(gate),
    ]
    assert sum(f"{name} differs (" in line for line in lines) == 1, "the headline says it, and no line again"
    assert gate.shown == [], "figures that are not comparable do not stand side by side"


def test_the_figures_of_sides_that_are_not_comparable_agree_with_each_other():
    """Medians of rounds contradict each other where single and DDP have other good rounds."""
    uneven = {
        **STEADY,
        ("single", 1): [100.0, 180, 99, 100.5, 180, 181],
        ("ddp", 2): [125.0, 126, 190, 191, 124, 125],
    }
    gate = gated(STEADY, made_run(uneven, **OTHER["torch"]))
    shown = {(c.case_id, c.metric): c.candidate for c in gate.comparisons}
    for mode in ("dp", "ddp"):
        rates = shown[f"{mode}-n2", "images_per_s"] / shown["single-n1", "images_per_s"]
        assert rates == pytest.approx(shown[f"{mode}-n2", "speedup"])


def test_conditions_that_may_be_the_change_itself_are_told_and_do_not_block():
    other = made_run(STEADY, git={"commit": "abc"}, versions={"torch": "2.15.0", "python": "3.13.0"})
    gate = gated(STEADY, other)
    assert [d.name for d in gate.differences if not d.blocking] == ["python", "ddp-bench commit"]
    assert (gate.exit_code, gate.more) == (0, None)
    assert sentence(gate).endswith(". Accept the candidate if the machine was the same.")


def test_too_few_rounds_or_nothing_in_common():
    """The user is told a command that mends it."""
    base = made_run(STEADY, **OPTIONS)
    short = made_run({key: series[:2] for key, series in STEADY.items()}, path="short", **OPTIONS)
    for pair in ((base, short), (short, base)):
        with pytest.raises(
            NotComparableError,
            match=r"short: single-n1 has 2 rounds.* measure longer: python -m bench.run .* --rounds 10$",
        ):
            gated(*pair)
    first, second = of_modes(base, "single"), of_modes(base, "dp", "ddp")
    with pytest.raises(
        NotComparableError,
        match=r"no case is in both.* its options, then gate that run: python -m bench.run --m",
    ):
        gated(first, second)
    with pytest.raises(UsageError, match="no case with status ok"):
        gated(failed(first, "single-n1"), base)
    assert gated(first, first, ratios_only=True).exit_code == 3, "single alone has no ratio"


def test_cases_are_joined_by_their_swept_settings_where_the_ids_differ():
    base = made_run(STEADY)
    gate = gated(base, renamed(base, "new"))
    assert gate.exit_code == 0
    assert gate.only_in_candidate == ()
    first, second, *others = base.cases
    other = changed(second, case_id=first.result.case_id)
    swapped = replace(base, cases=(replace(first, result=other.result), second, *others))
    with pytest.raises(UsageError, match="single-n1 has another mode"):
        gated(base, swapped)


def test_exposed_communication_from_nothing_to_much_is_a_regression_where_it_is_asked_for():
    nothing = with_exposed([-0.4, 0.3, -0.2, 0.5, 0.1, -0.1])
    much = with_exposed([50.0, 51, 49, 50.5, 49.5, 50.2])
    for sides, verdict in (((nothing, much), "regressed"), ((much, nothing), "improved")):
        for asked in ({"strict": True}, {"named": {"exposed_comm_ms": 0.05}}):
            gate = gated(*sides, **asked)
            (found,) = of_metric(gate, "exposed_comm_ms")
            assert found.verdict == verdict
            assert gate.exit_code == (1 if verdict == "regressed" else 0)
        gate = gated(*sides)
        (found,) = of_metric(gate, "exposed_comm_ms")
        assert (found.verdict, gate.exit_code) == ("informational", 0)


def test_a_faster_candidate_that_hides_less_passes_and_says_so():
    """A third faster; what communication adds grows from 1% to 13% of the baseline's step."""
    sides = (
        with_exposed([1.2, 1.3, 1.1, 1.25, 1.15, 1.2]),
        with_exposed([16.0, 16.2, 15.8, 16.1] * 2, slowed(1 / 1.33)),
    )
    gate = gated(*sides, interleaved=True)
    assert gate.decision.verdict == "pass"
    assert {c.metric for c in gate.select_verdict("informational")} == {"exposed_comm_ms"}
    assert "33.0% faster" in sentence(gate)
    informed = "For information: exposed communication of DDP on 2 CPU cores is 11.9% of the step higher"
    assert any(fact.startswith(informed) for fact in gate_output.list_facts(gate))
    strict = gated(*sides, interleaved=True, strict=True)
    assert (strict.decision.verdict, strict.exit_code) == ("regression", 1)


def test_the_sentence_names_the_threshold_that_decided():
    """All are 8% slower, where the limit of the rate is 10%, and of the speed-up 1%."""
    limits = {"threshold": 0.10, "named": {"speedup": 0.01}}
    gate = gated(STEADY, slowed(1.08), **limits)
    assert sentence(gate).startswith("Pass, no regression: throughput of ")
    assert "within the 10% limit" in sentence(gate)
    slower = gated(STEADY, slowed(1.25, "ddp"), **limits)
    assert sentence(slower).startswith("Regression: DDP on 2 CPU cores is 20.0% slower")
    assert ", beyond the 10% limit" in sentence(slower)


@pytest.mark.parametrize(
    ("mib", "verdict"), [(1000.0, "no regression"), (1060.0, "regressed"), (900.0, "improved")]
)
def test_peak_memory_is_exact(mib, verdict):
    sides = [with_rounds(made_run(STEADY), peak_mem_mib=in_one_launch([value])) for value in (1000.0, mib)]
    informs = of_metric(gated(*sides), "peak_mem_mib")
    assert {c.verdict for c in informs} == {
        "no regression" if verdict == "no regression" else "informational"
    }
    gate = gated(*sides, strict=True)
    rows = of_metric(gate, "peak_mem_mib")
    assert [c.verdict for c in rows] == [verdict] * 3
    assert all(np.isnan(c.ratio.low) for c in rows if c.ratio)
    assert gate.errors.better == pytest.approx(0.01 / 5), "no interval, so no share of the error"


def test_a_candidate_that_keeps_no_count_of_memory_lost_nothing():
    """An older checkout counted it on CPU cores."""
    counted = with_rounds(made_run(STEADY), peak_mem_mib=in_one_launch([512.0]))
    for sides in ((counted, STEADY), (STEADY, counted)):
        gate = gated(*sides)
        assert gate.exit_code == 0
        assert of_metric(gate, "peak_mem_mib") == []


def test_thresholds_are_per_metric():
    gate = gated(STEADY, slowed(1.08, "ddp"), named={"images_per_s": 0.2}, strict=True)
    assert {c.metric for c in gate.select_verdict("regressed")} == {"speedup"}


def test_a_run_from_before_a_setting_existed_has_the_default_of_it():
    """Otherwise the change that adds a DDP setting finds every DDP case of its base missing."""
    run = made_run(STEADY)
    now = replace(run, cases=tuple(changed(c, static_graph=False) for c in run.cases))
    older = renamed(run, "old")
    assert all(not case.result.get_text("static_graph") for case in older.cases)
    for pair in ((older, now), (now, older)):
        gate = gated(*pair)
        assert "missing" not in {c.verdict for c in gate.comparisons}
        assert gate.only_in_candidate == ()

import math

import pytest
from made import made_manifest
from report_runs import case, dashed, drawn, figure_of, run, usual_cases

from ddp_bench.bench.findings.answers import verdicts
from ddp_bench.bench.findings.numbers import TIMES, between
from ddp_bench.bench.findings.verdicts import (
    CAP,
    RESOLVED,
    CommunicationVerdict,
    Ratio,
    SettingsVerdict,
    WrapperVerdict,
)
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from ddp_bench.bench.stats import Interval
from ddp_bench.report.cases import workloads
from ddp_bench.report.figures import against_default, ratio_ticks
from ddp_bench.report.page import cards, heading, model_name, page, status


def compared(low, high, case_id="a", reference_id="b"):
    return Comparison(case_id, reference_id, Interval(math.sqrt(low * high), low, high), 0.05, 10)


def wrapper(answer, *by, faster="DDP"):
    ratio = Ratio(faster, "DP", Interval(1.2, 1.1, 1.3))
    return WrapperVerdict(
        answer=answer, comparisons=by, ratio=ratio, where="on 2 GPUs", margin=0.05, paste="p" if by else ""
    )


def settings(answer, best=None):
    return SettingsVerdict(answer=answer, standing="the default", noun="cap", best=best, few=("cap 1",))


def communication(answer):
    return CommunicationVerdict(
        answer=answer, exposed_ms=Interval(3.0, 2.0, 4.0), step_ms=10.0, place="2 GPUs"
    )


GAIN = Ratio("cap 1", "the default", Interval(1.2, 1.1, 1.3))


@pytest.mark.parametrize(
    ("verdict", "state", "label"),
    [
        (wrapper(FASTER, compared(1.2, 1.3)), "found", "DDP is faster"),
        (wrapper(SLOWER, compared(0.7, 0.8), faster="DP"), "found", "DP is faster"),
        (wrapper(FASTER, compared(1.01, 1.02)), "found", "DDP is faster, by less than 5%"),
        (wrapper(SLOWER, faster="one device"), "found", "one device is faster"),
        (wrapper(EQUAL, compared(0.99, 1.02)), "equal", "no difference above 5%"),
        (settings(UNRESOLVED), "open", "unresolved"),
        (settings(FASTER, GAIN), "found", "cap 1 is faster"),
        (settings(EQUAL), "equal", "keep the default"),
        (communication(TOO_FEW), "open", "too few rounds"),
        (communication(RESOLVED), "found", "adds 3.0 ms"),
    ],
)
def test_card_names_the_state_of_its_answer(verdict, state, label):
    (card,) = cards([verdict])
    assert (card.state, card.label, card.sentence, card.paste) == (
        *(state, label),
        *(verdict.sentence, verdict.paste),
    )


def test_only_settings_without_a_difference_are_left_as_they_are():
    made = cards([wrapper(EQUAL, compared(0.99, 1.01)), settings(EQUAL)])
    assert [card.leave for card in made] == [False, True]


def test_heading_names_model_and_devices():
    cases = run([case("single", 1, 9.0, arch="resnet18"), case("ddp", 4, 9.0, arch="resnet18")]).cases
    assert heading(cases) == dashed("ResNet-18, 1--4 GPUs")
    assert (
        heading(run([case("ddp", 2, 9.0, device_type="cpu", arch="my:Net")]).cases) == "my:Net, 2 CPU cores"
    )
    assert heading(run([]).cases) == ""
    assert [model_name(name) for name in ("resnext50_32x4d", "wide_resnet50_2", "vit")] == [
        "ResNeXt-50_32x4d",
        "Wide ResNet-50_2",
        "vit",
    ]


def test_status_says_how_the_run_ended_and_what_is_open():
    cases = run([case("single", 1, 9.0, num_rounds=7), case("ddp", 2, status="oom")]).cases
    done, left = wrapper(EQUAL), settings(UNRESOLVED)
    timing = made_manifest(timing={"stopped_because": "time limit reached", "measuring_s": 60.0})
    assert status(timing, cases, [done, left]) == (
        "Time limit reached, 1 of 2 questions answered · 1 of 2 cases measured · 7 rounds · 60 s of measuring"
    )
    skipped = run([case("single", 1, 9.0), case("ddp", 2, status="skipped")]).cases
    assert "1 of 1 case measured · 1 skipped" in status(timing, skipped, [done])
    assert status(Manifest(), cases, [left]).startswith("Finished, inconclusive · ")
    assert status(Manifest(), cases, [done]).startswith("Finished, answered · ")
    assert status(Manifest(), cases, []).startswith("Finished, nothing to compare · ")
    assert status(made_manifest(timing={"stopped_because": "interrupted"}), cases, [done]).startswith(
        "Interrupted, "
    )
    assert status(Manifest(), cases[cases["status"] != "ok"], []).startswith("Finished, nothing measured · ")


def test_forest_shows_every_case_over_the_default_fastest_first():
    cases = usual_cases()
    default, dp, small = (next(r["case_id"] for r in cases if r["case_id"] == i) for i in IDS)
    comparisons = [compared(1.1, 1.4, default, dp), compared(0.8, 0.9, small, default)]
    figure = against_default(workloads(run(cases).cases)[0], comparisons, key="k")
    ((_, rows),) = drawn(figure)
    assert [(name, row.x) for name, (row,) in rows.items()] == [
        ("DDP, cap 1 MiB", pytest.approx(math.sqrt(0.72))),
        ("DP", pytest.approx(1 / math.sqrt(1.54))),
    ]
    assert figure.caption == "On 2 GPUs every other case is slower than DDP's default."
    drawing = figure.svg()
    assert dashed(f"DP · 0.81{TIMES} (0.71--0.91)") in drawing
    assert "<title>DDP, cap 1 MiB · " in drawing
    assert "within 5%" in drawing


IDS = ("ddp-n2-x-1", "dp-n2-x-1", "ddp-n2-1-1")


def test_forest_of_too_few_rounds_names_no_winner():
    shown = figure_of(page([run(usual_cases())]).runs[0], "Every case")
    assert shown.caption == "On 2 GPUs there are too few rounds to compare."
    assert all(row.low is None for rows in drawn(shown)[0][1].values() for row in rows)
    assert "nan" not in shown.svg()


def test_forest_needs_something_to_compare():
    workload = workloads(run([case("single", 1, 9.0), case("ddp", 2, 15.0)]).cases)[0]
    assert against_default(workload, [], key="k") is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.45, 2.2, [0.5, 1, 2]),
        (0.8, 1.25, [0.8, 0.9, 1.0, 1.1, 1.2]),
        (0.05, 20.0, [0.0625, 0.25, 1, 4, 16]),
    ],
)
def test_ratio_axis_has_round_ticks(low, high, ticks):
    assert ratio_ticks(low, high) == ticks


@pytest.mark.parametrize(
    "ratio",
    [
        Interval(1.773, 1.074, 2.422),
        Interval(1.773, 0.897, 2.900),
        Interval(1.02, 1.01, 1.03),
        Interval(1.0, 0.99, 1.01),
        Interval(0.6, 0.5, 0.7),
        Interval(1.2, math.nan, math.nan),
    ],
)
def test_the_figure_and_the_answer_say_the_same_of_one_ratio(ratio):
    cases = [case("ddp", 2, 180.0), case("ddp", 2, 190.0, bucket_cap_mb="1")]
    rows = run(cases).cases
    compared = [Comparison(cases[1]["case_id"], cases[0]["case_id"], ratio, 0.05, 20)]
    (verdict,) = [v for v in verdicts(rows, compared) if v.question == CAP]
    figure = against_default(workloads(rows)[0], compared, key="k")
    assert (verdict.answer == FASTER) == ("is faster than DDP's default" in figure.caption)
    assert (verdict.answer == TOO_FEW) == ("too few rounds" in figure.caption)
    if verdict.answer == FASTER:
        assert between(ratio) in figure.caption
        assert between(ratio) in verdict.sentence

"""Figures: what their marks and bars are, that every drawing is whole. Words are recorded."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from commands import ROOT
from report_runs import (
    canvas_of,
    case,
    communicating,
    drawn,
    measured,
    paper_like,
    run,
    timed,
    usual_cases,
)

from ddp_bench.bench.page.charts import Ratio, draw_forest
from ddp_bench.bench.page.drawing import NAMES, render_svg
from ddp_bench.bench.page.render import render_html
from ddp_bench.bench.results.comparisons import Comparison, find_default
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.cases import group_workloads
from ddp_bench.report.charts import draw_against_default, draw_drift, draw_scaling
from ddp_bench.report.page import make_page
from ddp_bench.report.step import REST, draw_breakdown, get_step_parts


def test_every_kind_of_drawing_is_well_formed_themed_and_the_same_each_time():
    figures = [*make_page(paper_like()).figures, paces(ROUNDS)]
    assert [figure.key for figure in figures] == ["w1-speedup", "w1-forest", "w1-anatomy", "k-rounds"]
    drawings = [render_svg(figure) for figure in figures]
    seen = set()
    for figure, drawing in zip(figures, drawings, strict=True):
        assert drawing == render_svg(figure)
        root = ET.fromstring(drawing)
        assert root.attrib["aria-label"] == figure.alt
        assert figure.caption in figure.alt
        ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
        assert set(re.findall(r"url\(#([^)]+)\)", drawing)) <= ids
        assert seen.isdisjoint(ids)
        seen |= ids
    whole = render_html(replace(make_page(paper_like()), figures=(), folds=())) + "".join(drawings)
    used = set(re.findall(r"var\(--([a-z-]+)\)", whole))
    both = set(re.findall(r"--([a-z-]+): light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\);", whole))
    assert {"exposed", "backward", "ddp"} <= used
    assert used | set(NAMES) <= both


def speedups(cases):
    return draw_scaling(group_workloads(run(cases).results)[0], key="k")


def test_scaling_is_the_speed_up_of_what_has_devices_of_its_own_beside_the_ideal_line():
    lines = drawn(speedups(usual_cases()))
    ends = [pytest.approx((x, y, 0.99 * y, 1.01 * y)) for x, y in ((1, 0.98), (2, 1.8))]
    assert lines["DDP"] == ends
    assert [mark.x for mark in lines["DP"]] == [2]
    assert [(mark.x, mark.y) for mark in lines["ideal"]] == [(1, 1), (2, 2)]


def test_a_stand_in_for_dp_is_not_drawn_and_said_so():
    cases = [case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 120.0)]
    shown = speedups([one | {"device_type": "cpu"} for one in cases])
    assert "DP" not in "".join(drawn(shown)).replace("DDP", "")
    assert "Emulated DP is not drawn" in shown.note


def test_many_devices_are_drawn_on_logarithmic_axes_all_others_from_zero():
    for most, begins, scale in ((16, 0.0, "linear"), (64, None, "log")):
        (axes,) = canvas_of(speedups([case("single", 1, 100.0), case("ddp", most, 100.0 * most)])).axes
        assert (axes.get_xscale(), axes.get_yscale()) == (scale, scale)
        assert begins in (None, axes.get_ylim()[0])
        assert axes.get_ylim()[1] > most


SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 180.0)
ROUNDS = [timed(row, r, 100.0 + r % 7) for row in (SINGLE, DP, DDP) for r in range(1, 301)]


def paces(blocks):
    data = run([SINGLE, DP, DDP], timed_blocks=blocks)
    return draw_drift(group_workloads(data.results)[0], data.times, key="k")


def test_round_that_was_broken_off_does_not_speak_for_all_cases_and_two_show_no_drift():
    blocks = [timed(row, r, 100.0) for row in (SINGLE, DP, DDP) for r in (1, 2, 3)]
    lines = drawn(paces([*blocks, timed(SINGLE, 4, 900.0)]))
    assert [mark.x for mark in lines["median of 3 cases"]] == [1.0, 2.0, 3.0]
    assert lines["single, 1 GPU"][-1].y == pytest.approx(100 / 9)
    assert paces([timed(row, r, 100.0) for row in (SINGLE, DDP) for r in (1, 2)]) is None


def test_hundreds_of_rounds_are_still_a_small_drawing():
    assert len(render_svg(paces(ROUNDS))) < 40_000


def figure(cases, comparisons=()):
    made = run(cases)
    return draw_breakdown(group_workloads(made.results)[0], comparisons, made, key="k")


def parts_of(row):
    return get_step_parts(run([row]).results[0])


def labels(shown):
    written = [text.get_text() for text in canvas_of(shown).axes[0].texts]
    return [text.split(": ")[0] for text in written if ": " in text]


@pytest.mark.parametrize(
    "anatomy",
    [{}, measured(data_ms=2.0, forward_ms=60.0, backward_ms=100.0, optimizer_ms=18.0)],
    ids=["as long as the step", "longer"],
)
def test_exposed_communication_is_taken_out_of_the_backward_and_the_bar_is_as_long_as_the_step(anatomy):
    """Instruments and other rounds make the anatomy pass longer or shorter: only its shares are taken."""
    whole = {"data": 1.0, "forward": 30.0, "backward": 40.0, "exposed communication": 20.0, "optimizer": 9.0}
    assert parts_of(communicating(2, 200.0) | anatomy) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("exposed_ms", "backward", "exposed"), [(80.0, None, 80.0), (-5.0, 60.0, None), (None, None, None)]
)
def test_exposed_communication_never_makes_a_part_negative(exposed_ms, backward, exposed):
    row = communicating(2, 200.0) | {"exposed_comm_ms": exposed_ms}
    found = parts_of(row)
    assert found.get("backward") == backward
    assert ("backward with communication" in found) == (exposed_ms is None)
    assert ("backward with communication" in figure([row]).note) == (exposed_ms is None)
    assert found.get("exposed communication") == exposed


def test_stage_that_was_not_measured_is_left_out_not_zero():
    dp = case("dp", 2, 20_000 / 90, dp_apply_ms=25.0, dp_backward_ms=58.0, step_ms=90.0)
    assert parts_of(dp) == pytest.approx({"apply (forward)": 25.0, "backward": 58.0, REST: 7.0})


def test_a_setting_is_drawn_only_where_its_step_is_known_to_differ():
    default, faster, slower, unknown = cases = [
        communicating(2, rate, bucket_cap_mb=cap)
        for rate, cap in ((200.0, "default"), (220.0, "25"), (180.0, "1"), (202.0, "5"))
    ]
    ratios = {"25": (1.05, 1.15), "1": (0.85, 0.95), "5": (0.9, 1.12)}
    comparisons = [
        Comparison(row["case_id"], default["case_id"], Interval(1.0, *ratios[row["bucket_cap_mb"]]), 0.05, 20)
        for row in (faster, slower, unknown)
    ]
    shown = figure(cases, comparisons)
    drawn = ("default", "default, without overlap", "25 MiB", "1 MiB")
    assert labels(shown) == [f"DDP, 2 GPUs, cap {cap}" for cap in drawn]
    assert "not significantly different" in shown.note


@pytest.mark.parametrize(
    ("alone_ms", "hidden_pct", "whole", "said"),
    [
        (
            *(40.0, 50.0, "120 ms"),
            "Without overlap it would take 120 ms (computed): overlap saves 20.0 (19.4\N{EN DASH}20.6) ms, "
            "16.7% (16.2\N{EN DASH}17.2) of that.",
        ),
        (
            *(10.0, -100.0, "90.0 ms"),
            "Overlap does not shorten it: contention, waiting and copies make it 10.0 (9.7\N{EN DASH}10.3) "
            "ms longer, 11.1% (10.8\N{EN DASH}11.4), than computing and communication take one after the "
            "other, 90.0 ms (computed).",
        ),
    ],
)
def test_a_step_without_overlap_is_that_under_no_sync_and_communication_by_itself(
    alone_ms, hidden_pct, whole, said
):
    """As figure 6 of the DDP paper: the measured step takes 100 ms, that under no_sync 80 ms."""
    hidden = {"hidden_pct": hidden_pct, "hidden_pct_low": hidden_pct - 1, "hidden_pct_high": hidden_pct + 1}
    row = communicating(2, 200.0) | measured(comm_ms=alone_ms) | hidden
    shown = figure([row])
    written = [text.get_text() for text in canvas_of(shown).axes[0].texts]
    assert f"DDP, 2 GPUs, cap default, without overlap: {whole}" in written
    assert said in shown.caption
    assert "is computed: the step under no_sync plus communication by itself" in shown.note


def test_figure_6_says_what_overlap_saves_in_percent_of_one_fit():
    """The share is 1 - measured / computed of the recorded medians; ends of parts would be further apart."""
    made = load_run(ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts")
    default = find_default([c for c in made.results if c.num_devices == 2])
    parts = [default.step_ms, default.get_interval("no_sync_step_ms"), default.comm_ms]
    measured_ms, *computed_ms = (part.estimate for part in parts)
    caption = draw_breakdown(group_workloads(made.results)[0], made.compared, made, key="k").caption
    found = re.search(r"overlap saves .* ms, (\d+)% \((\d+)\N{EN DASH}(\d+)\) of that\.", caption)
    share, low, high = map(float, found.groups())
    assert share == pytest.approx(100 * (1 - measured_ms / sum(computed_ms)), abs=0.6)
    assert low < share < high
    assert high - low < 8


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_pct_low": -10.0, "hidden_pct_high": 60.0},
        {"hidden_pct_low": math.nan, "hidden_pct_high": math.nan},
        {"exposed_comm_ms": 1.0, "exposed_comm_ms_low": -3.0, "exposed_comm_ms_high": 5.0},
    ],
    ids=["overlap unclear", "too few rounds", "below the noise"],
)
def test_no_cause_is_named_where_it_is_not_known_what_overlap_saves(more):
    caption = figure([communicating(2, 200.0) | more]).caption
    assert "Whether overlap saves time is not known in this run." in caption
    assert "ithout overlap" not in caption


def test_a_step_shows_no_emulated_dp_beside_ddp():
    rows = [
        case("dp", 2, 150.0, dp_apply_ms=25.0, dp_backward_ms=58.0, step_ms=90.0),
        communicating(2, 200.0),
    ]
    on_gpus, on_cores = (figure([row | {"device_type": kind} for row in rows]) for kind in ("cuda", "cpu"))
    assert labels(on_gpus)[0] == "DP, 2 GPUs"
    assert all(name.startswith("DDP, ") for name in labels(on_cores))


def test_parts_of_a_bar_too_narrow_for_a_unit_have_their_number():
    row = case(
        "single", 1, 100.0, **measured(forward_ms=86.0, optimizer_ms=14.0, backward_ms=100.0, step_ms=200.0)
    )
    assert {"86 ms", "100 ms", "14"} <= {text.get_text() for text in canvas_of(figure([row])).axes[0].texts}


def against_default(*bounds):
    caps = [case("ddp", 2, 180.0, bucket_cap_mb=str(cap)) for cap in range(1, 1 + len(bounds))]
    by = [
        Comparison(cap["case_id"], DDP["case_id"], Interval((low * high) ** 0.5, low, high), 0.05, 20)
        for cap, (low, high) in zip(caps, bounds, strict=True)
    ]
    return draw_against_default(group_workloads(run([SINGLE, DDP, *caps]).results)[0], by, key="k")


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ([(0.98, 1.02), (0.9, 1.04)], "no other cap is known to be faster or slower than DDP's default."),
        ([(1.01, 1.03), (0.97, 0.99)], "no other cap is known to be faster or slower than DDP's default."),
        (
            [(0.98, 1.02), (0.7, 0.72)],
            "no other cap is known to be faster than DDP's default. DDP, cap 2 MiB is",
        ),
        ([(1.1, 1.2), (0.7, 0.72)], "DDP, cap 1 MiB is 1.15"),
        ([(math.nan, math.nan)], "there are too few rounds to compare."),
    ],
)
def test_a_caption_names_a_cap_only_where_it_is_known_to_differ_and_the_axis_says_the_band(bounds, said):
    shown = against_default(*bounds)
    assert shown.caption.removeprefix("On 2 GPUs ").startswith(said)
    assert canvas_of(shown).axes[0].get_xlabel().endswith("\nshaded: within the margin of 5%")


def test_a_setting_that_is_faster_is_drawn_beside_the_default():
    faster = case("ddp", 2, 190.0, bucket_cap_mb="1")
    workload = group_workloads(run([SINGLE, DDP, faster]).results)[0]
    assert "DDP, cap 1 MiB" not in drawn(draw_scaling(workload, key="k"))
    found = draw_scaling(workload, {faster["case_id"], DDP["case_id"]}, key="k")
    assert [(mark.x, mark.y) for mark in drawn(found)["DDP, cap 1 MiB"]] == [(2, 1.9)]
    assert [mark.x for mark in drawn(found)["DDP"]] == [2]
    assert "DDP, cap 1 MiB 1.9" in found.caption


@pytest.mark.parametrize("missing", ["comm_ms", "no_sync_step_ms", "hidden_pct", "backward_ms"])
def test_a_step_without_overlap_is_not_drawn_where_a_part_of_it_was_not_measured(missing):
    shown = figure([communicating(2, 200.0) | {missing: None}, case("dp", 2, 150.0, dp_apply_ms=25.0)])
    assert "ithout overlap" not in " ".join([*labels(shown), shown.caption, shown.note])


@pytest.mark.parametrize(
    ("ratio", "reach", "ends"),
    [
        ((1.0, 0.55, 1e12), (0.55, 1.6), "|>"),  # clipped, else nobody sees the band
        ((1.0, 0.2, 4.21), (0.4, 1.6), "<>"),
        ((1.0, 0.9, 1.1), (0.8, 1.2), "||"),
        ((4.0, 3.5, 4.6), (0.8, 4.6), "||"),  # large, and known
    ],
)
def test_an_interval_that_tells_nothing_is_cut_off_and_the_band_stays_visible(ratio, reach, ends):
    drawn = [Ratio("DDP", "DDP", *ratio, "written", "ddp")]
    shown = draw_forest(drawn, (0.95, 1.05), x_label="x", note="", key="k", title="t", caption="c")
    (axes,) = canvas_of(shown).axes
    arrows = {line.get_marker(): line.get_xdata()[0] for line in axes.lines if line.get_marker() in "<>"}
    assert arrows == {arrow: at for arrow, at in zip(ends, reach, strict=True) if arrow != "|"}
    beside = 0.04 * (reach[1] - reach[0])
    assert axes.get_xlim() == pytest.approx((reach[0] - beside, reach[1] + beside))

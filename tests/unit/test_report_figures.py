"""Figures: what their marks, bars and tracks are, that every drawing is whole. Its words are recorded."""

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from report_runs import (
    canvas_of,
    case,
    communicating,
    drawn,
    measured,
    paper_like,
    run,
    timed,
    traced,
)
from sample_runs import EVERY_SAMPLE, sample

from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.build import render
from ddp_bench.report.cases import workloads
from ddp_bench.report.chart import Line, Mark, bare, chart
from ddp_bench.report.drawing import NAMES
from ddp_bench.report.figures import drift
from ddp_bench.report.page import page
from ddp_bench.report.step import REST, breakdown, step_bars
from ddp_bench.report.timeline import steps_of, whole


def test_shared_devices_are_drawn_hollow():
    one_and_two = [case("single", 1, 100.0), case("ddp", 2, 150.0)]
    hollow, full = (
        page(run([*one_and_two, case("ddp", 4, 150.0, oversubscribed=shared)])).figures[0].svg()
        for shared in (True, False)
    )
    assert "fill:var(--paper)" in hollow
    assert ">shared<" in hollow
    assert "var(--paper)" not in full
    assert ">shared<" not in full


def test_every_kind_of_drawing_is_well_formed_themed_and_the_same_each_time():
    one = page(paper_like())
    figures = (*one.figures, *one.more_figures)
    kinds = {"throughput", "buckets", "anatomy", "timeline", "forest"}
    assert kinds <= {figure.key.removeprefix("w1-") for figure in figures}
    drawings = [figure.svg() for figure in figures]
    for figure, drawing in zip(figures, drawings, strict=True):
        assert drawing == figure.svg()
        root = ET.fromstring(drawing)
        assert root.attrib["aria-label"] == figure.alt
        assert figure.caption in figure.alt
        ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
        assert all(name.startswith(f"{figure.key}-") for name in ids)
        assert set(re.findall(r"url\(#([^)]+)\)", drawing)) <= ids
    html = render(replace(one, figures=(), more_figures=())) + "".join(drawings)
    used = set(re.findall(r"var\(--([a-z-]+)\)", html))
    both = set(re.findall(r"--([a-z-]+): light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\);", html))
    assert {"exposed", "backward", "ddp"} <= used
    assert used | set(NAMES) <= both


@pytest.mark.parametrize(
    ("panels", "expected"),
    [
        (((100.0, 110.0),), " The vertical axis does not start at zero."),
        (((1.0, 10.0),), ""),
        (((-3.0, 10.0),), ""),
        (((100.0, 110.0), (200.0, 210.0)), " Vertical axes do not start at zero."),
        (((1.0, 10.0), (200.0, 210.0)), " Vertical axes do not start at zero in every panel."),
    ],
)
def test_an_axis_that_shows_zero_is_not_said_to_leave_it_out(panels, expected):
    """Oracle: the limits that matplotlib drew."""
    lines = {
        f"y{i}": [Line("s", "ddp", (Mark(1, Interval(low, low, high)), Mark(2, bare(high))))]
        for i, (low, high) in enumerate(panels)
    }
    words = {"key": "k", "title": "t", "caption": "c", "how_to_read": "h", "x_label": "x"}
    without, from_zero = (
        chart(**words, panels=lines, ticks={1: "1", 2: "2"}, from_zero=known) for known in (False, True)
    )
    assert (without.how_to_read, from_zero.how_to_read) == (f"h{expected}", "h")
    limits = [axes.get_ylim() for axes in canvas_of(without).axes]
    assert all(low <= 0 for low, _ in limits) == (expected == "")
    assert all(low >= 0 for (low, _), (least, _) in zip(limits, panels, strict=True) if least >= 0)


SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 180.0)


def paces(blocks):
    data = run([SINGLE, DP, DDP], timed_blocks=blocks)
    return drift(workloads(data.results)[0], data.times, key="k")


def test_round_that_was_broken_off_does_not_speak_for_all_cases_and_two_show_no_drift():
    blocks = [timed(row, r, 100.0) for row in (SINGLE, DP, DDP) for r in (1, 2, 3)]
    figure = paces([*blocks, timed(SINGLE, 4, 900.0)])
    ((_, lines),) = drawn(figure)
    assert [mark.x for mark in lines["median of 3 cases"]] == [1.0, 2.0, 3.0]
    assert lines["single, 1 GPU"][-1].y == pytest.approx(100 / 9)
    assert paces([timed(row, r, 100.0) for row in (SINGLE, DDP) for r in (1, 2)]) is None


def test_hundreds_of_rounds_are_still_a_small_drawing():
    blocks = [timed(row, r, 100.0 + r % 7) for row in (SINGLE, DP, DDP) for r in range(1, 301)]
    assert len(paces(blocks).svg()) < 40_000


def figure(cases, comparisons=()):
    return breakdown(workloads(run(cases).results)[0], comparisons, key="k")


def bars(cases):
    return step_bars(run(cases).results)


def parts_of(row):
    (bar,) = bars([row])
    return bar.parts


def written(shown):
    """Names and numbers of the bars."""
    return [text.get_text() for text in canvas_of(shown).axes[0].texts]


def labels(shown):
    return [text.split(": ")[0] for text in written(shown) if ": " in text]


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
    assert ("backward with communication" in figure([row]).how_to_read) == (exposed_ms is None)
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
    assert labels(shown) == [f"DDP, 2 GPUs, cap {cap}" for cap in ("default", "25 MiB", "1 MiB")]
    assert shown.caption.endswith("not known to differ: cap 5 MiB.")


DEFAULT = communicating(2, 200.0, num_buckets=2, bucket_bytes="1048576/3145728")


def tracks(cases, blocks):
    data = run(cases, timed_blocks=blocks)
    rank, found, _ = steps_of(data.results, data.blocks)
    return rank, *whole(found)


def step(row, ends, *, rank=0, round_index=1):
    """A traced block and one of the anatomy pass: the last gradient, and start and end of the last bucket."""
    ready, start, done = ends
    return [
        traced(row, round_index, rank, ready_ms=(10.0, ready)),
        traced(row, round_index, rank, start_ms=(11.0, start), done_ms=(20.0, done)),
    ]


def test_steps_are_of_the_rank_that_is_last_and_the_nearest_to_the_median():
    blocks = [
        b
        for i, end in enumerate((84.0, 85.0, 99.0))
        for b in step(DEFAULT, (65.0, 70.0, end), rank=1, round_index=i)
    ]
    blocks += [b for i in range(3) for b in step(DEFAULT, (60.0, 61.0, 80.0), round_index=i)]
    rank, (track,), why_not = tracks([DEFAULT], blocks)
    assert (rank, why_not) == (1, "")
    assert (track.title, track.sizes) == ("cap default", (2**20, 3 * 2**20))
    assert (track.ready, track.launch) == ((10.0, 65.0), (10.0, 65.0))
    assert (track.start, track.done) == ((11.0, 70.0), (20.0, 85.0))


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_without_its_gradients_or_its_all_reduces_is_not_drawn(which):
    other = communicating(2, 230.0, bucket_cap_mb="25", num_buckets=2)
    half, whole_step = [step(DEFAULT, (60.0, 61.0, 80.0))[which]], step(other, (60.0, 61.0, 80.0))
    _, found, why_not = tracks([DEFAULT], half)
    assert found == []
    assert "not both measured" in why_not
    _, found, why_not = tracks([DEFAULT, other], half + whole_step)
    assert [track.title for track in found] == ["cap 25 MiB, shortest step"]
    assert why_not == ""


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ((60.0, 59.0, 80.0), "do not fit together"),
        ((85.0, 86.0, 84.0), None),
        (
            (60.0, 61.0, 95.0),
            "cap default waits 35 ms in the few steps that were looked into",
        ),
    ],
)
def test_where_a_step_contradicts_none_is_drawn(ends, why):
    other = communicating(2, 230.0, bucket_cap_mb="25", num_buckets=2)
    blocks = step(DEFAULT, ends) + step(other, (60.0, 61.0, 80.0))
    _, found, why_not = tracks([DEFAULT, other], blocks)
    if why is None:  # an all-reduce that ends before it starts is not drawn
        assert [track.title for track in found] == ["cap 25 MiB, shortest step"]
        return
    assert found == []
    assert why in why_not
    run_ = page(run([DEFAULT, other], timed_blocks=blocks))
    assert run_.not_drawn == (why_not,)


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_no_sample_breaks_causality_or_contradicts_the_table_on_the_page(path):
    data = sample(path)
    _, found, _ = steps_of(data.results, data.blocks)
    for track in whole(found)[0]:
        assert track.is_causal
        assert track.agrees

"""Figures: what their marks are, and that every drawing is whole. What is written in them is recorded."""

import io
import re
from xml.etree import ElementTree as ET

import pytest
from PIL import Image
from report_runs import (
    Drawn,
    case,
    communicating,
    dashed,
    drawn,
    paper_like,
    run,
    timed,
    traced,
    usual_cases,
)

from ddp_bench.bench.results.aggregate import typical_of
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.build import render
from ddp_bench.report.cases import workloads
from ddp_bench.report.drawing import NAMES, Line, Mark, bare, chart
from ddp_bench.report.figures import dp_against_ddp, drift
from ddp_bench.report.page import page
from ddp_bench.report.timeline import one_step


def test_shared_devices_are_drawn_hollow():
    hollow, full = (
        page([run([case("single", 1, 100.0), case("ddp", 2, 150.0, oversubscribed=shared)])])
        .runs[0]
        .figures[0]
        .svg()
        for shared in (True, False)
    )
    assert "fill: var(--paper)" in hollow
    assert ">shared<" in hollow
    assert "var(--paper)" not in full
    assert ">shared<" not in full


def test_every_kind_of_drawing_is_well_formed_and_the_same_each_time():
    shown = page([paper_like()]).runs[0]
    figures = (*shown.figures, *shown.more_figures)
    keys = {figure.key.removeprefix("run1-1-") for figure in figures}
    assert {"throughput", "buckets", "anatomy", "timeline", "forest"} <= keys
    for figure in figures:
        drawing = figure.svg()
        assert drawing == figure.svg()
        root = ET.fromstring(drawing)
        assert root.attrib["aria-label"] == figure.alt
        assert figure.caption in figure.alt
        ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
        assert all(name.startswith(f"{figure.key}-") for name in ids)
        assert set(re.findall(r"url\(#([^)]+)\)", drawing)) <= ids


def test_every_colour_of_a_drawing_is_a_variable_of_the_page_in_both_schemes():
    html = render(page([paper_like()]))
    used = set(re.findall(r"var\(--([a-z-]+)\)", html))
    both = set(re.findall(r"--([a-z-]+): light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\);", html))
    assert {"exposed", "backward", "ddp"} <= used
    assert used | set(NAMES) <= both


def test_track_with_two_hundred_buckets_is_drawn_at_a_bounded_height():
    drawings = []
    for n in (20, 200):
        row = communicating(2, 200.0, num_buckets=n, bucket_bytes="/".join(["1048576"] * n))
        moments = [float(i) for i in range(n)]
        block = traced(row, 1, start_ms=moments, done_ms=[moment + 1.0 for moment in moments])
        data = run([row], timed_blocks=[block])
        figure, _ = one_step(workloads(data.cases)[0], data.blocks, key="k")
        drawings.append(ET.fromstring(figure.svg()))
    few, many = (float(drawing.attrib["viewBox"].split()[3]) for drawing in drawings)
    assert few == many
    assert 5 <= "".join(drawings[1].itertext()).count("1.00 MiB") <= 14


def test_slide_has_the_pages_light_colours_on_white_and_says_what_it_shows():
    figure = page([run(usual_cases())]).runs[0].figures[0]
    image = Image.open(io.BytesIO(figure.png()))
    assert image.width > 1500
    assert image.text["Description"] == figure.alt
    colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=1_000_000)}
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert {(0xB8, 0x4A, 0x00), (0x00, 0x72, 0xB2)} <= colours
    assert figure.png() == figure.png()


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
    limits = [axes.get_ylim() for axes in without.canvas().axes]
    assert all(low <= 0 for low, _ in limits) == (expected == "")
    assert all(low >= 0 for (low, _), (least, _) in zip(limits, panels, strict=True) if least >= 0)


SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 180.0)


def paces(blocks):
    data = run([SINGLE, DP, DDP], timed_blocks=blocks)
    return drift(workloads(data.cases)[0], data.times, key="k")


def test_round_that_was_broken_off_does_not_speak_for_all_cases():
    blocks = [timed(row, r, 100.0) for row in (SINGLE, DP, DDP) for r in (1, 2, 3)] + [
        timed(SINGLE, 4, 900.0)
    ]
    figure = paces(blocks)
    ((_, lines),) = drawn(figure)
    assert [mark.x for mark in lines["median of 3 cases"]] == [1.0, 2.0, 3.0]
    assert lines["single, 1 GPU"][-1].y == pytest.approx(100 / 9)


def test_two_rounds_show_no_drift():
    assert paces([timed(row, r, 100.0) for row in (SINGLE, DDP) for r in (1, 2)]) is None


def ratio(cases, blocks):
    data = run(cases, timed_blocks=blocks)
    return dp_against_ddp(workloads(data.cases)[0], typical_of(data.times), (), key="k")


def test_ratio_is_formed_inside_each_round_so_that_drift_cancels():
    # The machine slows threefold from round to round, and DDP takes 80% of DP's time in each of them.
    slowed = [(r, 100.0 * 3**r) for r in range(1, 7)]
    blocks = [timed(DP, r, ms) for r, ms in slowed] + [timed(DDP, r, 0.8 * ms) for r, ms in slowed]
    figure = ratio([SINGLE, DP, DDP], blocks)
    ((_, lines),) = drawn(figure)
    assert lines["DDP / DP"] == [Drawn(2.0, *[pytest.approx(1.25)] * 3)]
    assert lines["equally fast"] == [Drawn(1.0, 1.0), Drawn(2.0, 1.0)]
    assert figure.caption.startswith("Throughput of DDP over DP: 1.25")


def test_ratio_needs_both_modes_at_one_count_and_common_rounds():
    four = case("ddp", 4, 180.0)
    assert ratio([DP, four], [timed(DP, 1, 100.0), timed(four, 1, 90.0)]) is None
    assert ratio([DP, DDP], [timed(DP, 1, 100.0), timed(DDP, 2, 90.0)]) is None
    assert ratio([DP, DDP], []) is None


@pytest.mark.parametrize("turned", [False, True])
def test_the_ratio_has_the_interval_of_the_answer_and_no_other(*, turned):
    """The rounds by themselves give a narrower one; it would call faster what the answer leaves open."""
    blocks = [timed(DP, r, 100.0 + r) for r in range(6)] + [timed(DDP, r, 80.0 + r) for r in range(6)]
    data = run([SINGLE, DP, DDP], timed_blocks=blocks)
    answer = Interval(1.25, 0.9, 1.7)
    ids = (DP["case_id"], DDP["case_id"]) if turned else (DDP["case_id"], DP["case_id"])
    one = Comparison(*ids, answer.inverted() if turned else answer, 0.05, 6)
    typical = typical_of(data.times)
    alone, answered = (
        dp_against_ddp(workloads(data.cases)[0], typical, found, key="k") for found in ((), (one,))
    )
    assert alone is not None
    by_rounds, shown = (drawn(figure)[0][1]["DDP / DP"][0] for figure in (alone, answered))
    assert by_rounds.low is not None
    assert by_rounds.low > 1
    assert (shown.y, shown.low, shown.high) == pytest.approx((1.25, 0.9, 1.7))
    assert dashed("1.2 (0.9--1.7)") in answered.caption

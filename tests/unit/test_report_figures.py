import io
import re
from xml.etree import ElementTree as ET

import pytest
from PIL import Image
from report_runs import case, communicating, figure_of, paper_like, run, traced, usual_cases

from ddp_bench.bench.stats import Interval
from ddp_bench.report.build import render
from ddp_bench.report.cases import workloads
from ddp_bench.report.drawing import NAMES, Line, Mark, bare, chart
from ddp_bench.report.page import page
from ddp_bench.report.step import LOOKS, one_step


def test_drawing_is_named_themed_and_well_formed():
    figure = page([run(usual_cases())]).runs[0].figures[0]
    drawing = figure.svg()
    root = ET.fromstring(drawing)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == figure.alt
    assert {"viewBox"} <= set(root.attrib)
    assert {"width", "height"}.isdisjoint(root.attrib)
    assert "DDP" in "".join(root.itertext())
    assert "var(--ddp)" in drawing
    assert "#0" not in drawing.replace(f"#{figure.key}", "")


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


def test_areas_are_told_by_more_than_colour():
    assert len(set(LOOKS.values())) == len(LOOKS)
    drawing = figure_of(page([paper_like()]).runs[0], "Where a step goes").svg()
    assert "<pattern" in drawing
    written = "".join(ET.fromstring(drawing).itertext())
    assert "DDP, 2 GPUs, cap default: 100" in written
    assert all(part in written for part in ("forward", "backward", "exposed communication", "optimizer"))


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
        figure = one_step(workloads(data.cases)[0], data.blocks, key="k")
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

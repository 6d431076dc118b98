from __future__ import annotations

import io
import math
import re
from xml.etree import ElementTree as ET

import pytest
from PIL import Image
from report_runs import case, paper_like, run, usual_cases

from ddp_bench.bench.stats import Interval
from ddp_bench.report.build import render
from ddp_bench.report.draw.chart import draw_chart
from ddp_bench.report.draw.figures import png, svg
from ddp_bench.report.draw.palette import NAMES, PARTS
from ddp_bench.report.drawings import (
    Bars,
    Bucket,
    Chart,
    Forest,
    Panel,
    Point,
    Series,
    Tick,
    Timeline,
    Track,
)
from ddp_bench.report.view import page


def test_drawing_is_named_themed_and_well_formed() -> None:
    figure = page([run(usual_cases())]).runs[0].figures[0]
    drawing = svg(figure)
    root = ET.fromstring(drawing)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == figure.alt
    assert {"viewBox"} <= set(root.attrib)
    assert {"width", "height"}.isdisjoint(root.attrib)
    assert "DDP" in "".join(root.itertext())
    assert "var(--ddp)" in drawing
    assert "#0" not in drawing.replace(f"#{figure.key}", "")


def test_shared_devices_are_drawn_hollow() -> None:
    hollow, full = (
        svg(
            page([run([case("single", 1, 100.0), case("ddp", 2, 150.0, oversubscribed=shared)])])
            .runs[0]
            .figures[0]
        )
        for shared in (True, False)
    )
    assert "fill: var(--paper)" in hollow
    assert ">shared<" in hollow
    assert "var(--paper)" not in full
    assert ">shared<" not in full


def test_every_kind_of_drawing_is_well_formed_and_the_same_each_time() -> None:
    shown = page([paper_like()]).runs[0]
    figures = (*shown.figures, *shown.more_figures)
    assert {type(figure) for figure in figures} == {Chart, Bars, Timeline, Forest}
    for figure in figures:
        drawing = svg(figure)
        assert drawing == svg(figure)
        root = ET.fromstring(drawing)
        assert root.attrib["aria-label"] == figure.alt
        assert figure.caption in figure.alt
        ids = {e.attrib["id"] for e in root.iter() if "id" in e.attrib}
        assert all(name.startswith(f"{figure.key}-") for name in ids)
        assert set(re.findall(r"url\(#([^)]+)\)", drawing)) <= ids


def test_areas_are_told_by_more_than_colour() -> None:
    looks = [(fill.colour, fill.hatch) for fill in PARTS.values()]
    assert len(set(looks)) == len(looks)
    shown = page([paper_like()]).runs[0]
    bars = next(figure for figure in shown.figures if isinstance(figure, Bars))
    drawing = svg(bars)
    assert "<pattern" in drawing
    written = "".join(ET.fromstring(drawing).itertext())
    for bar in bars.bars:
        assert bar.label in written
        assert all(part.label in written for part in bar.parts)


def test_every_colour_of_a_drawing_is_a_variable_of_the_page_in_both_schemes() -> None:
    html = render(page([paper_like()]))
    used = set(re.findall(r"var\(--([a-z-]+)\)", html))
    both = set(re.findall(r"--([a-z-]+): light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\);", html))
    assert {"exposed", "backward", "ddp"} <= used
    assert used | set(NAMES) <= both


def test_track_with_two_hundred_buckets_is_drawn_at_a_bounded_height() -> None:
    end = Interval(20.0, math.nan, math.nan)
    few, many = (
        Timeline(
            key="k",
            title="t",
            caption="c",
            how_to_read="h",
            tracks=(Track("a", tuple(Bucket("1 MiB", i, i, i, i + 1.0) for i in range(n)), end, end),),
        )
        for n in (20, 200)
    )
    heights = [float(ET.fromstring(svg(f)).attrib["viewBox"].split()[3]) for f in (few, many)]
    assert heights[0] == heights[1]
    labels = "".join(ET.fromstring(svg(many)).itertext())
    assert 5 <= labels.count("1 MiB") <= 14


def test_slide_has_the_pages_light_colours_on_white_and_says_what_it_shows() -> None:
    figure = page([run(usual_cases())]).runs[0].figures[0]
    image = Image.open(io.BytesIO(png(figure)))
    assert image.width > 1500
    assert image.text["Description"] == figure.alt
    colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=1_000_000)}
    assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert {(0xB8, 0x4A, 0x00), (0x00, 0x72, 0xB2)} <= colours
    assert png(figure) == png(figure)


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
def test_an_axis_that_shows_zero_is_not_said_to_leave_it_out(
    panels: tuple[tuple[float, float], ...], expected: str
) -> None:
    """Oracle: the limits that matplotlib drew."""
    drawn = tuple(
        Panel("", (Series("s", "ddp", (Point(1, low, low, high), Point(2, high))),)) for low, high in panels
    )
    words = {"key": "k", "title": "t", "caption": "c", "how_to_read": "h", "x_label": "x", "y_label": "y"}
    ticks = (Tick(1, "1"), Tick(2, "2"))
    figure = Chart(**words, ticks=ticks, panels=drawn, from_zero=False)  # type: ignore[arg-type]
    assert figure.axis_note == expected
    limits = [axes.get_ylim() for axes in draw_chart(figure).axes]
    assert all(low <= 0 for low, _ in limits) == (expected == "")
    assert all(low >= 0 for (low, _), (least, _) in zip(limits, panels, strict=True) if least >= 0)
    assert Chart(**words, ticks=ticks, panels=drawn).axis_note == ""  # type: ignore[arg-type]


def test_the_page_says_it_below_the_figure() -> None:
    made = run([case("single", 1, 100.0), case("ddp", 2, 150.0), case("ddp", 2, 151.0, bucket_cap_mb="1")])
    figures = page([made]).runs[0].figures + page([made]).runs[0].more_figures
    noted = [figure for figure in figures if figure.axis_note]
    assert noted
    html = render(page([made]))
    for figure in noted:
        assert figure.axis_note in html

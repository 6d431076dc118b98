"""Writes figures as SVG, coloured by the page's style sheet, or as PNG; equal figures give equal bytes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from ddp_bench.report.draw.chart import draw_chart
from ddp_bench.report.draw.durations import draw_bars, draw_timeline
from ddp_bench.report.draw.forest import draw_forest
from ddp_bench.report.draw.palette import PAPER, RC, light, printable, stand_ins, themed, tip_of
from ddp_bench.report.drawings import Bars, Chart, Drawing, Forest

_SLIDE_DPI = 300
_MARGIN: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.15}
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


def svg(figure: Drawing) -> str:
    """Return the figure as one `<svg>` element for an HTML page, named by its alt text."""
    raw = io.StringIO()
    with _look(stand_ins(), figure.key):
        _draw(figure).savefig(raw, format="svg", metadata={"Date": None})
    return _inline(raw.getvalue(), figure)


def png(figure: Drawing) -> bytes:
    """Return the figure for a slide: in the page's light colours on white, its alt text in the metadata."""
    style_sheet = (Path(__file__).parents[1] / "templates" / "report.css").read_text(encoding="utf-8")
    words = {"Title": printable(figure.title), "Description": printable(figure.alt), "Software": None}
    raw = io.BytesIO()
    with _look(light(style_sheet), figure.key):
        _draw(figure).savefig(raw, format="png", dpi=_SLIDE_DPI, facecolor=PAPER, metadata=words, **_MARGIN)
    return raw.getvalue()


@contextmanager
def _look(colours: Any, salt: str) -> Iterator[None]:
    """Set Matplotlib's defaults and our own look, whatever the user has configured."""
    with mpl.rc_context(), warnings.catch_warnings():
        # Browsers have their own fonts: a glyph that matplotlib's font lacks is no reason to complain.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.* missing from")
        mpl.rcdefaults()
        # The cycle first: the other settings name its colours.
        mpl.rcParams["axes.prop_cycle"] = colours
        mpl.rcParams.update(RC)
        mpl.rcParams["svg.hashsalt"] = salt
        yield


def _draw(figure: Drawing) -> Canvas:
    if isinstance(figure, Chart):
        return draw_chart(figure)
    if isinstance(figure, Bars):
        return draw_bars(figure)
    if isinstance(figure, Forest):
        return draw_forest(figure)
    return draw_timeline(figure)


def _inline(raw: str, figure: Drawing) -> str:
    """Turn Matplotlib's document into an element of a page: scalable, themed, with ids of its own."""
    root = ET.fromstring(raw)  # noqa: S314 - written by matplotlib a moment ago, not by a stranger
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag in {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        _paint_in_style(element)
        _add_tip(element)
        for name, value in list(element.attrib.items()):
            if name == _HREF:
                element.attrib.pop(name)
                element.set("href", f"#{figure.key}-{value.removeprefix('#')}")
            elif name == "clip-path":
                element.set(name, value.replace("#", f"#{figure.key}-"))
            elif name == "style":
                element.set(name, themed(value).replace("url(#", f"url(#{figure.key}-"))
            elif name == "id":
                element.set(name, f"{figure.key}-{value}")
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", figure.alt)
    return ET.tostring(root, encoding="unicode")


def _add_tip(element: ET.Element) -> None:
    """Let who points at a mark read what it is."""
    words = tip_of(element.get("id", ""))
    if words is None:
        return
    element.attrib.pop("id")
    element.set("class", "tip")
    title = ET.Element("title")
    title.text = words
    element.insert(0, title)


def _paint_in_style(element: ET.Element) -> None:
    """Move the paint of hatches from attributes into the style, where the page's variables apply."""
    paint = [f"{name}: {element.attrib.pop(name)}" for name in ("fill", "stroke") if name in element.attrib]
    if paint:
        element.set("style", "; ".join([*paint, element.get("style", "")]))

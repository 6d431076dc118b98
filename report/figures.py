"""Figures of the view model as inline SVG: deterministic bytes, colours left to the page's style sheet."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from report.model import Figure, Panel, Point, Series

# Matplotlib needs colours it can parse; the page swaps these for variables, so that one drawing serves light,
# dark and print. None is pure black, which matplotlib leaves out of the SVG.
_INK, _MUTED, _GRID, _PAPER, _DP, _DDP = (f"#0{i}0{i}0{i}" for i in range(1, 7))
_VARIABLES = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--grid)",
    _PAPER: "var(--paper)",
    _DP: "var(--dp)",
    _DDP: "var(--ddp)",
}
_STYLES: dict[str, dict[str, Any]] = {
    "single": {"color": _INK, "marker": "D", "linestyle": "-", "markersize": 5},
    "dp": {"color": _DP, "marker": "^", "linestyle": (0, (5, 2)), "markersize": 5.5},
    "ddp": {"color": _DDP, "marker": "o", "linestyle": "-", "markersize": 5.5},
    "ideal": {"color": _MUTED, "marker": "", "linestyle": (0, (1, 2)), "markersize": 0},
}
_RC: Any = {
    "axes.edgecolor": _MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _INK,
    "axes.labelsize": 11,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _INK,
    "axes.titlesize": 11,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.facecolor": "none",
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "legend.borderaxespad": 0,
    "legend.borderpad": 0.1,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "svg.fonttype": "none",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "xtick.labelsize": 11,
    "ytick.color": _MUTED,
    "ytick.labelcolor": _INK,
    "ytick.labelsize": 11,
    "ytick.major.size": 0,
}
_WIDTH_PT = 400
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


def svg(figure: Figure) -> str:
    """The figure as one `<svg>` element for an HTML page, named by its alt text."""
    with mpl.rc_context(), warnings.catch_warnings():
        # Browsers have their own fonts: a glyph that matplotlib's font lacks is no reason to complain.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.* missing from")
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        mpl.rcParams["svg.hashsalt"] = figure.key
        raw = io.StringIO()
        _draw(figure).savefig(raw, format="svg", metadata={"Date": None})
    return _inline(raw.getvalue(), figure)


def _draw(figure: Figure) -> Canvas:
    height_pt = 285 if len(figure.panels) == 1 else 50 + 125 * len(figure.panels)
    canvas = Canvas(figsize=(_WIDTH_PT / 72, height_pt / 72), layout="constrained")
    rows = canvas.subplots(len(figure.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, figure.panels, strict=True):
        _draw_panel(axes, panel, figure)
    rows[-1].set_xlabel(_printable(figure.x_label))
    handles = _legend([s for panel in figure.panels for s in panel.series])
    if len(handles) > 1:
        canvas.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=2.4, columnspacing=1.4)
    return canvas


def _draw_panel(axes: Any, panel: Panel, figure: Figure) -> None:
    title = f"{panel.title}: {figure.y_label}" if panel.title else figure.y_label
    axes.set_title(_printable(title), loc="left", pad=8)
    _scale_x(axes, figure)
    _scale_y(axes, panel, figure)
    measured = [s for s in panel.series if s.style != "ideal"]
    for series in panel.series:
        # Marks of different modes at one device count stand side by side, not on top of each other.
        place = measured.index(series) - (len(measured) - 1) / 2 if series in measured else 0.0
        _draw_series(axes, series, dodge_pt=5 * place)


def _draw_series(axes: Any, series: Series, *, dodge_pt: float) -> None:
    style = _STYLES[series.style]
    shift = ScaledTranslation(dodge_pt / 72, 0, axes.figure.dpi_scale_trans)
    where = axes.transData + shift
    if series.joined:
        line = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.5}
        axes.plot([p.x for p in series.points], [p.y for p in series.points], transform=where, **line)
    for point in series.points:
        if point.low is not None and point.high is not None:
            bar = {"color": style["color"], "transform": where, "markersize": 7, "linewidth": 1.3}
            axes.plot([point.x] * 2, [point.low, point.high], marker="_", **bar)
        axes.plot([point.x], [point.y], transform=where, **_mark(style, hollow=point.hollow))
        if point.note:
            beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(_printable(point.note), (point.x, point.y), color=_MUTED, fontsize=11, **beside)


def _mark(style: dict[str, Any], *, hollow: bool) -> dict[str, Any]:
    return {
        "linestyle": "",
        "marker": style["marker"],
        "markersize": style["markersize"],
        "markeredgecolor": style["color"],
        "markeredgewidth": 1.5,
        "markerfacecolor": _PAPER if hollow else style["color"],
        "zorder": 3,
    }


def _scale_x(axes: Any, figure: Figure) -> None:
    places = [tick.x for tick in figure.ticks]
    low, high = min(places), max(places)
    if figure.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.35, high * 1.35)
    else:
        pad = 0.1 * (high - low) or 0.5
        axes.set_xlim(low - pad, high + pad)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    labels = {tick.x: _printable(tick.label) for tick in figure.ticks}
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(x, "")))


def _scale_y(axes: Any, panel: Panel, figure: Figure) -> None:
    seen = [y for p in _points(panel.series) for y in (p.y, p.low, p.high) if y is not None]
    low, high = min(seen), max(seen)
    if figure.log_y:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        pad = 0.2 * (high - low) or 0.05 * high
        axes.set_ylim(*((0, 1.08 * high) if figure.from_zero else (low - pad, high + pad)))
        axes.yaxis.set_major_locator(
            MaxNLocator(nbins=5 if figure.from_zero else 4, steps=[1, 2, 2.5, 5, 10])
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def _legend(series: Sequence[Series]) -> list[Line2D]:
    kinds = {s.label: s for s in series}
    handles = [_handle(s.label, s.style, joined=s.joined) for s in kinds.values()]
    if any(p.hollow for p in _points(series)):
        handles.append(
            Line2D([], [], label="hollow: shared", **_mark(_STYLES["ddp"] | {"color": _MUTED}, hollow=True))
        )
    return handles


def _handle(label: str, style: str, *, joined: bool) -> Line2D:
    look = _STYLES[style]
    line = {"linestyle": look["linestyle"] if joined else "", "color": look["color"], "linewidth": 1.5}
    return Line2D(
        [], [], label=_printable(label), marker=look["marker"], markersize=look["markersize"], **line
    )


def _points(series: Sequence[Series]) -> list[Point]:
    return [point for s in series for point in s.points]


def _printable(text: str) -> str:
    """Text as a drawing can hold it: XML has no way to write control characters."""
    return "".join(c for c in text if c.isprintable())


def _inline(raw: str, figure: Figure) -> str:
    """Matplotlib's document as an element of a page: scalable, themed, ids its own, with a label."""
    root = ET.fromstring(raw)  # noqa: S314 - written by matplotlib a moment ago, not by a stranger
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag in {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        for name, value in list(element.attrib.items()):
            if name == _HREF:
                element.attrib.pop(name)
                element.set("href", f"#{figure.key}-{value.removeprefix('#')}")
            elif name == "clip-path":
                element.set(name, value.replace("#", f"#{figure.key}-"))
            elif name == "style":
                element.set(name, _themed(value))
            elif name == "id":
                element.set(name, f"{figure.key}-{value}")
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", figure.alt)
    return ET.tostring(root, encoding="unicode")


def _themed(style: str) -> str:
    for colour, variable in _VARIABLES.items():
        style = style.replace(colour, variable)
    return style

"""How figures look, how marks with intervals are drawn, and how a figure becomes SVG or PNG.

Each colour is a variable of the page, so that one drawing serves light, dark and print; none stands alone.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ..bench.stats.interval import Interval

WIDTH_PT = 400
"""Width of every figure, for which the sizes of its text and marks are chosen."""

MOST_RUNS = 8
"""Lines of one kind that one drawing can tell apart by mark, line and colour."""

NAMES = (
    *("ink", "muted", "grid", "paper", "dp", "ddp", "other"),
    *("data", "forward", "backward", "exposed", "optimizer", "move", "rest"),
)
"""The page's variables, in the order of the colours that a drawing names `C0`, `C1`, …"""

# Matplotlib needs colours it can parse; the page swaps these for variables. None is pure black, which
# matplotlib leaves out of the SVG.
_STAND_INS = {name: f"#{i:02x}{i:02x}{i:02x}" for i, name in enumerate(NAMES, start=1)}
COLOURS = {name: f"C{i}" for i, name in enumerate(NAMES)}
INK, MUTED, GRID, PAPER = (COLOURS[name] for name in NAMES[:4])

_DASHED, _DOTTED, _DASH_DOT = (0, (5, 2)), (0, (1, 2)), (0, (6, 2, 1, 2))


def _look(colour: str, marker: str, line: Any, size: float = 5.5) -> dict[str, Any]:
    return {"color": COLOURS[colour], "marker": marker, "linestyle": line, "markersize": size}


LOOKS: dict[str, dict[str, Any]] = {
    "single": _look("ink", "D", "-", 5),
    "dp": _look("dp", "^", _DASHED),
    "ddp": _look("ddp", "o", "-"),
    "other": _look("other", "s", _DASH_DOT, 5),
    "ideal": _look("muted", "", _DOTTED, 0),
    "run1": _look("ddp", "o", "-"),
    "run2": _look("dp", "^", _DASHED),
    "run3": _look("other", "s", _DASH_DOT),
    "run4": _look("ink", "D", (0, (2, 1.5))),
    "run5": _look("ddp", "v", (0, (8, 2))),
    "run6": _look("dp", "P", (0, (4, 1, 1, 1, 1, 1))),
    "run7": _look("other", "X", (0, (1, 1))),
    "run8": _look("ink", "*", (0, (10, 3))),
}
"""Lines and marks by what they stand for."""

_RC: Any = {
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("font.size", "axes.titlesize"), 11),
    **dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "svg.fonttype"), "none"),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.8,
    "ytick.major.size": 0,
    "legend.borderaxespad": 0,
    "legend.borderpad": 0.1,
    "legend.columnspacing": 1.3,
    "figure.constrained_layout.h_pad": 0.08,
    "text.parse_math": False,
}

_TAG, _KEY, _APART = "tag:", "key:", "\N{INVISIBLE SEPARATOR}"
"""What the id of a drawn thing begins with that has words or a series, that of a legend's entry; and what
parts both: no printable text holds it."""

_CHARACTERS_OF_THREE = 42
"""Of three names that fit into one row of a legend."""


@dataclass(frozen=True)
class Figure:
    """A figure and the words around it; `key` is unique on the page.

    `draw` fills an empty canvas of `height_pt` points. `axes` says to a reader who cannot see the figure what
    it draws, before its finding; without them its title does.
    """

    key: str
    title: str
    caption: str
    how_to_read: str
    height_pt: float
    draw: Callable[[Canvas], None]
    axes: str = ""

    @property
    def alt(self) -> str:
        """Say what the figure shows, then its finding."""
        return f"{self.axes or self.title}. {self.caption}"

    def canvas(self) -> Canvas:
        """Draw the figure in the colours that the page's style sheet takes the place of."""
        with _style(_STAND_INS.values(), self.key):
            return self._drawn()

    def svg(self) -> str:
        """Return the figure as one `<svg>` element for an HTML page; equal figures give equal bytes."""
        raw = io.StringIO()
        with _style(_STAND_INS.values(), self.key):
            self._drawn().savefig(raw, format="svg", metadata={"Date": None})
        return _inline(raw.getvalue(), self)

    def png(self) -> bytes:
        """Return the figure for a slide: in the page's light colours on white."""
        sheet = (Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
        light = dict(re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}),", sheet))
        words = {"Title": printable(self.title), "Description": printable(self.alt), "Software": None}
        raw = io.BytesIO()
        with _style([light[name] for name in NAMES], self.key):
            self._drawn().savefig(
                raw, format="png", dpi=300, facecolor=PAPER, metadata=words, bbox_inches="tight",
                pad_inches=0.15,
            )  # fmt: skip
        return raw.getvalue()

    def _drawn(self) -> Canvas:
        canvas = Canvas(figsize=(WIDTH_PT / 72, self.height_pt / 72), layout="constrained")
        self.draw(canvas)
        return canvas


@contextmanager
def _style(colours: Any, salt: str) -> Iterator[None]:
    """Set Matplotlib's defaults and our own look, whatever the user has configured."""
    with mpl.rc_context(), warnings.catch_warnings():
        # Browsers have their own fonts: a glyph that matplotlib's font lacks is no reason to complain.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.* missing from")
        mpl.rcdefaults()
        # The cycle first: the other settings name its colours.
        mpl.rcParams["axes.prop_cycle"] = cycler(color=list(colours))
        mpl.rcParams.update(_RC | {"svg.hashsalt": salt})
        yield


def _inline(raw: str, figure: Figure) -> str:
    """Turn Matplotlib's document into an element of a page: scalable, themed, with ids of its own."""
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(raw)  # noqa: S314 - written by matplotlib a moment ago, not by a stranger
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag in {f"{svg}metadata", f"{svg}style"}]:
            parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(svg)
        _adapt(element, figure.key)
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": figure.alt}
    return ET.tostring(root, encoding="unicode")


def _adapt(element: ET.Element, key: str) -> None:
    """Give an element the page's colours, names of its own figure, and its words to who points at it."""
    href, own = "{http://www.w3.org/1999/xlink}href", element.attrib
    # The paint of hatches stands in attributes, where the page's variables do not apply.
    paint = [f"{name}: {own.pop(name)}" for name in ("fill", "stroke") if name in own]
    if style := "; ".join([*paint, *filter(None, [own.pop("style", "")])]):
        for name, colour in _STAND_INS.items():
            style = style.replace(colour, f"var(--{name})")
        own["style"] = style.replace("url(#", f"url(#{key}-")
    if href in own:
        own["href"] = f"#{key}-{own.pop(href).removeprefix('#')}"
    if "clip-path" in own:
        own["clip-path"] = own["clip-path"].replace("#", f"#{key}-")
    name = own.get("id", "")
    if name.startswith(_KEY):
        own["data-key"] = own.pop("id").removeprefix(_KEY)
    elif name.startswith(_TAG):
        words, _, series = own.pop("id").removeprefix(_TAG).partition(_APART)
        own |= {"data-series": series} if series else {}
        if words:
            own["class"] = "tip"
            title = ET.Element("title")
            title.text = words
            element.insert(0, title)
    elif name:
        own["id"] = f"{key}-{name}"


def printable(text: str) -> str:
    """Drop characters that a drawing cannot hold: XML has no way to write control characters."""
    return "".join(c for c in text if c.isprintable())


def tag(words: str = "", series: str = "") -> str:
    """Return the id of a drawn thing: what the page says to who points at it, and its entry in the legend."""
    return f"{_TAG}{printable(words)}{_APART}{printable(series)}"


class Mark(NamedTuple):
    """A value at a place, hollow on shared devices; `tip` is shown to who points at it, `note` beside it."""

    x: float
    value: Interval
    hollow: bool = False
    tip: str = ""
    note: str = ""


class Line(NamedTuple):
    """Marks of one kind, in one of `LOOKS`; `band` draws their intervals as an area along the line."""

    label: str
    look: str
    marks: tuple[Mark, ...]
    joined: bool = True
    band: bool = False


def ideal(label: str, places: Mapping[float, float]) -> Line:
    """Make a dotted line to compare with."""
    return Line(label, "ideal", tuple(Mark(x, bare(y)) for x, y in sorted(places.items())))


def bare(value: float) -> Interval:
    """Take a number whose interval is not known."""
    return Interval(value, math.nan, math.nan)


def chart(  # noqa: PLR0913 - by name, as matplotlib's
    *,
    key: str,
    title: str,
    panels: Mapping[str, Sequence[Line]],
    x_label: str,
    ticks: Mapping[float, str],
    caption: str,
    how_to_read: str,
    from_zero: bool = True,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Draw lines over the places of `ticks`, in panels one below the other by the name of what they show."""
    ranges = [_limits(lines, from_zero=from_zero, log=log_y) for lines in panels.values()]
    marks = [mark for lines in panels.values() for line in lines for mark in line.marks]

    def draw(canvas: Canvas) -> None:
        rows = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, lines), limits in zip(rows, panels.items(), ranges, strict=True):
            axes.set_title(printable(name), pad=8)
            _place_axis(axes, ticks, log=log_x)
            _value_axis(axes, *limits, log=log_y, nbins=5 if from_zero else 4)
            _draw_lines(axes, lines)
        rows[-1].set_xlabel(printable(x_label))
        _legend(canvas, [line for lines in panels.values() for line in lines])

    return Figure(
        key=key,
        title=title,
        caption=caption,
        how_to_read=how_to_read
        + (" Hollow marks: shared cores or GPUs." if any(m.hollow for m in marks) else "")
        + ("" if log_y else _not_from_zero(ranges)),
        height_pt=285 if len(panels) == 1 else 50 + 125 * len(panels),
        draw=draw,
        axes=f"{next(iter(panels))} against {x_label}",
    )


def _limits(lines: Sequence[Line], *, from_zero: bool, log: bool) -> tuple[float, float]:
    """Find the ends of a vertical axis; never below zero where nothing drawn is."""
    values = [mark.value for line in lines for mark in line.marks]
    seen = [end for v in values for end in (v.estimate, v.low, v.high) if math.isfinite(end)]
    low, high = min(seen), max(seen)
    if log:
        return low / 1.3, high * 1.3
    if from_zero:
        return 0.0, 1.08 * high
    pad = 0.2 * (high - low) or 0.05 * high
    return (max(low - pad, 0.0) if low >= 0 else low - pad), high + pad


def _not_from_zero(ranges: Sequence[tuple[float, float]]) -> str:
    """Warn of vertical axes that leave out zero, as they are drawn."""
    without = [low > 0 or high < 0 for low, high in ranges]
    if not any(without):
        return ""
    axes = "The vertical axis does" if len(without) == 1 else "Vertical axes do"
    return f" {axes} not start at zero{'' if all(without) else ' in every panel'}."


def _draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Draw marks with their intervals; those of several lines at one place stand side by side."""
    beside = [line for line in lines if line.look != "ideal" and not line.band]
    for line in lines:
        look = LOOKS[line.look]
        dodge = beside.index(line) - (len(beside) - 1) / 2 if line in beside else 0.0
        where = axes.transData + ScaledTranslation(5 * dodge / 72, 0, axes.figure.dpi_scale_trans)
        stroke = {"color": look["color"], "transform": where}
        if line.joined:
            # Shared devices tell nothing of scaling: no line leads to them, unless there are no others.
            own = [mark for mark in line.marks if not mark.hollow] or line.marks
            at, values = [mark.x for mark in own], [mark.value.estimate for mark in own]
            drawn = {"linestyle": look["linestyle"], "linewidth": 1.5, "label": line.label}
            axes.plot(at, values, gid=tag(series=line.label), **drawn, **stroke)
        if line.band:
            areas = [(mark.x, mark.value.low, mark.value.high) for mark in line.marks]
            how = {"color": look["color"], "alpha": 0.18, "linewidth": 0, "gid": tag(series=line.label)}
            axes.fill_between(*zip(*areas, strict=True), **how)
        for mark in line.marks if look["marker"] else ():
            named = {"gid": tag(mark.tip, line.label)}
            if not line.band and math.isfinite(mark.value.low):
                bar = {"marker": "_", "markersize": 7, "linewidth": 1.3, **stroke, **named}
                axes.plot([mark.x] * 2, [mark.value.low, mark.value.high], **bar)
            drawn = mark_look(line.look, hollow=mark.hollow)
            axes.plot([mark.x], [mark.value.estimate], label=line.label, transform=where, **drawn, **named)
            if mark.note:
                beside_it = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
                where_it_is = (mark.x, mark.value.estimate)
                axes.annotate(printable(mark.note), where_it_is, color=MUTED, **named, **beside_it)


def mark_look(look: str, *, hollow: bool) -> dict[str, Any]:
    """Return how a single mark is drawn."""
    found = LOOKS[look]
    return {
        "linestyle": "",
        "marker": found["marker"],
        "markersize": found["markersize"],
        "markeredgecolor": found["color"],
        "markeredgewidth": 1.5,
        "markerfacecolor": PAPER if hollow else found["color"],
        "zorder": 3,
    }


def _place_axis(axes: Any, ticks: Mapping[float, str], *, log: bool) -> None:
    low, high = min(ticks), max(ticks)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.35, high * 1.35)
    else:
        pad = 0.1 * (high - low) or 0.5
        axes.set_xlim(low - pad, high + pad)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    labels = {x: "\n".join(map(printable, label.split("\n"))) for x, label in ticks.items()}
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(x, "")))


def _value_axis(axes: Any, low: float, high: float, *, log: bool, nbins: int) -> None:
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 85 * low else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=nbins, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))


def time_axis(axes: Any, label: str) -> None:
    """Draw durations to the right, with a grid to read them by and no other."""
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.set_xlabel(label)


def _legend(canvas: Canvas, lines: Sequence[Line]) -> None:
    handles = []
    for line in {line.label: line for line in lines}.values():
        look = LOOKS[line.look] | ({} if line.joined else {"linestyle": ""})
        handles.append(Line2D([], [], label=printable(line.label), linewidth=1.5, **look))
    if any(mark.hollow for line in lines for mark in line.marks):
        hollow = mark_look("ddp", hollow=True) | {"markeredgecolor": MUTED}
        handles.append(Line2D([], [], label="hollow: shared", **hollow))
    if len(handles) < 2:
        return
    longest = sorted((len(str(handle.get_label())) for handle in handles), reverse=True)[:3]
    columns = 3 if sum(longest) <= _CHARACTERS_OF_THREE and len(handles) != 4 else 2
    legend(canvas, handles, columns, handlelength=2.4)


def legend(canvas: Canvas, handles: Sequence[Any], columns: int, **how: Any) -> None:
    """Draw a legend above all, whose entries the page can tell."""
    made = canvas.legend(handles=handles, loc="outside upper left", ncols=columns, **how)
    for words, handle in zip(made.get_texts(), made.legend_handles, strict=True):
        for one in filter(None, (words, handle)):
            one.set_gid(f"{_KEY}{words.get_text()}")

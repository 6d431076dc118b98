"""Figures' looks, and Matplotlib's SVG as an element of a page: themed, small, with tips.

Each colour is a variable of the page, so that one drawing serves light, dark and print; none stands alone.
Matplotlib takes a second to import: only what draws does.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree as ET

from .page import Figure

WIDTH_PT = 400
"""Width of every figure, for which the sizes of its text and marks are chosen."""

NAMES = (
    *("ink", "muted", "grid", "paper", "dp", "ddp", "other"),
    *("data", "forward", "backward", "exposed", "optimizer", "move", "rest"),
)
"""The page's variables for colours."""

# Matplotlib needs colours it can parse; the page swaps these for variables. None is pure black, which
# matplotlib leaves out of the SVG.
COLOURS = {name: f"#{i:02x}{i:02x}{i:02x}" for i, name in enumerate(NAMES, start=1)}
INK, MUTED, GRID, PAPER = (COLOURS[name] for name in NAMES[:4])

_DASHED, _DOTTED, _DASH_DOT = (0, (5, 2)), (0, (1, 2)), (0, (6, 2, 1, 2))


def _make_look(colour: str, marker: str, line: Any, size: float = 5.5) -> dict[str, Any]:
    return {"color": COLOURS[colour], "marker": marker, "linestyle": line, "markersize": size}


LOOKS: dict[str, dict[str, Any]] = {
    "single": _make_look("ink", "D", "-", 5),
    "dp": _make_look("dp", "^", _DASHED),
    "ddp": _make_look("ddp", "o", "-"),
    "other": _make_look("other", "s", _DASH_DOT, 5),
    "ideal": _make_look("muted", "", _DOTTED, 0),
}
"""Lines and marks by what they stand for."""

MANY_LOOKS = [
    _make_look(colour, marker, line)
    for line, markers in (("-", "o^sD"), (_DASHED, "vPX*"))
    for colour, marker in zip(("ddp", "dp", "other", "ink"), markers, strict=True)
]
"""Those of as many lines of one kind as one drawing can tell apart."""

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
"""Prefix of the id of a drawn thing that has words or a series, that of a legend's entry; and the separator
of both: no printable text holds it."""

_LEFT_OUT = re.compile(r"<(style|metadata).*?</\1>", re.DOTALL)
_SVG, _HREF = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_NUMBER = re.compile(r"-?\d+\.\d+")
_GEOMETRY = ("d", "transform", "x", "y", "width", "height")
_REFERENCE = re.compile(r"#([\w-]+)")


def render_svg(figure: Figure) -> str:
    """Return a figure as one `<svg>` element for an HTML page; equal figures give equal bytes."""
    from matplotlib.figure import Figure as Canvas

    raw = io.StringIO()
    with set_look(figure.key):
        canvas = Canvas(figsize=(WIDTH_PT / 72, figure.height_pt / 72), layout="constrained")
        figure.draw(canvas)
        canvas.savefig(raw, format="svg", metadata={"Date": None})
    return _inline_svg(raw.getvalue(), figure.alt)


@contextmanager
def set_look(salt: str) -> Iterator[None]:
    """Set Matplotlib's defaults and our own look, whatever the user has configured; ids hold the `salt`."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        # Browsers have their own fonts: a glyph that matplotlib's font lacks is no reason to complain.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.* missing from")
        mpl.rcdefaults()
        mpl.rcParams.update(_RC | {"svg.hashsalt": salt})
        yield


def make_mark_look(found: Mapping[str, Any], *, hollow: bool = False) -> dict[str, Any]:
    """Return how a single mark of a line's look is drawn."""
    return {
        "linestyle": "",
        "marker": found["marker"],
        "markersize": found["markersize"],
        "markeredgecolor": found["color"],
        "markeredgewidth": 1.5,
        "markerfacecolor": PAPER if hollow else found["color"],
        "zorder": 3,
    }


def read_across(axes: Any, label: str) -> None:
    """Name what is drawn to the right, with a grid to read it by and no other."""
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.set_xlabel("\n".join(map(drop_unprintable, label.split("\n"))))


def draw_legend(canvas: Any, handles: Sequence[Any], **how: Any) -> None:
    """Draw a legend above all, whose entries the page can tell."""
    longest = sorted(len(str(handle.get_label())) for handle in handles)[-3:]
    columns = 3 if sum(longest) <= 48 else 2  # what fits the width of a figure
    made = canvas.legend(handles=handles, loc="outside upper left", ncols=columns, **how)
    for words, handle in zip(made.get_texts(), made.legend_handles, strict=True):
        for one in filter(None, (words, handle)):
            one.set_gid(f"{_KEY}{words.get_text()}")


def drop_unprintable(text: str) -> str:
    """Drop characters that a drawing cannot hold: XML has no way to write control characters."""
    return "".join(c for c in text if c.isprintable())


def make_tag(words: str = "", series: str = "") -> str:
    """Return the id of a drawn thing: what the page says to who points at it, and its entry in the legend."""
    return f"{_TAG}{drop_unprintable(words)}{_APART}{drop_unprintable(series)}"


def _inline_svg(raw: str, alt: str) -> str:
    """Return a document that Matplotlib wrote as one `<svg>` element, which shows what `alt` says."""
    root = ET.fromstring(_LEFT_OUT.sub("", raw))  # noqa: S314 - written by matplotlib a moment ago
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.text = (element.text or "").strip() or None
        element.tail = None
        if _HREF in element.attrib:
            element.set("href", element.attrib.pop(_HREF))
        _shorten(element)
        _add_words(element)
        _set_theme(element)
    used = {name for e in root.iter() for value in e.attrib.values() for name in _REFERENCE.findall(value)}
    for own in (element.attrib for element in root.iter()):
        if own.get("id") not in used:
            own.pop("id", None)
    _prune(root)
    for name in ("width", "height", "version"):
        del root.attrib[name]
    root.attrib |= {"role": "img", "aria-label": alt}
    return ET.tostring(root, encoding="unicode")


def _shorten(element: ET.Element) -> None:
    """Write a hundredth of a point at most, and no turn by nothing."""
    own = element.attrib
    for name in own.keys() & set(_GEOMETRY):
        short = _NUMBER.sub(lambda found: f"{round(float(found[0]), 2) + 0.0:g}", own[name])
        own[name] = re.sub(r" *([A-Za-z]) *", r"\1", short).strip() if name == "d" else short
    if own.get("transform", "").startswith("rotate(-0 "):
        del own["transform"]


def _add_words(element: ET.Element) -> None:
    """Give a drawn thing its words, for who points at it, and its series."""
    own, name = element.attrib, element.get("id", "")
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


def _set_theme(element: ET.Element) -> None:
    """Write the element's style in the page's colours and without fonts."""
    own = element.attrib
    # The paint of hatches stands in attributes, where the page's variables do not apply.
    paint = [f"{name}: {own.pop(name)}" for name in ("fill", "stroke") if name in own]
    parts = [*paint, *own.pop("style", "").split("; ")]
    style = ";".join(part.replace(": ", ":") for part in parts if not part.startswith("font-family"))
    for name, colour in COLOURS.items():
        style = style.replace(colour, f"var(--{name})")
    if style := style.strip(";"):
        own["style"] = style


def _prune(parent: ET.Element) -> None:
    """Take out empty groups, and put in place of groups without a meaning what they hold."""
    kept: list[ET.Element] = []
    for child in parent:
        _prune(child)
        if child.tag in {"g", "defs"} and not len(child):
            continue
        kept += list(child) if child.tag == "g" and not child.attrib else [child]
    parent[:] = kept

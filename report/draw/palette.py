"""Defines how things look in every figure: each colour is a variable of the page, and never stands alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cycler import cycler
from matplotlib.figure import Figure as Canvas

WIDTH_PT = 400
"""Width of every figure, for which the sizes of its text and marks are chosen."""

NAMES = (
    "ink",
    "muted",
    "grid",
    "paper",
    "dp",
    "ddp",
    "other",
    "data",
    "forward",
    "backward",
    "exposed",
    "optimizer",
    "move",
    "rest",
)
"""The page's variables, in the order of the colours that a drawing names `C0`, `C1`, …"""

# Matplotlib needs colours it can parse; the page swaps these for variables, so that one drawing serves light,
# dark and print. None is pure black, which matplotlib leaves out of the SVG.
_STAND_INS = {name: f"#{i:02x}{i:02x}{i:02x}" for i, name in enumerate(NAMES, start=1)}
_COLOURS = {name: f"C{i}" for i, name in enumerate(NAMES)}
INK, MUTED, GRID, PAPER = (_COLOURS[name] for name in NAMES[:4])

SERIES: dict[str, dict[str, Any]] = {
    "single": {"color": INK, "marker": "D", "linestyle": "-", "markersize": 5},
    "dp": {"color": _COLOURS["dp"], "marker": "^", "linestyle": (0, (5, 2)), "markersize": 5.5},
    "ddp": {"color": _COLOURS["ddp"], "marker": "o", "linestyle": "-", "markersize": 5.5},
    "other": {"color": _COLOURS["other"], "marker": "s", "linestyle": (0, (6, 2, 1, 2)), "markersize": 5},
    "break": {"color": INK, "marker": "x", "linestyle": "", "markersize": 11},
    "ideal": {"color": MUTED, "marker": "", "linestyle": (0, (1, 2)), "markersize": 0},
}

_RUNS = (
    ("ddp", "o", "-"),
    ("dp", "^", (0, (5, 2))),
    ("other", "s", (0, (6, 2, 1, 2))),
    ("ink", "D", (0, (2, 1.5))),
    ("ddp", "v", (0, (8, 2))),
    ("dp", "P", (0, (4, 1, 1, 1, 1, 1))),
    ("other", "X", (0, (1, 1))),
    ("ink", "*", (0, (10, 3))),
)
SERIES |= {
    f"run{i}": {"color": _COLOURS[colour], "marker": marker, "linestyle": line, "markersize": 5.5}
    for i, (colour, marker, line) in enumerate(_RUNS, start=1)
}


@dataclass(frozen=True)
class Fill:
    """The look of an area: a colour and a hatch, so that neither has to be told alone."""

    colour: str
    hatch: str = ""


PARTS = {
    "data": Fill(_COLOURS["data"]),
    "scatter": Fill(_COLOURS["move"], "||||"),
    "replicate": Fill(_COLOURS["move"], "----"),
    "forward": Fill(_COLOURS["forward"]),
    "apply (forward)": Fill(_COLOURS["forward"], "--"),
    "gather": Fill(_COLOURS["move"], "++++"),
    "backward": Fill(_COLOURS["backward"], "////"),
    "backward with communication": Fill(_COLOURS["backward"], "xxxx"),
    "exposed communication": Fill(_COLOURS["exposed"], "\\\\\\\\"),
    "reduce": Fill(_COLOURS["move"]),
    "optimizer": Fill(_COLOURS["optimizer"], "||||"),
    "rest": Fill(_COLOURS["rest"]),
}
"""Parts of a step, by the label they have in the legend, in the legend's order."""

BAND: dict[str, Any] = {"facecolor": GRID, "edgecolor": "none"}
"""The look of the ratios that count as equal."""

COMMUNICATION = Fill(_COLOURS["ddp"])
EXPOSED = Fill(_COLOURS["exposed"], "////")

RC: Any = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.8,
    "legend.borderaxespad": 0,
    "legend.borderpad": 0.1,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 11,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 11,
    "ytick.major.size": 0,
}


def canvas_of(height_pt: float) -> Canvas:
    """Make the canvas of a figure `height_pt` points high."""
    return Canvas(figsize=(WIDTH_PT / 72, height_pt / 72), layout="constrained")


def stand_ins() -> Any:
    """Return the cycle that `C0`, `C1`, … are taken from where the page's style sheet colours the drawing."""
    return cycler(color=list(_STAND_INS.values()))


def light(style_sheet: str) -> Any:
    """Return the cycle of the page's own light colours, for a drawing that has no style sheet."""
    colours = dict(re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}),", style_sheet))
    return cycler(color=[colours[name] for name in NAMES])


def themed(style: str) -> str:
    """Put the page's variables in place of the stand-in colours of a CSS declaration list."""
    for name, colour in _STAND_INS.items():
        style = style.replace(colour, f"var(--{name})")
    return style


_TIP = "tip:"


def tipped(words: str) -> str:
    """Return the id to give what is drawn, from which `tip_of` finds the words again."""
    return f"{_TIP}{printable(words)}"


def tip_of(name: str) -> str | None:
    """Return the words of an id that `tipped` made; None for another."""
    return name.removeprefix(_TIP) if name.startswith(_TIP) else None


def printable(text: str) -> str:
    """Drop characters that a drawing cannot hold: XML has no way to write control characters."""
    return "".join(c for c in text if c.isprintable())

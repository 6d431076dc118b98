"""How figures look, how marks with intervals are drawn, and how a figure becomes SVG.

Each colour is a variable of the page, so that one drawing serves light, dark and print; none stands alone.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .svg import KEY, inline

WIDTH_PT = 400
"""Width of every figure, for which the sizes of its text and marks are chosen."""

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

    def svg(self) -> str:
        """Return the figure as one `<svg>` element for an HTML page; equal figures give equal bytes."""
        raw = io.StringIO()
        with look(self.key):
            canvas = Canvas(figsize=(WIDTH_PT / 72, self.height_pt / 72), layout="constrained")
            self.draw(canvas)
            canvas.savefig(raw, format="svg", metadata={"Date": None})
        return inline(raw.getvalue(), self.key, self.alt, _STAND_INS)


@contextmanager
def look(salt: str) -> Iterator[None]:
    """Set Matplotlib's defaults and our own look, whatever the user has configured; ids hold the `salt`."""
    with mpl.rc_context(), warnings.catch_warnings():
        # Browsers have their own fonts: a glyph that matplotlib's font lacks is no reason to complain.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.* missing from")
        mpl.rcdefaults()
        # The cycle first: the other settings name its colours.
        mpl.rcParams["axes.prop_cycle"] = cycler(color=list(_STAND_INS.values()))
        mpl.rcParams.update(_RC | {"svg.hashsalt": salt})
        yield


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


def time_axis(axes: Any, label: str) -> None:
    """Draw durations to the right, with a grid to read them by and no other."""
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x", color=GRID)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.set_xlabel(label)


def legend(canvas: Canvas, handles: Sequence[Any], columns: int, **how: Any) -> None:
    """Draw a legend above all, whose entries the page can tell."""
    made = canvas.legend(handles=handles, loc="outside upper left", ncols=columns, **how)
    for words, handle in zip(made.get_texts(), made.legend_handles, strict=True):
        for one in filter(None, (words, handle)):
            one.set_gid(f"{KEY}{words.get_text()}")

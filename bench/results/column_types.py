"""What a column of a results file is: its kind, unit, limits and, of a metric, what is better."""

from __future__ import annotations

import re
from dataclasses import Field, dataclass
from typing import Any

from ..settings import IMAGES

MOST, LEAST = 1e15, 1e-15
"""Largest and, but for 0, smallest magnitude of a number; none beyond was measured, and it might overflow."""

_UNITS: tuple[tuple[str, str], ...] = (
    (r"(.*_)?images_per_s(_.*)?", f"{IMAGES}/s"),
    (r"joules_per_image", "J/image"),
    (r".*_gb_per_s", "GB/s"),
    (r".*_ms(_p\d+)?", "ms"),
    (r".*_s", "s"),
    (r".*_mib", "MiB"),
    (r".*_pct", "%"),
    (r".*_mhz", "MHz"),
    (r".*_w", "W"),
    (r"temperature_c", "°C"),
    (r"(.*_)?bytes", "bytes"),
    (r"image_size", "pixels"),
    (r"batch_per_device|global_batch", "samples"),
    (r"accumulate|micro_batches", "micro-batches"),
    (r"num_params", "parameters"),
    (r"num_samples", "repetitions"),
    (r"num_(nodes|devices|buckets|rounds|blocks|steps|graphs)", r"\1"),
    (r"graph_breaks", "breaks"),
)
"""Names carry their units: by patterns of whole names, the first that fits; ratios and texts have none."""


@dataclass(frozen=True)
class Shown:
    """How the terminal's summary shows a column."""

    heading: str
    """Empty for the rate, which stands under its unit."""
    form: str
    """`rate` and `interval` have one, `ratio`, `percent` and `number` are without."""
    factor: float = 1.0


_TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


@dataclass(frozen=True)
class Column:
    """One column of a results file, and what its cells may hold."""

    name: str
    kind: str
    """`text`, `int`, `float` or `bool`."""
    meaning: str
    needed: bool = False
    """Whether every table has the column, and every row a value."""
    above: float = -MOST
    most: float = MOST
    among: tuple[str, ...] = ()
    """The texts that there are; none for any."""
    repeated: bool = False
    """Whether rounds repeat it, so that it has an interval: columns of its ends follow."""
    summary: Shown | None = None

    @property
    def unit(self) -> str:
        """The unit; empty for ratios, indices and plain text. Rates count images, until one knows better."""
        plain = re.sub(r"_(low|high)$", "", self.name)
        found = ((re.fullmatch(pattern, plain), unit) for pattern, unit in _UNITS)
        return next((match.expand(unit) for match, unit in found if match is not None), "")

    @property
    def allowed(self) -> str:
        """What the cells may hold, in words."""
        if self.among:
            return f"one of {', '.join(self.among)}"
        if self.kind == "bool":
            return "True or False"
        if self.kind == "text":
            return "given"
        number = "whole number" if self.kind == "int" else "number"
        return f"a {number} above {self.above:g}" if self.above > -MOST else f"a possible {number}"

    def allows(self, value: Any) -> bool:
        """Whether a cell may hold `value`; None is an empty one."""
        if value is None:
            return not self.needed
        if type(value) not in _TYPES[self.kind]:
            return False
        if self.kind in ("int", "float"):
            return bool(self.above < value <= self.most and (value == 0 or abs(value) >= LEAST))
        return not self.among or value in self.among


@dataclass(frozen=True, kw_only=True)
class Metric(Column):
    """A column in which one direction is better: what the gate judges."""

    label: str
    higher_is_better: bool = False
    written: str = ""
    """How one value is written, as a format; empty for a rate, whose unit is the case's."""
    gated: bool = True
    in_parts_of: str = ""
    """The column that a change is held against, where the metric itself may be near 0; empty: itself."""
    least_change: float = 0.0
    """Differences below this, in its own unit, are none."""

    @property
    def is_rate(self) -> bool:
        """Whether it counts what a case trains on, by second."""
        return self.unit == f"{IMAGES}/s"

    @property
    def absolute(self) -> bool:
        """Whether it depends on the machine; a ratio inside one run does so less."""
        return bool(self.unit)


def text_column(name: str, meaning: str, *, needed: bool = False, among: tuple[str, ...] = ()) -> Column:
    """A text."""
    return Column(name, "text", meaning, needed=needed, among=among)


def with_ends(
    name: str, meaning: str, *, above: float = -MOST, kind: type[Column] = Column, **more: Any
) -> tuple[Column, Column, Column]:
    """A number that rounds repeat, and the ends of its interval."""
    return (
        kind(name, "float", meaning, above=above, repeated=True, **more),
        Column(f"{name}_low", "float", f"lower end of the 95% interval of `{name}`"),
        Column(f"{name}_high", "float", f"upper end of the 95% interval of `{name}`"),
    )


def setting_column(setting: Field[Any]) -> Column:
    """The value of a setting of `bench.axes`."""
    kind = {bool: "bool", int: "int"}.get(type(setting.default), "text")
    above = 0 if kind == "int" else -MOST
    return Column(setting.name, kind, setting.metadata["column"], above=above)


def count_column(
    name: str, meaning: str, *, needed: bool = False, first: int = 1, most: float = MOST
) -> Column:
    """A whole number from `first` on."""
    return Column(name, "int", meaning, needed=needed, above=first - 1, most=most)

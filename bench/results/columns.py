"""Facts of a column: kind, unit, limits, the better direction; and the columns of files beside cases.csv."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plan.settings import IMAGES, MAX_DEVICES

if TYPE_CHECKING:
    import pandas as pd

    from .case_result import CaseResult
    from .metrics import Formula
    from .round_times import CaseTimes

MAX_NUMBER, MIN_NUMBER = 1e15, 1e-15
"""Largest and, but for 0, smallest magnitude of a number; none beyond was measured, and it might overflow."""

_UNITS: tuple[tuple[str, str], ...] = (
    (r"(.*_)?images_per_s(_.*)?", f"{IMAGES}/s"),
    (r"joules_per_image", "J/image"),
    (r".*_gb_per_s", "GB/s"),
    (r"tflop_per_s", "TFLOP/s"),
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

_TYPES: dict[str, tuple[type, ...]] = {"text": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


@dataclass(frozen=True)
class Column:
    """One column of a results file, and what its cells may hold."""

    name: str
    kind: str
    """`text`, `int`, `float` or `bool`."""
    meaning: str
    """Definition for who reads the file."""
    required: bool = False
    """True where every table has the column, and every row a value."""
    above: float = -MAX_NUMBER
    most: float = MAX_NUMBER
    choices: tuple[str, ...] = ()
    """The texts that there are; none for any."""
    has_interval: bool = False
    """True where rounds repeat it, so that it has an interval: columns of its ends follow."""
    ends: tuple[float, float] = (-math.inf, math.inf)
    """Limits that the interval cannot leave."""
    public: bool = False
    """True where a text names neither a person nor a machine, so that an archive keeps it."""
    formula: Formula | None = None
    """Function of the steps of a case, where it follows from them."""
    value: Callable[[CaseResult, CaseTimes], Any] | None = None
    """Its cell of a measured case, by round of what rounds repeat; None where details or facts have it."""
    of_gpus: Callable[[Iterable[float]], float] | None = None
    """Joins the readings of several GPUs: in DDP all wait for the slowest, and all use power."""
    shown: str = ""
    """Heading on the page, where that is not its name; behind ` =` its meaning, if `meaning` is not it."""

    @property
    def heading(self) -> str:
        """Heading in tables of the page, but for its unit."""
        plain = re.sub(r"^(num|dp)_|_(ms|pct|w)$", "", self.name)
        return self.shown.partition(" =")[0] or plain.replace("_", " ").capitalize()

    @property
    def explanation(self) -> str:
        """The meaning of its heading; empty where that says all."""
        _, is_told, told = self.shown.partition(" =")
        return told.strip() or self.meaning * bool(is_told)

    @property
    def unit(self) -> str:
        """The unit; empty for ratios, indices and plain text. Rates count images, until one knows better."""
        plain = re.sub(r"_(low|high)$", "", self.name)
        found = ((re.fullmatch(pattern, plain), unit) for pattern, unit in _UNITS)
        return next((match.expand(unit) for match, unit in found if match is not None), "")

    def is_within(self, number: Any) -> Any:
        """Tell whether a number, or each of an array, is within the limits and not too small to be stored."""
        return (number > self.above) & (number <= self.most) & ((number == 0) | (abs(number) >= MIN_NUMBER))

    def can_hold(self, value: Any) -> bool:
        """Tell whether a cell may hold `value`; None is an empty one."""
        if value is None:
            return not self.required
        if type(value) not in _TYPES[self.kind]:
            return False
        if self.kind in ("int", "float"):
            return bool(self.is_within(value))
        return not self.choices or value in self.choices


@dataclass(frozen=True, kw_only=True)
class Metric(Column):
    """A column in which one direction is better: what the gate judges."""

    called: str = ""
    """Its name in a sentence, where that is not its heading."""
    higher_is_better: bool = False
    written: str = ""
    """Format of one value; empty for a rate, whose unit is the case's."""
    gated: bool = True
    relative_to: str = ""
    """The column that a change is relative to, where the metric itself may be near 0; empty: itself."""
    min_change: float = 0.0
    """Differences below this, in its own unit, are none."""

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return self.called or self.heading.partition(" (")[0].lower()

    @property
    def is_rate(self) -> bool:
        """True where it counts samples or units by second."""
        return self.unit == f"{IMAGES}/s"

    @property
    def absolute(self) -> bool:
        """True where it depends on the machine; a ratio inside one run does so less."""
        return bool(self.unit)


def declare_text_column(name: str, meaning: str, **more: Any) -> Column:
    """Declare a text that names neither a person nor a machine: archives keep it."""
    return Column(name, "text", meaning, public=True, **more)


def declare_number_column(name: str, meaning: str, **more: Any) -> Column:
    """Declare a number without an interval."""
    return Column(name, "float", meaning, **more)


def declare_interval_columns(
    name: str, meaning: str, *, kind: type[Column] = Column, **more: Any
) -> tuple[Column, Column, Column]:
    """Declare a number that rounds repeat, and the ends of its interval."""
    return (
        kind(name, "float", meaning, has_interval=True, **more),
        Column(f"{name}_low", "float", f"lower end of the 95% interval of `{name}`"),
        Column(f"{name}_high", "float", f"upper end of the 95% interval of `{name}`"),
    )


def declare_count_column(name: str, meaning: str, *, first: int = 1, **more: Any) -> Column:
    """Declare a whole number from `first` on."""
    return Column(name, "int", meaning, above=first - 1, **more)


STATUSES = ("ok", "skipped", "oom", "failed", "timeout")
"""Every planned case ends in exactly one of these."""

REASON_CODES = ("plan", "equal_layout", "not_reached", "unused_parameters")
BY_PLAN, EQUAL_LAYOUT, NOT_REACHED, UNUSED_PARAMETERS = REASON_CODES
"""Codes of reasons on which a command acts."""

UNIT = declare_text_column(
    "unit", "what `images_per_s` counts: `images`, or the workload's own, as `tokens`", required=True
)

PHASES = ("warmup", "timed", "no_sync", "comm", "anatomy", "trace", "calibration")
"""Phases of blocks; only `timed` blocks make throughput."""

BLOCKS: tuple[Column, ...] = (
    declare_text_column("case_id", "the case, as in cases.csv", required=True),
    declare_text_column(
        "phase",
        "`warmup`, `timed`, `no_sync`, `comm`, `anatomy`, `trace` or `calibration`",
        required=True,
        choices=PHASES,
    ),
    declare_count_column(
        "round",
        "1, 2, ...; 0 for warm-up before the first round and a GPU's trace after the last",
        required=True,
        first=0,
    ),
    declare_count_column("position", "place of the block in its round's random order, from 0", first=0),
    declare_count_column(
        "launch", "1, 2, ...: how often workers were started (after a failure, by --resume)"
    ),
    declare_count_column("rank", "global rank that took the times", required=True, first=0, most=MAX_DEVICES),
    Column("host", "text", "host of the rank"),
    Column("started_s", "float", "start, in seconds since the run began"),
    declare_count_column("num_steps", "steps in the block", required=True),
    Column("block_ms", "float", "duration of the block on this rank", required=True, above=0),
    declare_text_column("steps_ms", "each step's duration, space-separated"),
    declare_text_column(
        "detail", "JSON: further durations of this phase, in ms per step; of timed blocks what each GPU did"
    ),
)

BUCKETS: tuple[Column, ...] = (
    declare_text_column("case_id", "the case, as in cases.csv", required=True),
    declare_count_column("rank", "global rank", first=0, most=MAX_DEVICES),
    declare_count_column("bucket", "index in all-reduce order, from 0", first=0),
    declare_count_column("bytes", "gradient bytes in the bucket"),
    declare_count_column("num_params", "parameters in the bucket"),
    *declare_interval_columns(
        "ready_ms",
        "last gradient ready, since the start of the backward, from the anatomy pass or a watch's probes",
    ),
    *declare_interval_columns(
        "launch_ms", "all-reduce launched: DDP does so once this bucket and all before it are ready"
    ),
    *declare_interval_columns("start_ms", "all-reduce taken up by gloo or NCCL, from the trace pass"),
    *declare_interval_columns("done_ms", "all-reduce done, from the trace pass"),
)

ALLREDUCE: tuple[Column, ...] = (
    declare_count_column("num_devices", "ranks of the all-reduce", required=True, most=MAX_DEVICES),
    declare_text_column("backend", "`nccl` or `gloo`"),
    declare_count_column("bytes", "message size", required=True),
    *declare_interval_columns(
        "time_ms",
        "an all-reduce of that size, longest rank, median over repetitions, each of up to 8 in a row",
        above=0,
    ),
    Column("busbw_gb_per_s", "float", "bus bandwidth, bytes / time x 2 (n - 1) / n, in 10^9 bytes/s"),
    declare_count_column("num_samples", "repetitions"),
)

COMPARISONS: tuple[Column, ...] = (
    declare_text_column("case_id", "the case, as in cases.csv", required=True),
    declare_text_column("reference_id", "the case it is compared with", required=True),
    declare_text_column("metric", "what is compared: `images_per_s`", required=True),
    UNIT,
    *declare_interval_columns(
        "ratio", "the case's over the reference's; the intervals of a run hold at once", above=0
    ),
    Column(
        "margin",
        "float",
        "largest difference that is treated as equal, a fraction; fixed before",
        above=0,
    ),
    declare_text_column(
        "answer", "`faster`, `slower`, `no difference` above the margin, `unresolved` or `too few rounds`"
    ),
    declare_count_column("num_rounds", "rounds of the case with fewer", first=0),
)

OTHER_FILES = {
    "blocks.csv": BLOCKS,
    "buckets.csv": BUCKETS,
    "allreduce.csv": ALLREDUCE,
    "comparisons.csv": COMPARISONS,
}
"""Beside cases.csv."""

DTYPES: dict[str, Any] = {"text": "string[python]", "int": "Int64", "bool": "boolean"}


def make_frame(rows: Iterable[Mapping[str, Any]], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Rows as a frame with the schema's columns and types; what is absent, or no cell may hold, becomes NA.

    A number too small to be told from 0 becomes 0: what is written of it can be read again.
    """
    import numpy as np  # as pandas it takes long, and `--help` needs the names alone
    import pandas as pd

    def make_array(column: Column, values: list[Any]) -> Any:
        if column.kind != "float":
            return pd.array(values, dtype=DTYPES[column.kind])
        found = np.array(values, dtype=np.float64)
        found[abs(found) < MIN_NUMBER] = 0.0
        return np.where(column.is_within(found), found, np.nan)

    rows = list(rows)
    return pd.DataFrame({c.name: make_array(c, [row.get(c.name) for row in rows]) for c in columns})

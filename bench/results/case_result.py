"""A case's results as a typed record: the one place where cells of cases.csv are read by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import pandas as pd

from ..common.numbers import format_integer
from ..plan.case import STAND_IN
from ..plan.case_settings import MODE_DEFAULTS, SETTINGS_OF
from ..plan.settings import IMAGES
from ..stats.interval import Interval
from .metrics import NO_SYNC

Cells: TypeAlias = Mapping[Any, Any]
"""A row of a results table, by column."""


def get_text(value: Any) -> str:
    """Return a cell as text; empty where missing."""
    return "" if pd.isna(value) else str(value)


def parse_finite(value: Any) -> float | None:
    """Return the number in a cell; None where it is missing, not a number or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _parse_interval(row: Cells, column: str) -> Interval | None:
    value, *ends = (parse_finite(row.get(f"{column}{end}")) for end in ("", "_low", "_high"))
    return None if value is None else Interval(value, *(math.nan if end is None else end for end in ends))


_READERS: dict[str, Callable[[Cells, str], Any]] = {
    "str": lambda row, name: get_text(row.get(name)),
    "bool": lambda row, name: not pd.isna(row.get(name)) and bool(row[name]),
    "int": lambda row, name: int(parse_finite(row.get(name)) or 0),
    "float | None": lambda row, name: parse_finite(row.get(name)),
    "Interval | None": _parse_interval,
}
"""Readers of the cell of a field, by the field's type."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """A row of cases.csv; a field has its column's name, an interval's three columns are one field.

    Units are those that results/README.md gives. A planned case has what names it; its results are None.
    """

    case_id: str
    status: str
    reason: str
    reason_code: str
    mode: str
    impl: str
    device_type: str
    device_name: str
    backend: str
    num_devices: int
    num_nodes: int
    link: str
    oversubscribed: bool
    """True where it shares devices."""
    arch: str
    image_size: float | None
    batch_per_device: float | None
    global_batch: float | None
    unit: str
    units_per_sample: int
    scaling: str
    precision: str
    data: str
    compile: str
    """Mode of torch.compile; `off` of an eager case."""
    pipeline_schedule: str
    micro_batches: float | None
    split_effect: float | None
    not_proved: str
    proved_by: str
    num_buckets: float | None
    bucket_bytes: str
    step_ms: Interval | None
    images_per_s: Interval | None
    speedup: Interval | None
    efficiency: Interval | None
    comm_ms: Interval | None
    buffers_ms: Interval | None
    data_ms: Interval | None
    exposed_comm_ms: Interval | None
    exposed_by: str
    hidden_pct: Interval | None
    sm_clock_mhz: float | None
    throttled_pct: float | None
    throttle_reasons: str
    rank_skew_ms: Interval | None
    num_rounds: int
    compile_s: float | None
    torch_version: str
    cells: Cells = field(repr=False, compare=False)
    """The row, for tables that show every column by its name."""
    batch_name: str = ""
    """Its batch size in names, `batch 32`, where its table has several; else empty."""
    single: CaseResult | None = field(default=None, repr=False, compare=False)
    """The case of `single` with as large a batch, compiled alike: see `add_singles`."""

    @classmethod
    def from_row(cls, row: Cells) -> CaseResult:
        """Read a row of cases.csv, or of a plan."""
        found = {f.name: _READERS[str(f.type)](row, f.name) for f in _FIELDS}
        return cls(**found | {name: found[name] or usual for name, usual in _USUAL.items()}, cells=row)

    def get_text(self, column: str) -> str:
        """Any column as text; empty where missing."""
        return get_text(self.cells.get(column))

    def get_number(self, column: str) -> float | None:
        """Any column as a number; None where it is missing or not finite."""
        return parse_finite(self.cells.get(column))

    def get_interval(self, column: str) -> Interval | None:
        """Any measured column with its interval, NaN where unknown; None where nothing was measured."""
        return _parse_interval(self.cells, column)

    def get_setting(self, axis: str) -> str:
        """One of `MODE_DEFAULTS` as text; torch's default where the row does not say."""
        return self.get_text(axis) or str(MODE_DEFAULTS[axis])

    def list_changed(self, reference: CaseResult | None = None) -> dict[str, str]:
        """Its mode's settings that are not those of `reference`, or not PyTorch's; of pipelines none."""
        axes = [setting.name for setting in SETTINGS_OF.get(self.mode, ()) if self.mode != "pipeline"]
        usual = {
            axis: reference.get_setting(axis) if reference else str(MODE_DEFAULTS[axis]) for axis in axes
        }
        return {axis: mine for axis, value in usual.items() if (mine := self.get_setting(axis)) != value}

    @property
    def units_per_step(self) -> int:
        """Units that an optimizer step trains over all devices; 0 where the batch is not known."""
        return int(self.global_batch or 0) * self.units_per_sample

    def compute_rate(self, step_ms: float) -> float:
        """Return the units per second of steps that take so many ms."""
        return self.units_per_step * 1000 / step_ms

    @property
    def batch(self) -> float | None:
        """Samples per device, or in all under strong scaling: what `--batch-size` fixes."""
        size = self.batch_per_device
        return size * self.num_devices if size and self.scaling == "strong" else size

    @property
    def variant(self) -> tuple[float | None, str]:
        """Batch size and mode of torch.compile, which together have a `single` of their own."""
        return self.batch, self.compile

    @property
    def is_ok(self) -> bool:
        """True where it was measured to its end."""
        return self.status == "ok"

    @property
    def has_failed(self) -> bool:
        """True where it was tried and has no result."""
        return self.status not in ("ok", "skipped")

    @property
    def is_ranked(self) -> bool:
        """True where its speed-up says anything: it shares no devices, and nothing stands in for DP."""
        return not (self.oversubscribed or self.is_stand_in)

    @property
    def has_efficiency(self) -> bool:
        """Return whether its step is one of `single`: not of several batches."""
        return self.get_setting("accumulate") == "1"

    @property
    def shares_gpu(self) -> bool:
        """True where it shares a GPU, which shows that it works, and nothing of its speed."""
        return self.oversubscribed and self.device_type == "cuda"

    @property
    def is_stand_in(self) -> bool:
        """True where DataParallel's stages ran on CPU cores."""
        return self.mode == "dp" and (self.impl == STAND_IN or self.device_type == "cpu")


_FIELDS = fields(CaseResult)[:-3]
_USUAL = {"unit": IMAGES, "units_per_sample": 1, "compile": "off", "num_nodes": 1, "exposed_by": NO_SYNC}
"""Values of cells that are empty, as in older files."""


def list_records(cases: pd.DataFrame) -> list[dict[str, Any]]:
    """List the rows as mappings from column to cell; a missing cell that is no number is None.

    Not `DataFrame.to_dict`, which looks every column up by itself for every row.
    """
    names = list(cases.columns)
    return [
        {name: None if cell is pd.NA else cell for name, cell in zip(names, row, strict=True)}
        for row in cases.astype(object).to_numpy().tolist()
    ]


def read_case_results(cases: pd.DataFrame) -> list[CaseResult]:
    """Read a table of cases, in its order."""
    found = [CaseResult.from_row(row) for row in list_records(cases)]
    if len({case.batch for case in found}) < 2:
        return found
    return [replace(case, batch_name=f"batch {format_integer(case.batch)}") for case in found]


def add_singles(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Give every case the one of `single` that it is compared with; `single` itself has none."""
    cases = list(cases)
    singles = {case.variant: case for case in cases if case.mode == "single"}
    return [
        case if case.mode == "single" else replace(case, single=singles.get(case.variant)) for case in cases
    ]

"""The columns of every results file: one definition for the writer, the reader and the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..settings import IMAGES, MOST_DEVICES
from .case_columns import CAP_MIB, IDENTITY, MEASURED, UNIT
from .column_types import Column, Metric, count_column, text_column, with_ends

if TYPE_CHECKING:
    import pandas as pd

PHASES = ("warmup", "timed", "no_sync", "comm", "anatomy", "trace", "calibration")
"""What a block measured; only `timed` blocks make throughput."""

_BEHIND_CAP = 1 + [column.name for column in IDENTITY].index("bucket_cap_mb")

CASES: tuple[Column, ...] = (*IDENTITY[:_BEHIND_CAP], CAP_MIB, *IDENTITY[_BEHIND_CAP:], *MEASURED)

BLOCKS: tuple[Column, ...] = (
    text_column("case_id", "the case, as in cases.csv", needed=True),
    text_column(
        "phase",
        "`warmup`, `timed`, `no_sync`, `comm`, `anatomy`, `trace` or `calibration`",
        needed=True,
        among=PHASES,
    ),
    count_column(
        "round",
        "1, 2, ...; 0 for warm-up before the first round and a GPU's trace after the last",
        needed=True,
        first=0,
    ),
    count_column("position", "place of the block in its round's random order, from 0", first=0),
    count_column("launch", "1, 2, ...: how often workers were started (after a failure, by --resume)"),
    count_column("rank", "global rank that took the times", needed=True, first=0, most=MOST_DEVICES),
    Column("host", "text", "host of the rank"),
    Column("started_s", "float", "start, in seconds since the run began"),
    count_column("num_steps", "steps in the block", needed=True),
    Column("block_ms", "float", "duration of the block on this rank", needed=True, above=0),
    text_column("steps_ms", "each step's duration, space-separated"),
    text_column(
        "detail", "JSON: further durations of this phase, in ms per step; of timed blocks what each GPU did"
    ),
)

BUCKETS: tuple[Column, ...] = (
    text_column("case_id", "the case, as in cases.csv", needed=True),
    count_column("rank", "global rank", first=0, most=MOST_DEVICES),
    count_column("bucket", "index in all-reduce order, from 0", first=0),
    count_column("bytes", "gradient bytes in the bucket"),
    count_column("num_params", "parameters in the bucket"),
    *with_ends("ready_ms", "last gradient ready, since the start of the backward, from the anatomy pass"),
    *with_ends("launch_ms", "all-reduce launched: DDP does so once this bucket and all before it are ready"),
    *with_ends("start_ms", "all-reduce taken up by gloo or NCCL, from the trace pass"),
    *with_ends("done_ms", "all-reduce done, from the trace pass"),
)

ALLREDUCE: tuple[Column, ...] = (
    count_column("num_devices", "ranks of the all-reduce", needed=True, most=MOST_DEVICES),
    text_column("backend", "`nccl` or `gloo`"),
    count_column("bytes", "message size", needed=True),
    *with_ends(
        "time_ms",
        "an all-reduce of that size, longest rank, median over repetitions, each of up to 8 in a row",
        above=0,
    ),
    Column("busbw_gb_per_s", "float", "bus bandwidth, bytes / time x 2 (n - 1) / n, in 10^9 bytes/s"),
    count_column("num_samples", "repetitions"),
)

COMPARISONS: tuple[Column, ...] = (
    text_column("case_id", "the case, as in cases.csv", needed=True),
    text_column("reference_id", "the case it is compared with", needed=True),
    text_column("metric", "what is compared: `images_per_s`", needed=True),
    UNIT,
    *with_ends("ratio", "the case's over the reference's; the intervals of a run hold at once", above=0),
    Column("margin", "float", "what counts as equal, a fraction, fixed before the run", above=0),
    text_column(
        "answer", "`faster`, `slower`, `no difference` above the margin, `unresolved` or `too few rounds`"
    ),
    count_column("num_rounds", "rounds of the case with fewer", first=0),
)

FILES: dict[str, tuple[Column, ...]] = {
    "cases.csv": CASES,
    "blocks.csv": BLOCKS,
    "buckets.csv": BUCKETS,
    "allreduce.csv": ALLREDUCE,
    "comparisons.csv": COMPARISONS,
}

METRICS: dict[str, Metric] = {column.name: column for column in CASES if isinstance(column, Metric)}
"""The columns of cases.csv in which one direction is better, by name."""

GATED = {name: metric for name, metric in METRICS.items() if metric.gated}

_DTYPES: dict[str, Any] = {"text": "string", "int": "Int64", "bool": "boolean"}


def units_of(unit: str = IMAGES) -> dict[str, str]:
    """The unit of every column of every file; rates count `unit`, such as `tokens`."""
    counted = {f"{IMAGES}/s": f"{unit}/s", "J/image": f"J/{unit.removesuffix('s')}"}
    columns = (column for of_file in FILES.values() for column in of_file)
    return {column.name: counted.get(column.unit, column.unit) for column in columns}


def typed(values: Sequence[Any], kind: str) -> Any:
    """A column of a frame; None becomes NA."""
    import numpy as np  # as pandas it takes long, and `--help` needs the names alone
    import pandas as pd

    return np.array(values, dtype=np.float64) if kind == "float" else pd.array(values, dtype=_DTYPES[kind])


def typed_frame(rows: Iterable[Mapping[str, Any]], columns: tuple[Column, ...]) -> pd.DataFrame:
    """Rows as a frame with the schema's columns and types; absent values become NA."""
    import pandas as pd

    rows = list(rows)
    return pd.DataFrame({c.name: typed([row.get(c.name) for row in rows], c.kind) for c in columns})


def records(cases: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as mappings from column to cell; a missing cell that is no number is None.

    Not `DataFrame.to_dict`, which looks every column up by itself for every row.
    """
    import pandas as pd

    names = list(cases.columns)
    return [
        {name: None if cell is pd.NA else cell for name, cell in zip(names, row, strict=True)}
        for row in cases.astype(object).to_numpy().tolist()
    ]

"""The table of torch.compile: what compiling took, what graphs it made, and how much faster they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from ddp_bench.bench.axes import PYTHON_REDUCER
from ddp_bench.bench.findings.numbers import TIMES, with_interval
from ddp_bench.bench.findings.wording import Row, text
from ddp_bench.bench.results.comparisons import Comparison, over_eager
from ddp_bench.bench.results.schema import records
from ddp_bench.report.fields import CASE, Field, table, value, whole
from ddp_bench.report.model import Table, TableColumn

_NOTE = (
    "Compiled cases. Seconds are those that the first rank spent in the compiler, backward included: what "
    "its caches held already took less. Under ddp_optimizer the forward is split where DDP's buckets end, "
    "so that their all-reduces overlap with the backward: graphs beside buckets show whether it could. "
    "A graph break is a place where the model could not be one graph."
)
_EXPERIMENTAL = (
    "python_reducer is experimental in PyTorch: the backward is compiled with its all-reduces, which the "
    "compiler joins into buckets; buffers are not broadcast."
)


def compiling(ok: pd.DataFrame, comparisons: Sequence[Comparison]) -> Table | None:
    """Make the table of the measured cases; None for a run whose cases are eager."""
    compiled = ok[ok["num_graphs"].notna()]
    ratios = {one.case_id: one.ratio for one in over_eager(comparisons, records(ok))}

    def against(row: Row) -> str:
        return with_interval(ratios.get(text(row["case_id"])))

    fields: tuple[Field, ...] = (
        (TableColumn("Mode"), lambda row: text(row["compile"])),
        (TableColumn("DDP is optimised by"), _way),
        value("Compiling", "compile_s", "s"),
        whole("Graphs", "num_graphs"),
        whole("DDP's buckets", "num_buckets"),
        whole("Graph breaks", "graph_breaks"),
        (TableColumn(f"Against eager ({TIMES})", "number"), against),
    )
    made = table("torch.compile", _NOTE, compiled, (CASE,), fields)
    experimental = (compiled["optimize_ddp"] == PYTHON_REDUCER).any()
    return replace(made, below=(_EXPERIMENTAL,)) if made is not None and experimental else made


def _way(row: Row) -> str:
    way = text(row["optimize_ddp"]) if row["mode"] == "ddp" else ""
    return f"{way} (experimental)" if way == PYTHON_REDUCER else way

"""Runs as frames, for notebooks and scripts: `from ddp_bench import load_run, compare`.

A mistake, such as a folder that is no run, is a `bench.common.errors.UsageError` (a ValueError) of one line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ddp_bench.bench.common.text import to_json
from ddp_bench.bench.common.values import parse_fraction, parse_option
from ddp_bench.bench.gate.main import DEFAULT_THRESHOLD
from ddp_bench.bench.results import store
from ddp_bench.bench.results.case_columns import map_units


@dataclass(frozen=True, repr=False, eq=False)
class Run(store.RunData):
    """A run that has been loaded: `manifest`, a record, and its tables as frames with typed columns.

    `cases`, `blocks`, `buckets`, `allreduce` and `comparisons` hold the columns that `results/README.md`
    explains, a missing value as NA. Their units are in `units`.
    """

    @cached_property
    def units(self) -> Mapping[str, str]:
        """The unit of every column by its name, such as `ms`; empty for ratios, indices and text."""
        return map_units(self.results[0].unit)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run as `bench.run --json` prints it: answers, findings, cautions, timing, cases."""
        from ddp_bench.bench.findings.findings import (
            summarize_run,  # takes longer to import than a run to load
        )

        whole = summarize_run(self)
        return cast("dict[str, Any]", json.loads(to_json(whole)))

    def __repr__(self) -> str:
        measured = int((self.cases["status"] == "ok").sum())
        return f"<Run {self.path}: {measured} of {len(self.cases)} cases measured>"


def load_run(path: str | os.PathLike[str]) -> Run:
    """Load a results folder, or an archive of one.

    Raises UsageError where `path` is neither, is damaged, or was written by another version.
    """
    return Run(**vars(store.load_run(Path(path).expanduser())))


def compare(
    baseline: Run | str | os.PathLike[str],
    candidate: Run | str | os.PathLike[str],
    *,
    threshold: float | str = DEFAULT_THRESHOLD,
    ratios_only: bool = False,
    allow_missing: bool = False,
) -> pd.DataFrame:
    """Gate `candidate` against `baseline` as `bench.gate` does: one row per case and metric, worst first.

    A case passes or fails by its rate; rows of other metrics inform (`decides` is false). Columns and
    `attrs`, which concerns the whole gate, are what its `--json` prints. `baseline` and `candidate` have the
    unit of their `metric` in `Run.units`; `ratio` is candidate / baseline, with its interval, of exposed
    communication 1 + candidate less baseline in parts of the baseline's step; `threshold` is the share of
    change that matters, such as 0.05 or "5%".

    Raises UsageError for what is no run, NotComparableError where no case is in both.
    """
    from ddp_bench.bench.gate.compare import compare as gate_of
    from ddp_bench.bench.gate.decide import Policy
    from ddp_bench.bench.gate.output import encode_gate
    from ddp_bench.bench.gate.runs import read_run

    if not isinstance(threshold, str):
        threshold = f"{threshold:.15f}".rstrip("0").rstrip(".")  # 1e-05 is no option's number
    share = parse_option("threshold", parse_fraction, threshold)
    paths = (run.path if isinstance(run, Run) else Path(run).expanduser() for run in (baseline, candidate))
    first, second = map(read_run, paths)
    gate = gate_of(
        first,
        second,
        policy=Policy(threshold=share, ratios_only=ratios_only, allow_missing=allow_missing),
    )
    whole: dict[str, Any] = json.loads(encode_gate(gate))
    rows = []
    for found in whole.pop("comparisons"):
        ratio = found["ratio"] or {}
        ends = {f"ratio_{end}": ratio.get(end) for end in ("low", "high")}
        rows.append({**found, "ratio": ratio.get("estimate"), **ends})
    frame = pd.DataFrame(rows)
    frame.attrs.update(whole)
    return frame

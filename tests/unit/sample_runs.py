"""The recorded samples, and their cases.csv made anew from their blocks."""

import functools
from dataclasses import fields

import pandas as pd
import pytest
from commands import ROOT
from made import case_of

from ddp_bench.bench.plan.case import Case
from ddp_bench.bench.plan.sweep import Planned
from ddp_bench.bench.results.aggregate import Outcome, case_rows
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.store import load_run

SAMPLES = sorted(path.parent for path in (ROOT / "results" / "samples").rglob("manifest.json"))

EVERY_SAMPLE = [
    pytest.param(path, id=str(path.relative_to(ROOT / "results" / "samples"))) for path in SAMPLES
]


@functools.cache
def sample(path):
    return load_run(path)


@functools.cache
def comparisons(path):
    return tuple(sample(path).compared)


@functools.cache
def rebuilt(path):
    """What a run of today would have written as cases.csv."""
    run = sample(path)
    outcomes = []
    for row in run.cases.to_dict("records"):
        case = case_of(**{f.name: row[f.name] for f in fields(Case) if not pd.isna(row[f.name])})
        vars(case)["case_id"] = row["case_id"]  # the name in its blocks, whatever names cases today
        planned = Planned(
            case=case, num_nodes=int(row["num_nodes"]), oversubscribed=row["oversubscribed"] is True
        )
        outcomes.append(Outcome(planned, row["status"], "" if pd.isna(row["reason"]) else row["reason"]))
    return case_rows(outcomes, RoundTimes.of(run.blocks), comparisons(path))

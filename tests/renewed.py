"""Makes the derived tables of samples and baselines anew from their blocks: run it after columns change.

`PYTHONPATH=tests:. python tests/renewed.py`. What was measured stays as it is: blocks.csv, the manifest, the
all-reduce's curve, the calibration, and of cases.csv what is of a case and not of its blocks.
"""

from dataclasses import fields, replace

import pandas as pd
from commands import ROOT
from made import case_of, times_of

from ddp_bench.bench.plan.buckets import BucketLayout
from ddp_bench.bench.plan.case import Case
from ddp_bench.bench.plan.sweep import Planned
from ddp_bench.bench.results.aggregate import describe_planned_case, make_bucket_rows, make_case_rows
from ddp_bench.bench.results.archive import encode_archive, is_archive, publish_members, read_archive
from ddp_bench.bench.results.case_columns import CASES, IDENTITY
from ddp_bench.bench.results.case_result import list_records, read_case_results
from ddp_bench.bench.results.columns import COMPARISONS, make_frame
from ddp_bench.bench.results.comparisons import compare_pairs, list_pairs
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.results.tables import encode_table

RESULTS = ROOT / "results"
KEPT = sorted(
    path.parent if path.suffix == ".json" else path
    for folder in ("samples", "baselines")
    for path in (*(RESULTS / folder).rglob("manifest.json"), *(RESULTS / folder).rglob("*.zip"))
)
"""Every published run: a folder, or an archive."""

TABLES = ("cases", "comparisons", "buckets")


def renewed(run):
    """The run with the tables that today's code makes of its blocks."""
    facts = (
        {c.name for c in CASES if not (c.has_interval or c.value)} - {c.name for c in IDENTITY} - {"cap_mib"}
    )
    facts -= {f"{c.name}{end}" for c in CASES if c.has_interval for end in ("_low", "_high")}
    facts |= {"reason_code", "device_name", "link", "exposed_by"}
    outcomes, layouts = [], {}
    for row, result in zip(list_records(run.cases), run.results, strict=True):
        case = case_of(**{f.name: row[f.name] for f in fields(Case) if not pd.isna(row[f.name])})
        vars(case)["case_id"] = row["case_id"]  # its name in the blocks, whatever names cases today
        planned = Planned(case=case, num_nodes=result.num_nodes, oversubscribed=result.oversubscribed)
        known = {name: row[name] for name in facts if not pd.isna(row[name])}
        known |= {"status": result.status, "reason": result.reason}
        outcomes.append(describe_planned_case(planned, **known))
        if layout := BucketLayout.from_cell(result.bucket_bytes):
            layouts[result.case_id] = layout
    times = times_of(run.blocks)
    typical = times.fit_steps()
    rated = [
        case for case in read_case_results(make_case_rows(outcomes, times, typical=typical)) if case.is_ok
    ]
    units = {case.case_id: case.units_per_step for case in rated}
    comparisons = compare_pairs(list_pairs(rated), typical, units=units, margin=run.manifest.margin)
    unit = run.results[0].unit
    buckets = make_bucket_rows(layouts, times).drop(columns="num_params")
    keys = ["case_id", "rank", "bucket"]
    buckets = buckets.merge(run.buckets[[*keys, "num_params"]], on=keys, how="left")
    return replace(
        run,
        cases=make_case_rows(outcomes, times, comparisons, typical=typical),
        comparisons=make_frame([one.to_row(unit) for one in comparisons], COMPARISONS),
        buckets=buckets[run.buckets.columns],
    )


def renew(path):
    """Write the tables of a published run anew, in its folder or archive."""
    made = renewed(load_run(path))
    if is_archive(path):
        tables = {name: content for name, content in publish_members(made).items() if name[:-4] in TABLES}
        path.write_bytes(encode_archive(read_archive(path) | tables))
        return
    for name in TABLES:
        (path / f"{name}.csv").write_bytes(encode_table(getattr(made, name)))


if __name__ == "__main__":
    for kept in KEPT:
        renew(kept)
        print(kept.relative_to(RESULTS))

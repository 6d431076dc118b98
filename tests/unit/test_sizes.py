"""Large plans: what a run writes of them is read again, and what could not be is refused or ends in time."""

from dataclasses import replace

import pytest
from made import case_of, new_run, planned, resolved

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.plan.sweep import Planned
from ddp_bench.bench.results import journal, tables
from ddp_bench.bench.results.columns import BUCKETS
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.run.job import check_sizes

RESNET50_BYTES = 102_228_128
"""Of its gradients; under caps of 1 MiB they are 66 buckets."""


def plan(num_cases, num_ranks, cap="1"):
    case = case_of(num_devices=num_ranks, bucket_cap_mb=cap)
    return [Planned(case=case, num_nodes=1, oversubscribed=False)] * num_cases


@pytest.mark.parametrize(
    ("cases", "settings", "refused"),
    [
        (plan(9, 1024), {}, None),
        (plan(9, 1024), {"rounds": 100}, None),
        (plan(20_000, 2), {}, None),
        (plan(5_000, 64, cap="25"), {"rounds": 6}, None),
        (plan(40_000, 2), {}, "cases.csv of 40,000 cases would .* measure fewer cases in a run"),
        (plan(9, 1024), {"rounds": 1000}, "blocks.csv of 9 cases would .* fewer rounds, ranks or cases"),
        (plan(90, 4096, cap="0.5"), {}, "buckets.csv of 90 cases would .* fewer ranks or cases"),
        (plan(90, 4096, cap="25"), {}, None),
        (plan(90, 4096, cap="0.5"), {"passes": ["none"]}, None),
    ],
)
def test_a_plan_is_refused_where_its_tables_could_not_be_read(cases, settings, refused):
    asked = resolved(**settings)
    if refused is None:
        check_sizes(cases, asked, RESNET50_BYTES)
    else:
        with pytest.raises(UsageError, match=refused):
            check_sizes(cases, asked, RESNET50_BYTES)
        skipped = [replace(p, skip_reason="too few ranks") for p in cases]
        if "cases.csv" not in refused:
            check_sizes(skipped, asked, RESNET50_BYTES)


def test_a_plan_longer_than_a_line_that_is_read_is_read_again(tmp_path, monkeypatch):
    one = planned(resolved())[0]
    plan = [replace(one, num_nodes=1 + index) for index in range(2500)]
    folder = new_run(tmp_path / "run")
    monkeypatch.setattr(Recorder, "write", lambda _: None)  # of cases alike there is no table
    Recorder.begin(plan, folder)
    monkeypatch.setattr(journal, "MAX_LINE_BYTES", 2**20)
    assert journal.read(folder).plan == plan


def test_buckets_of_all_ranks_may_be_larger_than_a_table_of_cases(tmp_path, monkeypatch):
    path = tmp_path / "buckets.csv"
    rows = "".join(f"a,{rank},0,8\n" for rank in range(1000))
    path.write_text(f"case_id,rank,bucket,bytes\n{rows}")
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 100)
    assert len(tables.read_table(path, BUCKETS)) == 1000
    monkeypatch.setattr(tables, "MAX_CSV_BYTES", 100)
    with pytest.raises(UsageError, match="too large"):
        tables.read_table(path, BUCKETS)

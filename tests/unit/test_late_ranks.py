"""Which rank is last with a bucket: by its own work since the last collective, whatever clocks say."""

import json

import numpy as np
import pytest
from finding_cases import SINGLE, made_run
from made import block
from report_runs import case

from ddp_bench.bench.findings.late_ranks import estimate_typical, find_late_buckets, find_latest
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.report.page import make_page

DDP = case("ddp", 3, 200.0, num_buckets=2, bucket_bytes="1048576/4194304")


def looked_at(late_ms, *, rounds=12, case_=DDP, **without):
    """Anatomy blocks of three ranks; rank 2's data takes 4 ms more, rank 1's second bucket `late_ms`.

    Rank 0 broadcasts at once, and the others wait for it as long as they like: that is no work of theirs.
    """
    rng, rows = np.random.default_rng(3), []
    for r in range(1, rounds + 1):
        for rank in range(3):
            waited = 0.0 if rank == 0 else float(rng.uniform(0, 30))
            ready = [20.0, 40.0 + late_ms * (rank == 1)]
            detail = {
                "data_ms": 1.0 + 4.0 * (rank == 2),
                "forward_ms": 30.0 + waited,
                "optimizer_ms": 5.0,
                "sync_buffers_ms": waited,
                "ready_ms": [ms + 0.2 * float(rng.standard_normal()) for ms in ready],
            }
            for name in without:
                del detail[name]
            rows.append(
                block(case_["case_id"], r, 100.0, phase="anatomy", rank=rank, detail=json.dumps(detail))
            )
    return made_run([SINGLE, case_], blocks=make_frame(rows, BLOCKS))


def late(run):
    return find_late_buckets(run, run.results[1])


def test_each_bucket_has_its_own_late_rank():
    first, second = late(looked_at(10.0))
    assert (first.rank, first.num_last, first.num_rounds) == (2, 12, 12)
    assert first.later_ms.low < 4 < first.later_ms.high
    assert (second.rank, second.num_bytes) == (1, 4194304)
    assert second.later_ms.estimate == pytest.approx(10 - 4, abs=0.3)


def test_the_page_names_a_late_rank_only_where_it_is_surely_late():
    (table,) = [
        one for fold in make_page(looked_at(4.0)).folds for one in fold.tables if one.title == "Late ranks"
    ]
    named = [row[2] for row in table.rows]
    assert named == ["rank 2", "no rank surely"]  # with the second bucket ranks 1 and 2 are equally late
    assert [row[3].partition(" of ")[2] for row in table.rows] == ["12", "12"]


@pytest.mark.parametrize(
    "run",
    [
        looked_at(10.0, rounds=4),
        looked_at(10.0, sync_buffers_ms=None),
        looked_at(10.0, ready_ms=None),
        looked_at(10.0, case_=DDP | {"accumulate": 4}),
        looked_at(10.0, case_=DDP | {"num_devices": 4}),
    ],
)
def test_where_own_work_is_not_known_no_rank_is_late(run):
    assert late(run) == []


def test_the_latest_is_the_one_that_leads_by_the_median():
    work = np.array([[1.0, 3.0, 2.0], [1.0, 5.0, 9.0], [4.0, 6.0, 6.0]])
    latest, lead = find_latest(work)
    assert latest == 1
    assert lead == [1.0, -4.0, 0.0]
    assert estimate_typical([0.0] * 6).value == 0.0

"""The journal tells what a killed process can no longer tell, from any prefix of its bytes."""

from pathlib import Path

import pytest

from ddp_bench.bench.case import Case
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.layout import BucketCaps, BucketLayout
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.recovery.close import finish
from ddp_bench.bench.results.journal import JOURNAL, Journal, read
from ddp_bench.bench.results.recorder import Recorder

CASE = Case(
    mode="ddp",
    num_devices=2,
    arch="resnet20",
    image_size=32,
    batch_per_device=4,
    scaling="weak",
    precision="fp32",
    data="device",
    device_type="cpu",
    backend="gloo",
    bucket_cap_mb=BucketCaps.parse("1/25"),
)
PLAN = [Planned(case=CASE, num_nodes=1, oversubscribed=True, skip_reason=None)]


def written(folder: Path) -> Journal:
    journal = Journal(folder)
    journal.begin(PLAN)
    journal.write({"attempt": {"run_id": "a"}})
    journal.note(0, "its preparation")
    journal.write({"outcome": [0, "ok", "", {"num_buckets": 2}]})
    journal.write({"layout": [CASE.case_id, (8, 4), ((0,), (1, 2))]})
    journal.note(0, "round 1 (timed)")
    return journal


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    assert written(tmp_path).state == read(tmp_path)
    state = read(tmp_path)
    assert state.plan == PLAN
    assert state.settled[0].facts == {"num_buckets": 2}
    assert state.layouts[CASE.case_id] == BucketLayout((8, 4), ((0,), (1, 2)))
    assert state.under_way == {"index": 0, "what": "round 1 (timed)"}
    assert not state.ended


def test_every_prefix_is_a_journal(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        known = read(tmp_path)
        Journal(tmp_path).write({"end": "interrupted"})
        again = read(tmp_path)
        assert again.ended == "interrupted", "a line after a cut one is a line of its own"
        assert (again.plan, again.settled, again.layouts) == (known.plan, known.settled, known.layouts)


def test_a_case_that_failed_is_no_longer_under_way_and_can_be_tried_again(tmp_path: Path) -> None:
    journal = written(tmp_path)
    journal.write({"outcome": [0, "failed", "ValueError", {}]})
    assert read(tmp_path).under_way is None
    journal.write({"retry": [0]})
    assert read(tmp_path).settled == {}


def test_a_folder_without_one_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"journal\.jsonl"):
        read(tmp_path)


def test_the_plan_is_written_as_earlier_versions_did(tmp_path: Path) -> None:
    """A line of baf1d00; a run that it began is resumed by this version."""
    line = (
        '{"plan":[[{"mode":"single","num_devices":1,"arch":"resnet18","image_size":64,"batch_per_device":64,'
        '"scaling":"strong","precision":"bf16","data":"device","device_type":"cuda","backend":"",'
        '"bucket_cap_mb":"","gradient_as_bucket_view":false,"static_graph":false,'
        '"find_unused_parameters":false,"sync_buffers":true,"sync_batchnorm":false,"comm_hook":"none",'
        '"accumulate":1},{"num_nodes":1,"oversubscribed":false,"skip_reason":null}],'
        '[{"mode":"ddp","num_devices":4,"arch":"resnet18","image_size":64,"batch_per_device":16,'
        '"scaling":"strong","precision":"bf16","data":"device","device_type":"cuda","backend":"nccl",'
        '"bucket_cap_mb":"1/25/25","gradient_as_bucket_view":false,"static_graph":true,'
        '"find_unused_parameters":true,"sync_buffers":true,"sync_batchnorm":false,"comm_hook":"none",'
        '"accumulate":1},{"num_nodes":1,"oversubscribed":false,"skip_reason":null}]]}\n'
    )
    (tmp_path / JOURNAL).write_text(line)
    plan = read(tmp_path).plan
    assert [p.case.case_id for p in plan] == ["single-n1-9d66fb", "ddp-n4-cap1_25_25-static-unused-17e08d"]
    (tmp_path / JOURNAL).unlink()
    Journal(tmp_path).begin(plan)
    assert (tmp_path / JOURNAL).read_text() == line


@pytest.mark.parametrize(
    "line",
    [
        '{"plan": [1]}',
        '{"plan": 5}',
        '{"plan": [[{"mode": "ddp"}, {}]]}',
        '{"outcome": [0]}',
        '{"outcome": 3}',
        '{"layout": ["x", 1, 2]}',
        '{"curve": [1]}',
        '{"retry": 7}',
        '{"retry": [{}]}',
        '{"outcome": [1, "ok", "", {}]}',
        '{"outcome": [-1, "ok", "", {}]}',
        '{"outcome": [0, "fine", "", {}]}',
        '{"outcome": [0, "ok", null, {}]}',
        '{"outcome": [0, "ok", "", {"num_buckets": "x"}]}',
        '{"outcome": [0, "ok", "", {"unheard_of": 1}]}',
        '{"on": {"index": 9, "what": "x"}}',
        '{"on": {"index": 0}}',
        '{"on": {"index": null, "what": "x", "curve": [[], 2]}}',
        '{"attempt": {"oom_kills": {"h": "x"}}}',
        '{"attempt": 5}',
        '{"curve": [2, 5]}',
        '{"layout": ["x", ["a"], []]}',
        '{"end": 5}',
    ],
)
def test_a_line_that_holds_something_else_is_named(line: str, tmp_path: Path) -> None:
    written(tmp_path)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write(f"{line}\n")
    for take in (read, Journal):
        with pytest.raises(UsageError, match="line 7 is damaged"):
            take(tmp_path)


def test_a_journal_of_another_plan_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "manifest.json").write_text('{"plan_hash": "another"}')
    with pytest.raises(UsageError, match=r"another plan than manifest\.json"):
        Recorder.reopen(tmp_path)


def test_a_journal_without_its_plan_makes_no_empty_tables(tmp_path: Path) -> None:
    """A damaged first line had made cases.csv a header alone."""
    written(tmp_path)
    (tmp_path / "cases.csv").write_text("mine")
    damaged = "x" + (tmp_path / JOURNAL).read_text()
    (tmp_path / JOURNAL).write_text(damaged)
    with pytest.raises(UsageError, match="tells of no plan"):
        Recorder.reopen(tmp_path)
    assert (tmp_path / "cases.csv").read_text() == "mine"
    assert (tmp_path / JOURNAL).read_text() == damaged


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_manifest_that_cannot_be_read_is_not_replaced(content: str, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match="manifest"):
        finish(tmp_path, "the ranks died")
    assert (tmp_path / "manifest.json").read_text() == content

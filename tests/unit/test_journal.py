"""The journal tells what a killed process can no longer tell, from any prefix of its bytes."""

import pytest
from made import case_of

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.results.journal import (
    JOURNAL,
    Attempt,
    End,
    Journal,
    Layout,
    Retry,
    Settled,
    UnderWay,
    read,
)
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.run.close import finish

CASE = case_of(arch="resnet20", image_size=32, backend="gloo", bucket_cap_mb="1/25")
PLAN = [Planned(case=CASE, num_nodes=1, oversubscribed=True, skip_reason=None)]


def written(folder):
    journal = Journal(folder)
    journal.begin(PLAN)
    journal.write(Attempt(run_id="a"))
    journal.note(0, "its preparation")
    journal.write(Settled(index=0, status="ok", facts={"num_buckets": 2}))
    journal.write(Layout(case_id=CASE.case_id, num_bytes=(8, 4), parameters=((0,), (1, 2))))
    journal.note(0, "round 1 (timed)")
    return journal


def test_what_is_written_comes_back(tmp_path):
    assert written(tmp_path).state == read(tmp_path)
    state = read(tmp_path)
    assert state.plan == PLAN
    assert state.settled[0].facts == {"num_buckets": 2}
    assert state.layouts[CASE.case_id] == BucketLayout((8, 4), ((0,), (1, 2)))
    assert state.under_way == UnderWay(index=0, what="round 1 (timed)")
    assert not state.ended


def test_every_prefix_is_a_journal(tmp_path):
    written(tmp_path)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        known = read(tmp_path)
        Journal(tmp_path).write(End(because="interrupted"))
        again = read(tmp_path)
        assert again.ended == "interrupted", "a line after a cut one is a line of its own"
        assert (again.plan, again.settled, again.layouts) == (known.plan, known.settled, known.layouts)


def test_a_reason_may_name_a_file_whose_name_is_no_text(tmp_path):
    written(tmp_path).write(Settled(index=0, status="failed", reason="no file \udcff"))
    assert read(tmp_path).settled[0].reason == "no file \udcff"


def test_a_case_that_failed_is_no_longer_under_way_and_can_be_tried_again(tmp_path):
    journal = written(tmp_path)
    journal.write(Settled(index=0, status="failed", reason="ValueError"))
    assert read(tmp_path).under_way is None
    journal.write(Retry(indices=(0,)))
    assert read(tmp_path).settled == {}


def test_a_folder_without_one_is_no_run(tmp_path):
    with pytest.raises(UsageError, match=r"journal\.jsonl"):
        read(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"plan","cases":[1]}',
        '{"event":"plan","cases":5}',
        '{"event":"plan","cases":[{"case":{"mode":"ddp"},"num_nodes":1,"oversubscribed":true}]}',
        '{"event":"plan"}',
        '{"event":"settled","index":0}',
        '{"event":"settled","index":1,"status":"ok"}',
        '{"event":"settled","index":-1,"status":"ok"}',
        '{"event":"settled","index":0,"status":"fine"}',
        '{"event":"settled","index":0,"status":"ok","reason":null}',
        '{"event":"settled","index":0,"status":"ok","facts":{"num_buckets":"x"}}',
        '{"event":"settled","index":0,"status":"ok","facts":{"unheard_of":1}}',
        '{"event":"layout","case_id":"x","num_bytes":1}',
        '{"event":"layout","case_id":"x","num_bytes":["a"],"parameters":[]}',
        '{"event":"curve","num_ranks":1}',
        '{"event":"curve","num_ranks":2,"backend":5}',
        '{"event":"retry","indices":7}',
        '{"event":"retry","indices":[{}]}',
        '{"event":"underway","index":9,"what":"x"}',
        '{"event":"underway","index":0}',
        '{"event":"underway","what":"x","curve":[[],2]}',
        '{"event":"attempt","oom_kills":{"h":"x"}}',
        '{"event":"attempt","run_id":5}',
        '{"event":"end","because":5}',
        '{"event":"unheard of"}',
        "5",
    ],
)
def test_a_line_that_holds_something_else_is_named(line, tmp_path):
    written(tmp_path)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write(f"{line}\n")
    for take in (read, Journal):
        with pytest.raises(UsageError, match="line 7 is damaged"):
            take(tmp_path)


def test_a_journal_of_another_plan_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 3, "plan_hash": "another"}')
    with pytest.raises(UsageError, match=r"another plan than manifest\.json"):
        Recorder.reopen(tmp_path)


def test_a_journal_without_its_plan_makes_no_empty_tables(tmp_path):
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
def test_a_manifest_that_cannot_be_read_is_not_replaced(content, tmp_path):
    written(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match="manifest"):
        finish(tmp_path, "the ranks died")
    assert (tmp_path / "manifest.json").read_text() == content

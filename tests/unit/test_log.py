"""The log of a run: cut at any byte, damaged, of an earlier version; what is written of it is read again."""

import math

import pandas as pd
import pytest
from made import new_run, planned, resolved
from selection import in_campaign

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.plan.sweep import hash_plan
from ddp_bench.bench.results import store
from ddp_bench.bench.results.block_times import BlockTimes
from ddp_bench.bench.results.case_columns import FILES
from ddp_bench.bench.results.columns import MAX_NUMBER, MIN_NUMBER, make_frame
from ddp_bench.bench.results.journal import JOURNAL, Completion, Curve, read, read_blocks
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.results.tables import encode_table, read_table
from ddp_bench.bench.run.open_folder import begin_attempt

PLAN = planned(resolved(modes=["ddp", "single"]))
LAST = (PLAN[-1].case, 3)


def add_block(recorder, case, round_index):
    """A timed block of each rank, with names and details that a file of lines has to carry."""
    times = BlockTimes(100 / 3, (50 / 3, 1e-7), {"ready_ms": [0.1, 2.0], "why": 'a,"b"\nc \udcff'})
    ranks = [(f"host\n{rank}", rank, times) for rank in range(case.num_ranks)]
    recorder.add_block(case.case_id, "timed", round_index, 0, round_index / 3, ranks)


@pytest.fixture
def killed(tmp_path):
    """A run that was killed after three rounds."""
    told = {"plan_hash": hash_plan(PLAN), "created_utc": "2026-01-02T03:04:05+00:00"}
    recorder = Recorder.begin(PLAN, new_run(tmp_path / "run", **told))
    begin_attempt(recorder, {})
    for index, _ in enumerate(PLAN):
        recorder.set_outcome(index, "ok", facts={"num_buckets": 2})
    recorder.append_event(Curve(num_ranks=2, backend="gloo", times_ms=[(4096, [1.0, 2.0]), (16384, [3.0])]))
    for round_index in (1, 2, 3):
        for one in PLAN:
            recorder.record_start(0, f"round {round_index} (timed)")
            add_block(recorder, one.case, round_index)
    return tmp_path / "run"


def finished(folder):
    """Its tables, once it has been resumed and has come to its end."""
    recorder = Recorder.reopen(folder)
    case, round_index = LAST
    if (case.case_id, "timed", round_index) not in recorder.list_measured():
        add_block(recorder, case, round_index)
    recorder.write()
    recorder.close(Completion.ROUNDS)
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("every", [61, *in_campaign(5)])
def test_a_log_cut_at_any_byte_loses_the_last_block_at_most_and_goes_on(every, killed):
    log = killed / JOURNAL
    whole = log.read_bytes()
    undamaged = load_run(killed).blocks
    tables = finished(killed)
    begin = whole.rindex(b'{"event": "underway"')
    for length in range(len(whole), begin, -every):
        log.write_bytes(whole[:length])
        for name in FILES:
            (killed / name).unlink(missing_ok=True)
        blocks = load_run(killed).blocks
        lost = LAST[0].num_ranks if length < len(whole) else 0
        assert blocks.equals(undamaged.head(len(undamaged) - lost))
        assert log.read_bytes() == whole[:length], "reading changes nothing"
        assert finished(killed) == tables


def test_zeros_after_a_loss_of_power_are_cut_and_damage_before_whole_lines_is_refused(killed):
    log = killed / JOURNAL
    whole = log.read_bytes()
    log.write_bytes(whole + b"\0" * 5000 + b"\n\0")
    assert len(load_run(killed).blocks) == sum(3 * one.case.num_ranks for one in PLAN)
    Recorder.reopen(killed)
    assert log.read_bytes() == whole
    at = whole.index(b'{"event": "block"')
    log.write_bytes(damaged := whole[:at] + b"x" + whole[at + 1 :])
    number = whole[:at].count(b"\n") + 1
    for go_on in (load_run, Recorder.reopen):
        with pytest.raises(UsageError, match=rf"{JOURNAL} line {number} is damaged"):
            go_on(killed)
    assert log.read_bytes() == damaged


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"block_ms": [33.3333', '"block_ms": [-1.0'),
        ('"block_ms": [33.3333', '"block_ms": [NaN'),
        ('"block_ms": [33.3333', '"block_ms": [1e300'),
        ('"phase": "timed"', '"phase": "tim"'),
        ('"num_steps": [2', '"num_steps": [0'),
        ('"num_steps": [2', '"num_steps": [2, 2'),
        ('"ranks": [0', '"ranks": [99999999'),
        ('"details": ["', '"details": ["{'),
        ('"steps_ms": ["', '"steps_ms": ["x'),
    ],
)
def test_a_block_that_no_run_writes_is_refused(old, new, killed):
    text = (killed / JOURNAL).read_text()
    assert old in text
    (killed / JOURNAL).write_text(text.replace(old, new, 1))
    for go_on in (load_run, Recorder.reopen):
        with pytest.raises(UsageError, match=JOURNAL):
            go_on(killed)


def test_a_killed_run_of_a_version_whose_log_has_no_blocks_is_left_to_that_version(killed):
    log = killed / JOURNAL
    lines = [line for line in log.read_text().splitlines(keepends=True) if '"event": "block"' not in line]
    log.write_text("".join(lines).replace(', "version": 2', ""))
    for go_on in (load_run, Recorder.reopen, read):
        with pytest.raises(UsageError, match="of another version; go on with the ddp-bench that began"):
            go_on(killed)


def test_an_ended_run_of_a_version_whose_log_has_no_blocks_is_read(killed):
    finished(killed)
    whole = load_run(killed)
    log = killed / JOURNAL
    log.write_text(log.read_text().replace(', "version": 2', ""))
    pd.testing.assert_frame_equal(load_run(killed).blocks, whole.blocks)


def test_times_of_blocks_are_kept_only_where_they_are_asked_for(killed):
    """Of a large run they take minutes, and who looks for a case's outcome needs none."""
    events, whole = read(killed), read(killed, with_times=True)
    assert events == whole
    assert events.times is None
    assert whole.num_blocks == 3 * len(PLAN)
    assert {*whole.times.cases} == {one.case.case_id for one in PLAN}


def test_a_block_that_comes_while_a_run_is_read_is_in_none_of_its_tables(killed, monkeypatch):
    reopened = Recorder.reopen(killed)

    def read_then_go_on(folder, **how):
        state = read(folder, **how)
        add_block(reopened, PLAN[0].case, 4)
        return state

    monkeypatch.setattr(store, "read", read_then_go_on)
    run = load_run(killed)
    assert run.blocks["round"].max() == 3


def test_a_block_comes_back_from_the_log_as_it_was_recorded(killed):
    recorder = Recorder.reopen(killed)
    case, round_index = LAST
    add_block(recorder, case, round_index + 1)
    again = Recorder.reopen(killed)
    assert again.times.cases == recorder.times.cases
    assert again.journal.state == recorder.journal.state
    assert again.journal.state.num_blocks == len([*read_blocks(killed)])


EXTREMES = (
    0.0,
    MIN_NUMBER,
    -2.5e-17,
    5e-324,
    MAX_NUMBER,
    1e16,
    -1e16,
    1e300,
    math.inf,
    -math.inf,
    math.nan,
    -1.0,
    1 / 3,
)


@pytest.mark.parametrize("name", FILES)
def test_any_number_of_any_column_is_read_again_once_it_is_written(name, tmp_path):
    usual = {"text": "a", "int": 1, "float": 1.0, "bool": True}
    columns = FILES[name]
    row = {c.name: c.choices[0] if c.choices else usual[c.kind] for c in columns}
    numbers = [c for c in columns if c.kind == "float" and not c.required]
    frame = make_frame([{**row, c.name: number} for c in numbers for number in EXTREMES], columns)
    (tmp_path / name).write_bytes(encode_table(frame))
    again = read_table(tmp_path / name, columns)
    pd.testing.assert_frame_equal(again, frame, rtol=1e-11, check_exact=False)
    for column in numbers:
        assert set(frame[column.name].dropna()) >= {1 / 3, MAX_NUMBER} | (
            {0.0} if column.above < 0 else set()
        )


def test_a_fact_of_a_case_too_small_or_too_large_for_its_table_ends_no_run(killed):
    recorder = Recorder.reopen(killed)
    recorder.set_outcome(0, "ok", facts={"gradient_error": 2.5e-17, "update_error": math.inf})
    recorder.set_outcome(1, "ok", facts={"gradient_error": 1e30})
    cases = load_run(killed).cases
    assert cases["gradient_error"].iloc[0] == 0
    assert cases["update_error"].isna().iloc[0]
    assert cases["gradient_error"].isna().iloc[1]

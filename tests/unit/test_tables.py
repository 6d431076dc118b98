"""Tables of a run: cut at any byte, beyond their limits, of other types."""

import json

import numpy as np
import pandas as pd
import pytest
from gate_runs import write_run
from made import block

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results import tables
from ddp_bench.bench.results.disk import read_json
from ddp_bench.bench.results.schema import BLOCKS, CASES, Column
from ddp_bench.bench.results.store import RunWriter, claim, load_run
from ddp_bench.bench.results.tables import (
    load_blocks,
    read_blocks,
    read_table,
    refused,
    repair_allreduce,
    repair_blocks,
)


def said_of(path, reading, **limits):
    assert callable(reading)
    with pytest.raises(UsageError) as caught:
        reading(path, **limits)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_json_too_deep_too_long_or_broken_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("[" * 100_000)
    assert "nested too deeply" in said_of(path, read_json)
    path.write_text("1" * 10_000)
    assert "not valid JSON" in said_of(path, read_json)
    path.write_bytes(b'{"a": "\xff"}')
    assert "not valid JSON" in said_of(path, read_json)
    path.write_text(json.dumps("x" * 1000))
    assert "too large" in said_of(path, read_json, most_bytes=1000)


def test_a_boolean_is_read_however_it_is_written_and_nothing_else_passes_for_one(tmp_path):
    columns = tuple(c for c in CASES if c.name in ("case_id", "oversubscribed"))
    path = tmp_path / "cases.csv"
    path.write_text("case_id,oversubscribed\na,true\nb,False\nc,\n")
    assert read_table(path, columns)["oversubscribed"].tolist() == [True, False, pd.NA]
    path.write_text("case_id,oversubscribed\na,yes\n")
    with pytest.raises(UsageError, match="oversubscribed is not True or False"):
        read_table(path, columns)


def test_a_table_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    writer = RunWriter(claim(tmp_path / "run"))
    writer.write_manifest(Manifest())
    writer.append("allreduce.csv", [{"num_devices": 2, "backend": "gloo"}] * 50)
    monkeypatch.setattr(tables, "MOST_TABLE_BYTES", 300)
    with pytest.raises(UsageError, match=r"allreduce\.csv is too large: \d+ bytes, at most 300"):
        load_run(tmp_path / "run")


RANKS = {"a": 1, "b": 3}


def write(folder, num_rounds=3):
    writer = RunWriter(folder)
    for round_index in range(1, num_rounds + 1):
        for case_id, phase in (("a", "timed"), ("b", "timed"), ("b", "no_sync")):
            row = block(case_id, round_index, 2.5, phase=phase, host='a,"b"\nc', started_s=1.0)
            writer.append("blocks.csv", [{**row, "rank": rank} for rank in range(RANKS[case_id])])
    writer.close()
    return (folder / "blocks.csv").read_bytes()


def test_a_cut_at_every_byte(tmp_path):
    whole = write(tmp_path)
    path = tmp_path / "blocks.csv"
    all_blocks = [[r["rank"] for r in rows] for rows in read_blocks(path)]
    assert repair_blocks(path, RANKS) == 0
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        repair_blocks(path, RANKS)
        kept = path.read_bytes()
        assert whole.startswith(kept)
        if not kept:
            continue
        blocks = [[r["rank"] for r in rows] for rows in read_blocks(path)]
        assert blocks == all_blocks[: len(blocks)]
        next_block_ends = len(whole) if len(blocks) == len(all_blocks) else None
        assert next_block_ends in (None, len(kept)), "nothing whole is cut"
        assert length - len(kept) < len(whole) / len(all_blocks) * 2


@pytest.mark.parametrize("most_bytes", [tables.MOST_TABLE_BYTES, 0], ids=["all_rows", "longest_ranks"])
def test_a_table_cut_at_any_byte_is_read_up_to_its_last_whole_block(tmp_path, monkeypatch, most_bytes):
    """SIGKILL ends a write between two pages of the file; nobody has resumed yet."""
    monkeypatch.setattr(tables, "is_large", lambda _: most_bytes == 0)
    whole = write(tmp_path)
    path = tmp_path / "blocks.csv"
    key = ["case_id", "phase", "round"]
    undamaged = load_blocks(path, RANKS)
    last_two_blocks = sum(map(len, whole.splitlines(keepends=True)[-6:]))
    for length in range(len(whole) - last_two_blocks, len(whole) + 1):
        path.write_bytes(whole[:length])
        read = load_blocks(path, RANKS)
        pd.testing.assert_frame_equal(read, undamaged.head(len(read)))
        repair_blocks(path, RANKS)
        assert read[key].drop_duplicates().equals(load_blocks(path)[key].drop_duplicates())
    path.write_bytes(whole[:7])
    assert tables.read_table(path, tables.BLOCKS).empty, "its very first write was cut"


@pytest.mark.parametrize("num_zeros", [50, 2**20])
def test_zeros_after_a_power_loss_even_more_than_one_read_of_the_tail(tmp_path, num_zeros):
    whole = write(tmp_path, num_rounds=30)
    path = tmp_path / "blocks.csv"
    path.write_bytes(whole + b"\0" * num_zeros)
    assert repair_blocks(path, RANKS) == num_zeros
    assert path.read_bytes() == whole


def test_curves_that_were_not_finished_go(tmp_path):
    write(tmp_path)
    path = tmp_path / "allreduce.csv"
    header = path.read_bytes()
    path.write_bytes(header + b"2,gloo,4096,1,1,1,1,5\n2,gloo,16384,1,1,1,1,5\n4,gloo,4096,1,1,1,1,5\n4,gl")
    repair_allreduce(path, {(2, "gloo")})
    assert path.read_bytes() == header + b"2,gloo,4096,1,1,1,1,5\n2,gloo,16384,1,1,1,1,5\n"


COUNT = Column("n", "int", "", needed=True, above=0, most=10)
SHARE = Column("s", "float", "")
WORD = Column("w", "text", "", among=("a", "b"))


@pytest.mark.parametrize(
    ("column", "good", "bad"),
    [
        (COUNT, [1, 10], [0, -1, 11, None]),
        (SHARE, [0.0, -5.5, 1e15, None], [float("inf"), float("-inf"), 1e308, 1e-320]),
        (WORD, ["a", None], ["c", ""]),
        (Column("t", "text", "", needed=True), ["x"], [None]),
    ],
)
def test_a_cell_and_a_column_are_judged_alike(column, good, bad):
    values = [*good, *bad]
    allowed = [column.allows(value) for value in values]
    assert allowed == [True] * len(good) + [False] * len(bad)
    missing = np.array([value is None for value in values])
    whole = values if column.kind == "text" else np.array(values, dtype=float)
    assert (~refused(column, whole, missing)).tolist() == allowed


def test_types_are_judged_too():
    assert not COUNT.allows(value=True)
    assert not COUNT.allows("1")
    assert not SHARE.allows([])
    assert SHARE.allows(1)
    assert not WORD.allows(5)


def test_two_cases_of_one_name_are_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "cases.csv").read_text().splitlines(keepends=True)
    (folder / "cases.csv").write_text("".join([*lines, lines[1]]))
    with pytest.raises(UsageError, match="a case_id stands twice"):
        load_run(folder)


def test_nonsense_ends_before_it_is_in_memory(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    monkeypatch.setattr(tables, "_PIECE_ROWS", 2)
    pieces = 0
    checked = tables._checked

    def counted(raw, columns):
        nonlocal pieces
        pieces += 1
        return checked(raw, columns)

    monkeypatch.setattr(tables, "_checked", counted)
    header = ",".join(column.name for column in BLOCKS)
    (folder / "blocks.csv").write_text(f"{header}\n" + "0\n" * 100)
    with pytest.raises(UsageError, match="phase is not"):
        tables.read_table(folder / "blocks.csv", BLOCKS)
    assert pieces == 1


@pytest.mark.parametrize(
    ("name", "least"), [("accumulate", 1), ("micro_batches", 1), ("delay_all_reduce", 0)]
)
def test_a_table_holds_what_its_setting_may_be(name, least):
    """The default is no bound: `--micro-batches 2` is below it."""
    (column,) = [column for column in CASES if column.name == name]
    assert column.allows(least)
    assert not column.allows(least - 1)

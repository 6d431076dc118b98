"""blocks.csv cut at any byte: whole blocks stay, of the last nothing or all."""

import pandas as pd
import pytest

from ddp_bench.bench.results import tables
from ddp_bench.bench.results.store import RunWriter
from ddp_bench.bench.results.tables import load_blocks, read_blocks, repair_allreduce, repair_blocks

RANKS = {"a": 1, "b": 3}


def write(folder, num_rounds=3):
    writer = RunWriter(folder)
    for round_index in range(1, num_rounds + 1):
        for case_id, phase in (("a", "timed"), ("b", "timed"), ("b", "no_sync")):
            row = {
                "case_id": case_id,
                "phase": phase,
                "round": round_index,
                "position": 0,
                "host": 'a,"b"\nc',
                "started_s": 1.0,
                "num_steps": 1,
                "block_ms": 2.5,
                "steps_ms": "2.5",
            }
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

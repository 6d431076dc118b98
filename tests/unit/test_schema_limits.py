"""What a table may hold: the schema's limits, in frames and row by row; every reader takes their result."""

import numpy as np
import pandas as pd
import pytest
from gate_runs import write_run

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results import tables
from ddp_bench.bench.results.schema import BLOCKS, CASES, Column
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.results.tables import read_blocks, refused
from ddp_bench.report.main import main as report

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


def spoil(folder, name, **cells):
    """Replace cells of a table's first row."""
    frame = pd.read_csv(folder / name, dtype="string", keep_default_na=False)
    for column, value in cells.items():
        frame.loc[0, column] = value
    frame.to_csv(folder / name, index=False)


SPOILT = [
    ("cases.csv", {"num_devices": "0"}),
    ("cases.csv", {"num_devices": "4097"}),
    ("cases.csv", {"images_per_s": "inf"}),
    ("cases.csv", {"images_per_s": "-5"}),
    ("cases.csv", {"case_id": ""}),
    ("cases.csv", {"mode": "magic"}),
    ("cases.csv", {"status": "fine"}),
    ("cases.csv", {"global_batch": "1e30"}),
    ("blocks.csv", {"block_ms": "0"}),
    ("blocks.csv", {"block_ms": "inf"}),
    ("blocks.csv", {"num_steps": "0"}),
    ("blocks.csv", {"rank": "-1"}),
    ("blocks.csv", {"round": ""}),
    ("blocks.csv", {"phase": "coffee"}),
]


@pytest.mark.parametrize(("name", "cells"), SPOILT, ids=[f"{n} {c}" for n, c in SPOILT])
def test_no_page_of_impossible_numbers(name, cells, tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    spoil(folder, name, **cells)
    assert report([str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("report: error: ")
    assert f"{next(iter(cells))} is not " in said or "cannot be read" in said
    assert said.count("\n") == 1
    assert not (folder / "report.html").exists()
    if name == "blocks.csv":
        with pytest.raises(UsageError, match="cannot be read"):
            list(read_blocks(folder / name))


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

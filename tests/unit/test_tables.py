"""Tables of a run: cut at any byte, beyond limits, of other types; times by round, and of what trains on."""

import csv
import io
import itertools
import json
import math
import random
from decimal import Decimal

import made
import numpy as np
import pandas as pd
import pytest
from gate_runs import write_run
from selection import in_campaign

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.results import tables
from ddp_bench.bench.results.case_columns import CASES, FILES
from ddp_bench.bench.results.columns import BLOCKS, Column, make_frame
from ddp_bench.bench.results.disk import read_json
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.run_folder import write_blocks
from ddp_bench.bench.results.store import load_run


def said_of(path, reading, **limits):
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


def test_a_blank_line_is_refused_at_once(tmp_path):
    """An archive holds millions in a few KiB."""
    path = tmp_path / "cases.csv"
    path.write_text("case_id\n" + "\n" * 60 * 2**20)
    columns = tuple(c for c in CASES if c.name == "case_id")
    assert "cells: 0, columns: 1 (line 2)" in said_of(path, tables.read_table, columns=columns)


def test_a_table_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", (run / "cases.csv").stat().st_size)
    curves = [{"num_devices": 2, "backend": "gloo", "bytes": 4}] * 5000
    (run / "allreduce.csv").write_bytes(tables.encode_table(make_frame(curves, FILES["allreduce.csv"])))
    with pytest.raises(UsageError, match=r"allreduce\.csv is too large: \d+ bytes, at most "):
        load_run(tmp_path / "run")


RANKS = {"a": 1, "b": 3}


def rows_of(num_rounds=3):
    """The rows of a run's blocks, block by block."""
    for round_index in range(1, num_rounds + 1):
        for case_id, phase in (("a", "timed"), ("b", "timed"), ("b", "no_sync")):
            row = made.block(case_id, round_index, 2.5, phase=phase, host='a,"b"\nc', started_s=1.0, launch=1)
            detail = json.dumps({"ready_ms": [1.0, 0.1 + round_index]}) if phase == "no_sync" else None
            yield [{**row, "rank": rank, "detail": detail} for rank in range(RANKS[case_id])]


def write(folder, num_rounds=3):
    made.write_blocks(folder, itertools.chain(*rows_of(num_rounds)))
    return (folder / "blocks.csv").read_bytes()


def test_a_table_of_blocks_is_that_of_their_rows(tmp_path):
    whole = write(tmp_path)
    write_blocks(tmp_path, map(made.block_of_rows, rows_of()))
    assert (tmp_path / "blocks.csv").read_bytes() == whole
    assert len(whole) <= sum(made.block_of_rows(rows).table_bytes for rows in rows_of()) + len(HEADER) + 100


COUNT = Column("n", "int", "", required=True, above=0, most=10)
SHARE = Column("s", "float", "")
WORD = Column("w", "text", "", choices=("a", "b"))
TRUTH = Column("b", "bool", "")


@pytest.mark.parametrize(
    ("column", "cells", "values", "bad"),
    [
        (COUNT, ["1", "10", "2.0", " 3 "], [1, 10, 2, 3], ["", "0", "11", "1.5", "one", "nan", "1e400"]),
        (SHARE, ["", "-5.5", "1e15"], [math.nan, -5.5, 1e15], ["inf", "nan", "1e308", "1e-320", "x"]),
        (WORD, ["", "a"], [pd.NA, "a"], ["c", "A"]),
        (TRUTH, ["true", "False", ""], [True, False, pd.NA], ["yes", "1"]),
    ],
)
def test_a_cell_is_read_or_refused_by_its_line(column, cells, values, bad, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["x," + column.name, *(f"?,{cell}" for cell in cells), ""]))
    found = tables.read_table(path, (column,))[column.name]
    pd.testing.assert_series_equal(
        found, make_frame([{column.name: v} for v in values], (column,)).squeeze(1)
    )
    for cell in bad:
        path.write_text(f"x,{column.name}\n?,{cells[-1]}\n?,{cell}\n")
        said = said_of(path, lambda path: tables.read_table(path, (column,)))
        assert f"{column.name} cannot be {cell!r} (line 3)" in said


def test_what_spreadsheets_add_is_read_over(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfn\r\n1\r\n2\r\n")
    assert tables.read_table(path, (COUNT,))["n"].tolist() == [1, 2]


def test_a_table_that_was_cut_is_refused(tmp_path):
    """It was written as a whole: what is left of its last line would pass for fewer cases."""
    path = tmp_path / "t.csv"
    path.write_text("n\n1\n2")
    assert "its last line has no end" in said_of(path, lambda path: tables.read_table(path, (COUNT,)))


@pytest.mark.parametrize("num_bytes", [100, 1000])
def test_a_table_in_pieces_is_the_table(num_bytes, tmp_path, monkeypatch):
    path = tmp_path / "blocks.csv"
    content = write(tmp_path)

    whole = tables.load_blocks(path, RANKS)
    assert len(whole) == content.count(b"\n") - 1
    monkeypatch.setattr(tables, "_PIECE_BYTES", num_bytes)
    pd.testing.assert_frame_equal(tables.load_blocks(path, RANKS), whole)
    number = content.count(b"\n") + 1
    path.write_bytes(content + content.splitlines(keepends=True)[-1].replace(b",2.5,", b",-1,"))
    assert f"block_ms cannot be '-1' (line {number})" in said_of(
        path, lambda path: tables.read_table(path, BLOCKS)
    )


HEADER = ",".join(column.name for column in BLOCKS)
USUAL = "b,timed,1,0,1,0,h,1.5,2,0.1,1 2,"
ODD_LINES = [
    *("a,timed,1,nan,1,0,h,1,2,5,,", "a,timed,1,NaN,,0,h,1,2,5,,", 'a,timed,1,0,1,0,""b,1,2,5,,'),
    'a,timed,1,0,1,0,h,1.5,2,0.1,1 2,"{""x"": [1, 2]}"',
    *("a,timed,1,0,1,0,nan,1.5,2,0.1,1 2,", "a,timed,1,0,1,0,h,nan,2,0.1,,", "a,timed,1,0,1,0,h,,2,0.1,,"),
    *("a,timed,1,0,1,0,h,1.5,2,nan,,", "a,timed,1,0,1,0,h,1.5,2,inf,,", "a,timed,1,0,1,0,h,1.5,2,1e-17,,"),
    *("a,timed,1,0,1,0,h,1.5,2,0.1,", "a,timed,1,0,1,0,h,1.5,2,0.1,,,", "", " ", "a", '""', '"'),
    *("a,timed,1.0,0,1,0,h,1,2,1_0,,", "a,timed, +1 ,,,0,h,1,2,5,,", "a,timed,1.5,0,1,0,h,1,2,5,,"),
    *("a,timed,True,0,1,0,h,1,2,5,,", "a,timed,0x1,0,1,0,h,1,2,5,,", "a,timed,1,0,1,99999999,h,1,2,5,,"),
    *("a,timed,1,0,1,0,'=h\\x0a,1,2,5,,", "a,timed,1,0,1,0,'h\\\\,1,2,5,,", "a,time,1,0,1,0,h,1,2,5,,"),
    *('a,timed,1,0,1,0,h"i",1,2,5,,', 'a,timed,1,0,1,0,"h"i,1,2,5,,', 'a,timed,1,0,1,0, "h",1,2,5,,'),
    *('a,timed,1,0,1,0,"h\ni",1,2,5,,', 'a,timed,1,0,1,0,"h,""i",1,2,5,,', 'a,timed,"1",0,1,0,"",1,2,5,,'),
    *("a,timed,1,0,1,0,NA,1,2,5,None,null", "a,timed,1,0,1,0,h\r,1,2,5,,", "a,timed,1,0,1,0,h,1,2,5,,\r"),
    *("a,timed,1,0,1,0,h\0,1,2,5,,", "a,timed,1,0,1,0,h\x0c,1,2,5,,", ",timed,1,0,1,0,h,1,2,5,,"),
    *("a,timed,1,0,1,0,h,1,2,0.1234567890123456789,,", "a,timed,9007199254740993,0,1,0,h,1,2,5,,"),
    *(f"{USUAL},\n{USUAL[:-1]}", f"{USUAL[:-1]}\n{USUAL},", f"{USUAL},x,y\n{USUAL[:-1]}\n{USUAL[:-1]}"),
    *('a,timed,1,0,1,0,"""",1,2,5,,', 'a,timed,1,0,1,0,"""h""",1,2,5,,""', '"a""",timed,1,0,1,0,h,1,2,5,,'),
    *('"a,timed,1,0,1,0,""h,1,2,5,,', 'a,timed,1,0,1,0,"h"",1,2,5,,', 'a,timed,1,0,1,0,"h"""i,1,2,5,,"'),
]
DAMAGE = [b"", b",", b'"', b"\n", b"x", b"1", b" ", b"\xff"]


def outcome(path):
    """The rows, or why there are none."""
    try:
        return tables.read_table(path, BLOCKS).map(repr).to_numpy().tolist()
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("line", ODD_LINES)
def test_columns_are_read_as_cells_are(line, tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("first", "second")]
    for path, before in zip(paths, ([], [USUAL]), strict=True):
        path.write_bytes("\n".join([HEADER, *before, line, USUAL, ""]).encode())
    by_columns = [*map(outcome, paths)]
    monkeypatch.setattr(tables, "_parse_columns", lambda *_: None)
    assert by_columns == [*map(outcome, paths)]


def test_a_number_is_read_to_the_last_digit(tmp_path):
    """Halfway between two numbers, and beside that, each digit counts."""
    draw, texts = random.Random(1), []
    for _ in range(2000):
        number = 10.0 ** draw.uniform(-14, 14)
        halfway = (Decimal(number) + Decimal(math.nextafter(number, math.inf))) / 2
        texts += [f"{number:.12g}", repr(number), f"{number:.30e}", f"{halfway:f}", f"{halfway:f}1"]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["s", *texts, ""]))
    assert tables.read_table(path, (SHARE,))["s"].tolist() == [*map(float, texts)]


def test_a_table_is_written_as_the_csv_module_writes_it():
    words = [
        "",
        "a",
        "a,b",
        'a"b',
        '"',
        ",",
        "a\nb",
        "=1",
        "-1",
        " a",
        "é",
        "'",
        "\\",
        pd.NA,
        '{"a": [1, 2]}',
    ]
    numbers = [*range(len(words) - 1), pd.NA]
    shares = [0.0, -0.0, math.nan, 1 / 3, 1e15, 1e-15, 2.5, *map(float, range(len(words) - 7))]
    truths = [True, False, pd.NA] * (len(words) // 3)
    kinds = {"w": ("text", words), "n": ("int", numbers), "s": ("float", shares), "b": ("bool", truths)}
    columns = tuple(Column(name, kind, "") for name, (kind, _) in kinds.items())
    rows = [*zip(words, numbers, shares, truths, strict=True)]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(
        [[*kinds], *(map(tables.format_csv_value, row) for row in rows)]
    )
    frame = make_frame([dict(zip(kinds, row, strict=True)) for row in rows], columns)
    frame["s"] = shares  # with the sign of zero, which a frame of ours does not have
    assert tables.encode_table(frame) == text.getvalue().encode()


@pytest.mark.parametrize("seeds", [(1,), *in_campaign(range(2, 50))])
def test_columns_of_a_damaged_table_are_read_as_cells_are(seeds, tmp_path, monkeypatch):
    path = tmp_path / "blocks.csv"
    good = [ODD_LINES[0], USUAL, 'a,timed,1,0,1,0,"h,""i",1,2,5,,', "a,timed,1,0,1,0,'=h\\x0a,1,2,5,,"]
    whole = "\n".join([HEADER, *good, ""])
    contents = []
    for draw in (random.Random(f"{seed} {number}") for seed in seeds for number in range(50)):
        content = bytearray(whole.encode())
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(HEADER) + 1, len(content))
            content[at : at + draw.randint(0, 2)] = draw.choice(DAMAGE)
        contents.append(bytes(content))
    found = []
    for by_columns in (True, False):
        if not by_columns:
            monkeypatch.setattr(tables, "_parse_columns", lambda *_: None)
        for content in contents:
            path.write_bytes(content)
            found.append(outcome(path))
    assert found[: len(contents)] == found[len(contents) :]
    assert len({*map(str, found)}) > 5


def test_what_a_run_writes_is_read_by_columns(tmp_path, monkeypatch):
    """Cell by cell a large run would take four times as long."""
    write(tmp_path)
    left = []
    monkeypatch.setattr(tables, "_parse_rows", lambda lines, *_: iter(left.append([*lines]) or ()))
    assert len(tables.read_table(tmp_path / "blocks.csv", BLOCKS)) == 21
    assert left == [[]]


@pytest.mark.parametrize(("name", "least"), [("accumulate", 1), ("micro_batches", 1)])
def test_a_table_holds_what_its_setting_may_be(name, least):
    """The default is no bound: `--micro-batches 2` is below it."""
    (column,) = [column for column in CASES if column.name == name]
    assert column.can_hold(least)
    assert not column.can_hold(least - 1)


def block(round_index, *, num_ranks=4):
    made_rows = (made.block("b", round_index, 100.0, phase="anatomy", rank=rank) for rank in range(num_ranks))
    local = {"local_last_ready_ms": 40.0}
    return [
        row | {"detail": json.dumps({**local, "last_ready_ms": 50.0 + rank, "ready_ms": [1.0 + rank, 2.0]})}
        for rank, row in enumerate(made_rows)
    ]


def test_details_are_medians_over_ranks_and_moments_those_of_every_block():
    case = RoundTimes(made.block_of_rows(block(r)) for r in (1, 2, 3)).get_case("b")
    assert case.details["compute_slowdown"] == pytest.approx(dict.fromkeys((1, 2, 3), 51.5 / 40))
    assert np.median(case.collect_bucket_moments(2)[3]["ready_ms"], axis=0).tolist() == [4.0, 2.0]
    assert case.collect_bucket_moments(3) == {}, "of another layout"


@pytest.mark.parametrize(
    "line",
    [
        *("a,timed,1,0,1,0,h,0,0,1,1,", "a,timed,1,0,1,0,h,0,1,nan,1,", "a,timed,one,0,1,0,h,0,1,1,1,"),
        "a,timed,1,0,1,0,h,0,1,1,one,",
        "a,anatomy,1,0,1,0,h,0,1,1,1,{",
        'a,timed,1,0,1,0,h,0,1,1,1,"{""gpus"": 5}"',
        'a,timed,1,0,1,0,h,0,1,1,1,"{""gpus"": {""0"": [1]}}"',
        'a,timed,1,0,1,0,h,0,1,1,1,"{""gpus"": {""0"": {""power_w"": ""much""}}}"',
        "a,timed,1,0",
        f"a,timed,1,0,1,0,{'h' * 5_000_000},0,1,1,1,",
    ],
)
def test_a_file_that_is_not_whole_is_refused(line, tmp_path):
    path = tmp_path / "blocks.csv"
    path.write_text(",".join(c.name for c in BLOCKS) + "\n" + line + "\n")
    refused = pytest.raises(UsageError, match=r"blocks\.csv cannot be read")
    with refused as caught, tables.report_read_errors(path):
        made.times_of(tables.load_blocks(path, {}))
    assert ("cells: " in str(caught.value)) == (line == "a,timed,1,0")

"""Any damage to a results folder: it is read, or refused in one line, and nothing is written."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from fuzzing import HOSTILE_TEXT, bounded, read_or_refused
from hypothesis import given
from hypothesis import strategies as st

from ddp_bench.bench.gate import main as gate
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.results.tables import read_blocks, readable
from ddp_bench.report.build import load
from ddp_bench.report.main import main as report

SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"
TABLES = ("cases.csv", "blocks.csv", "buckets.csv", "allreduce.csv")
CELLS = st.one_of(
    HOSTILE_TEXT.map(lambda text: text.replace(",", "").replace('"', "").replace("\n", "")),
    st.sampled_from(
        ["", "0", "-0.0", "NaN", "1e308", "-1e308", "1e-320", "9223372036854775808", "True", "[1]"]
    ),
)


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes of a table with one thing wrong."""
    kind = draw(
        st.sampled_from(["cut", "flip", "insert", "swap", "cell", "cell", "cell", "twice", "drop", "column"])
    )
    if kind == "cut":
        return content[: draw(st.integers(0, len(content)))]
    place = draw(st.integers(0, max(len(content) - 1, 0)))
    if kind == "flip":
        return content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
    if kind == "insert":
        junk = draw(st.sampled_from([b"\x00", b"\xff\xfe", b'"', b",", b"\r", b"\n\n", b"'", b"x" * 200_000]))
        return content[:place] + junk + content[place:]
    lines = [line.split(",") for line in content.decode().splitlines()]
    row = draw(st.integers(0, len(lines) - 1))
    column = draw(st.integers(0, len(lines[0]) - 1))
    other = draw(st.integers(0, len(lines[0]) - 1))
    if kind == "swap":
        lines[0][column], lines[0][other] = lines[0][other], lines[0][column]
    elif kind == "cell":
        lines[row][min(column, len(lines[row]) - 1)] = draw(CELLS)
    elif kind == "twice":
        lines.append(lines[row])
    elif kind == "drop":
        del lines[row]
    else:
        cell = draw(CELLS)
        lines = [lines[0], *([*line[:column], cell, *line[column + 1 :]] for line in lines[1:])]
    return "\n".join(",".join(line) for line in lines).encode("utf-8", "replace") + b"\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path_factory.mktemp("fuzz") / "run"))


def quietly(command: Callable[[list[str]], int], *arguments: str) -> int:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()) as shown:
        code = command(list(arguments))
    assert "Traceback" not in said.getvalue()
    assert all(line.isprintable() for line in [*said.getvalue().splitlines(), *shown.getvalue().splitlines()])
    return code


def read_times(path: Path) -> None:
    """As a resumed run reads its blocks."""
    with readable(path):
        RoundTimes(read_blocks(path))


@contextlib.contextmanager
def damaged(folder: Path, name: str, content: bytes) -> Any:
    (folder / name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    try:
        yield
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "reading writes nothing"
    finally:
        shutil.copy(SAMPLE / name, folder / name)


@pytest.mark.parametrize("name", TABLES)
def test_any_damage_to_a_table(folder: Path, name: str) -> None:
    @bounded(40)
    @given(content=damage((SAMPLE / name).read_bytes()))
    def play(content: bytes) -> None:
        with damaged(folder, name, content):
            read_or_refused(lambda: load_run(folder))
            if name == "blocks.csv":
                read_or_refused(lambda: read_times(folder / name))
            assert quietly(gate.main, str(SAMPLE), str(folder)) in (0, 1, 2, 3)

    play()


@pytest.mark.parametrize("name", TABLES)
def test_a_report_of_a_damaged_table(folder: Path, name: str, tmp_path: Path) -> None:
    @bounded(8)
    @given(content=damage((SAMPLE / name).read_bytes()))
    def play(content: bytes) -> None:
        with damaged(folder, name, content):
            read_or_refused(lambda: load([folder], tmp_path))
            assert quietly(report, str(folder), "--markdown") in (0, 2)

    play()


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), HOSTILE_TEXT),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(HOSTILE_TEXT, inner, max_size=2),
    max_leaves=4,
)
MANIFEST = json.loads((SAMPLE / "manifest.json").read_text(encoding="utf-8"))


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    """The sample's manifest with one value replaced, at any depth."""
    made = json.loads(json.dumps(MANIFEST))
    place: Any = made
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        inside = place[key]
        if not isinstance(inside, dict | list) or not inside or draw(st.booleans()):
            place[key] = draw(JSON_VALUES)
            return json.dumps(made).encode()
        place = inside


@bounded(30)
@given(
    content=manifests()
    | st.binary(max_size=20)
    | st.sampled_from([b"[" * 100_000, b"1" * 5000, b"{}", b"[]"])
)
def test_any_manifest(folder: Path, content: bytes) -> None:
    with damaged(folder, "manifest.json", content):
        read_or_refused(lambda: load([folder], folder))
        assert quietly(gate.main, str(SAMPLE), str(folder)) in (0, 1, 2, 3)
        assert quietly(report, str(folder), "--markdown") in (0, 2)


def test_a_refused_run_gets_no_page(folder: Path, tmp_path: Path) -> None:
    with damaged(folder, "cases.csv", b'case_id,images_per_s\n"x,many\n'):
        assert quietly(report, str(folder)) == 2
        assert quietly(report, str(folder), "--png", str(tmp_path / "png")) == 2
        assert not (tmp_path / "png").exists()

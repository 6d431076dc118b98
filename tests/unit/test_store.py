import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.schema import CASES, FILES, README, typed_frame, with_tables
from ddp_bench.bench.results.store import (
    MOST_FAILURE_BYTES,
    RUN_FILES,
    FolderLock,
    RunWriter,
    check_claimable,
    claim,
    failure_file,
    load_run,
    shown,
    write_output,
)

BLOCK = {
    "case_id": "single-n1",
    "phase": "timed",
    "round": 1,
    "position": 0,
    "rank": 0,
    "host": 'a,"b"\nc',
    "started_s": 1.5,
    "num_steps": 2,
    "block_ms": 20.25,
    "steps_ms": "10 10.25",
}


def written(folder):
    writer = RunWriter(claim(folder))
    writer.write_manifest(Manifest(seed=7))
    return writer


def test_what_is_written_comes_back_with_its_types(tmp_path):
    writer = written(tmp_path / "run")
    writer.append("blocks.csv", [BLOCK, {**BLOCK, "round": 2}])
    case = {
        "case_id": "single-n1",
        "status": "ok",
        "mode": "single",
        "num_devices": 1,
        "global_batch": 16,
        "unit": "images",
        "units_per_sample": 1,
        "oversubscribed": False,
        "images_per_s": 1 / 3,
    }
    writer.replace("cases.csv", typed_frame([case], CASES))
    run = load_run(tmp_path / "run")
    assert run.manifest.seed == 7
    assert run.blocks["host"].tolist() == [BLOCK["host"]] * 2
    assert run.blocks["round"].tolist() == [1, 2]
    assert run.cases["images_per_s"].iloc[0] == pytest.approx(1 / 3)
    assert run.cases["oversubscribed"].iloc[0] is False or not run.cases["oversubscribed"].iloc[0]
    assert pd.isna(run.cases["comm_ms"].iloc[0]), "missing is empty, never 0"
    assert list(run.buckets.columns) == [c.name for c in FILES["buckets.csv"]]


def test_missing_is_an_empty_field(tmp_path):
    writer = written(tmp_path / "run")
    writer.replace("cases.csv", typed_frame([{"case_id": "x", "images_per_s": float("nan")}], CASES))
    line = (tmp_path / "run" / "cases.csv").read_text().splitlines()[1]
    assert line == "x" + "," * (len(CASES) - 1)


def test_a_folder_with_other_files_or_a_file_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already holds"):
        check_claimable(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        check_claimable(tmp_path / "notes.txt" / "run")
    with pytest.raises(UsageError):
        check_claimable(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_checking_leaves_no_trace(tmp_path):
    check_claimable(tmp_path / "x" / "y")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match="not a results folder"):
        load_run(tmp_path)
    folder = tmp_path / "run"
    writer = written(folder)
    writer.append("blocks.csv", [BLOCK])
    with (folder / "blocks.csv").open("a") as file:
        file.write("single-n1,timed,one,0,0,h,0,1,1,1,\n")
    with pytest.raises(UsageError, match=r"blocks\.csv cannot be read") as caught:
        load_run(folder)
    assert "\n" not in str(caught.value)
    (folder / "manifest.json").write_text('{"schema_version": 99}')
    with pytest.raises(UsageError, match="schema 99"):
        load_run(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        load_run(folder)


def test_the_documented_columns_are_the_schemas():
    page = README.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run python -m bench.results.schema --write"
    assert all(f"## `{name}`" in page for name in FILES)


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match=r"no place for the columns of cases\.csv"):
        with_tables("# Results\n<!-- columns of cases.csv -->\n")


@pytest.mark.parametrize("name", sorted(RUN_FILES))
def test_no_output_takes_the_place_of_what_was_measured(name, tmp_path):
    (tmp_path / name).write_text("measured")
    with pytest.raises(UsageError, match="is a file of a run's results"):
        write_output(tmp_path / name, lambda part: part.write_text("x"), option="--out")
    assert (tmp_path / name).read_text() == "measured"


def test_an_output_is_whole_or_not_written_and_follows_no_link(tmp_path):
    elsewhere, link = tmp_path / "elsewhere.txt", tmp_path / "link.csv"
    elsewhere.write_text("theirs")
    link.symlink_to(elsewhere)
    write_output(link, lambda part: part.write_text("new"), option="--csv")
    assert (elsewhere.read_text(), link.read_text(), link.is_symlink()) == ("theirs", "new", False)

    def breaks(part):
        part.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_output(link, breaks, option="--csv")
    assert link.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.txt", "link.csv"]


def test_a_run_does_not_begin_inside_another(tmp_path):
    for name in ("manifest.json", "cases.csv"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="is inside the results of"):
        check_claimable(tmp_path / "a" / "b")


def test_failures_of_a_case_are_added_to_its_file(tmp_path):
    writer = written(tmp_path / "run")
    path = writer.append_failure("ddp-n2-cap1_25", "first\n")
    assert path == tmp_path / "run" / "failures" / "ddp-n2-cap1_25.txt"
    writer.append_failure("ddp-n2-cap1_25", "second \ud800\n")
    assert path.read_text() == "first\nsecond \\ud800\n"
    writer.append_failure("ddp-n2-cap1_25", "x" * MOST_FAILURE_BYTES)
    assert path.read_text().startswith("What stood here before is left out: more than 4,194,304 bytes.\n\nxx")
    writer.append_failure("ddp-n2-cap1_25", "last\n")
    assert path.stat().st_size < MOST_FAILURE_BYTES
    assert path.read_text().endswith("\nlast\n")
    writer.close()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "", "a b\n", "x" * 300, "\u706b", "a/b", "a-b"]
)
def test_any_name_of_a_case_gives_a_file_of_its_own(name):
    path = Path(failure_file(name))
    assert path.parent == Path("failures")
    assert path.name.isprintable()
    assert path.name.isascii()
    assert len(path.name) < 200
    assert failure_file(name) != failure_file(f"{name}?")
    assert (path.name == f"{name}.txt") == (name == "a-b")


def test_a_failure_is_not_written_through_a_link(tmp_path):
    writer = written(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "failures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        writer.append_failure("a", "text")
    assert not any((tmp_path / "elsewhere").iterdir())
    writer.close()


def test_a_path_is_shown_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "results" / "run") == shown(Path("results/run")) == "results/run"
    assert shown(Path("/elsewhere/run")) == "/elsewhere/run"


def test_the_lock_of_a_killed_process_holds_nobody_up(tmp_path):
    code = (
        "import sys, pathlib; from ddp_bench.bench.results.store import FolderLock;"
        "x = FolderLock(pathlib.Path(sys.argv[1]));"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {other.pid}"):
            FolderLock(tmp_path)
        other.kill()
        other.wait()
    FolderLock(tmp_path).release()

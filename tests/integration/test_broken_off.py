"""A real run as a fault leaves it: its files are brought up to date without its ranks; a resume goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from in_process import Reached

from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.run.close import finish, finish_and_say
from ddp_bench.bench.run.main import main

if TYPE_CHECKING:
    from conftest import RealRun


@pytest.fixture
def broken_off(real_run: RealRun, tmp_path: Path) -> Path:
    """The run, but killed in the middle of a row of its last block: no end, no table of cases, no page."""
    folder = Path(shutil.copytree(real_run.data.path, tmp_path / "run"))
    journal = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    assert '"event": "end"' in journal[-1]
    (folder / "journal.jsonl").write_text("".join(journal[:-1]))
    blocks = (folder / "blocks.csv").read_bytes()
    (folder / "blocks.csv").write_bytes(blocks[:-20])
    for name in ("cases.csv", "report.html"):
        (folder / name).unlink()
    return folder


def test_its_files_are_brought_up_to_date_once(
    broken_off: Path, real_run: RealRun, capsys: pytest.CaptureFixture[str]
) -> None:
    finish_and_say(broken_off, "interrupted")
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith(f"python -m bench.run --resume {broken_off}")
    assert "interrupted; 6 of 8 cases have results in " in said[-2]
    run, whole = load_run(broken_off), real_run.data
    assert run.manifest.timing.stopped_because == "interrupted"
    assert run.cases["status"].tolist() == whole.cases["status"].tolist()
    same = ["case_id", "mode", "num_devices", "bucket_cap_mb", "bucket_bytes"]
    pd.testing.assert_frame_equal(run.cases[same], whole.cases[same])
    assert len(run.blocks) < len(whole.blocks)
    assert "<svg" in (broken_off / "report.html").read_text(encoding="utf-8")
    assert finish(broken_off, "interrupted") is None


@pytest.mark.usefixtures("in_process")
def test_a_resume_needs_as_many_workers_as_its_plan(broken_off: Path) -> None:
    with pytest.raises(Reached):
        main(["--resume", str(broken_off), "--quiet"])

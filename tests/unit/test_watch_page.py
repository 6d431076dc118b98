"""Page and terminal of a watched training, and what no file may hold."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from watched_folders import (
    ALONE_S,
    EXPOSED_S,
    OWN_S,
    OWN_S_OF_WATCH,
    lengthen,
    list_rows,
    trained,
    training,
    watched_run,
    write_rows,
)

from ddp_bench.bench.common.numbers import format_interval
from ddp_bench.bench.export.main import main as export
from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.watch import launch, result
from ddp_bench.bench.watch.result import write_result
from ddp_bench.report.main import main as report

PLANTED = "PLANTED-4711"


def test_the_end_says_in_one_sentence_what_watching_took_by_its_own_clock(tmp_path, capsys):
    """The rank on which it took most counts: 1.2 ms of a step of 120 ms, which probes do not change."""
    run = watched_run(write_rows(tmp_path / "watched", training()), quiet=False)
    watched, step_s = run.manifest.watched, sum(OWN_S.values()) + EXPOSED_S
    assert watched.own_ms == pytest.approx(2 * 1000 * OWN_S_OF_WATCH)
    probes_s = 17 * (ALONE_S - EXPOSED_S) / 80
    assert watched.own_pct == pytest.approx(100 * 2 * OWN_S_OF_WATCH / (step_s + probes_s), rel=0.01)
    said = (
        "Watching itself took 1.2 ms of each step (0.95%) by its own clock; 17 steps (probes) ran without "
        "overlap, to measure communication."
    )
    assert said in " ".join(capsys.readouterr().err.split())
    assert said in (tmp_path / "watched" / "report.html").read_text()


def test_the_end_says_what_was_found_with_units_and_intervals(tmp_path, capsys):
    watched_run(write_rows(tmp_path / "watched", training(noise=0.02, late_s=0.03)), quiet=False)
    said = " ".join(capsys.readouterr().err.split())
    for words in (
        "Communication ",
        " ms, ",
        "Straggler Rank 1 is a straggler: ",
        "75 of 80 optimizer steps compared · 17 of them held gradients back (probes) · ",
        "ended with exit code 0",
        "Next step Look at ",
        "--out after -- torchrun train.py && ",
    ):
        assert words in said
    assert said.endswith("watched/report.html")
    write_result(write_rows(tmp_path / "quiet", training()), 0, quiet=True)
    assert capsys.readouterr().err == ""


def test_the_page_tells_which_step_time_is_which_and_how_exposed_communication_was_estimated(tmp_path):
    trained(tmp_path / "watched")
    assert report([str(tmp_path / "watched"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for words in ("Step of any rank, median", "without communication, from probes", "Exposed by", "(step "):
        assert words in page
    for words in ("1 of 1 case", "steps/s", "(round ", "All cases", "median of", "of all modes"):
        assert words not in page


def test_what_the_user_typed_and_has_in_the_environment_stays_in_the_manifest(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", PLANTED)
    folder = write_rows(tmp_path / "watched", training())
    run = watched_run(folder, command=("torchrun", "train.py", f"--name={PLANTED}"), with_page=True)
    assert run.manifest.watched.command[-1] == f"--name={PLANTED}"
    assert run.manifest.watched.env["NCCL_SOCKET_IFNAME"] == PLANTED
    archive, json_file = tmp_path / "run.zip", tmp_path / "benchmark.json"
    assert export([str(folder), "--format", "zip", "--out", str(archive)]) == 0
    assert export([str(folder), "--format", "pytest-benchmark", "--out", str(json_file)]) == 0
    assert report([str(folder), "--markdown"]) == 0
    assert report([str(archive), "--out", str(tmp_path / "of-archive.html")]) == 0
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "another")
    trained(tmp_path / "other", noise=0.4)
    sides = [str(folder), str(tmp_path / "other")]
    gate([*sides, "--html", str(tmp_path / "gate.html"), "--markdown"])
    gate([*sides, "--json"])
    of_archive = load_run(archive).manifest
    assert of_archive.watched.command == ()
    assert of_archive.watched.ranks == run.manifest.watched.ranks, "its figures are there"
    assert [case.exposed_by for case in load_run(archive).results] == ["probes"]
    assert PLANTED not in capsys.readouterr().out
    gate(sides)
    again = f"-- torchrun train.py --name={PLANTED} && "
    assert again in capsys.readouterr().out, "but on the user's terminal"
    assert PLANTED.encode() not in of_archive.to_json()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    holding = {path.name for path in files if PLANTED.encode() in path.read_bytes()}
    assert holding == {"manifest.json"}
    assert {"report.html", "of-archive.html", "benchmark.json", "run.zip", "steps.csv"} <= {
        p.name for p in files
    }


def test_the_page_shows_a_step_by_part_and_rank_and_why_their_sum_is_not_the_step(tmp_path):
    """Gains lead the cards; two of three steps have 20 ms in one part, so both parts have a median of 20."""
    made = training(late_s=0.03, late_part="forward")
    for row in list_rows(made):
        lengthen(row, collectives=0.02 * (row["n"] % 3 != 0), evaluation=0.02 * (row["n"] % 3 != 1))
    watched_run(write_rows(tmp_path / "watched", made), with_page=True)
    page = (tmp_path / "watched" / "report.html").read_text()
    parts_ms, step_ms = 150 + 40, 150 + 20
    for words in (
        f"the parts of rank 0 add up to {parts_ms} ms and its median step takes {step_ms} ms. The slowest ",
        "a fix saves up to 30.0 ms, ",
        "Where a step goes, by rank",
        "Where a step goes, in ms",
        "Rank 1 is a straggler",
        "rank 1 · ",
    ):
        assert words in page
    assert "Environment variables" not in page


def test_the_page_and_the_terminal_name_the_script_and_not_its_folder(tmp_path, capsys):
    command = ("torchrun", "--nproc-per-node", "2", "/home/somebody/train.py", "--config", "x.py")
    run = watched_run(write_rows(tmp_path / "watched", training()), command=command, quiet=False)
    assert capsys.readouterr().err.startswith(
        "train.py, 2 CPU cores: 120 ms per step · 0.00381 MiB of gradients\n"
    )
    page = (run.path / "report.html").read_text()
    assert "<title>train.py, watched" in page
    assert "somebody" not in page
    assert {case.arch for case in run.results} == {"watched script"}, "a gate compares scripts of two names"


def test_communication_that_is_not_told_from_none_is_said_with_its_upper_end(tmp_path):
    made = training(noise=0.05)
    for row in list_rows(made):
        if not row["syncs"][0]["probe"]:
            row["syncs"][0]["end_s"] -= EXPOSED_S
            lengthen(row, backward=-EXPOSED_S)
    run = watched_run(write_rows(tmp_path / "watched", made))
    exposed = run.results[0].exposed_comm_ms
    assert exposed.low < 0 < exposed.high
    found = conclude_watch(run)
    [said] = [one.sentence for one in found.others]
    assert f"ommunication adds 0 to {exposed.high:.1f} ms to each DDP step, " in said
    assert not found.costs


def test_commands_propose_a_folder_that_does_not_exist_yet(tmp_path, monkeypatch, capsys):
    """A watch into `after` proposed to watch into `after` again, and to compare that folder with itself."""
    monkeypatch.chdir(tmp_path)
    for name in ("after", "after-2", "again"):
        watched_run(write_rows(Path(name), training(late_s=0.03)), quiet=False)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"--out after-2 -- torchrun train\.py && \S+( -m \S+)? after after-2 ", said)
    assert re.search(r"--out after-3 -- torchrun train\.py && \S+( -m \S+)? after-2 after-3 ", said)
    assert "again, with --out again: " in said
    assert "again, with --out again-2: " in said


def test_a_step_without_communication_is_the_same_on_a_card_and_in_the_table(tmp_path):
    found = conclude_watch(run := trained(tmp_path / "watched", noise=0.05))
    (cost,) = found.costs
    without = format_interval(run.results[0].get_interval("no_sync_step_ms"), "ms")
    assert f"Without communication a step would take {without} instead of " in cost.remedy


@pytest.mark.parametrize("when", ["await_rows", "build_page"])
def test_a_signal_while_the_report_is_made_ends_in_the_command_that_makes_it(
    tmp_path, monkeypatch, capsys, when
):
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # the handler raises here

    folder = write_rows(tmp_path / "watched", training())
    monkeypatch.setattr(launch if when == "await_rows" else result, when, interrupt)
    assert launch.report(folder, {0, 1}, 0, False, ["train.py"], ()) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    [said] = capsys.readouterr().err.splitlines()
    assert said.endswith(f"report {folder} makes the page")
    assert not (folder / "report.html").exists()
    monkeypatch.undo()
    assert report([str(folder)]) == 0
    assert "Communication" in (folder / "report.html").read_text()

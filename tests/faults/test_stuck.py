"""What cannot be ended, or was not asked to: the run closes, with its page. The kernel's part needs root."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import ROOT, TINY, eventually, has_ended
from PIL import Image

from ddp_bench.bench.common.errors import ExitCode
from ddp_bench.bench.results.store import load_run

pytestmark = pytest.mark.campaign

LIMIT_S = 240.0
RUN = (*TINY, "--modes", "ddp", "--gpus", "2", "--bucket-cap-mb", "default", "--passes", "none")


class Run:
    """A run under way, of cases `single-n1` and `ddp-n2`; it is killed if the test fails.

    Its stderr is a file: a pipe would last as long as a worker that does not end.
    """

    def __init__(self, out, *more, rounds):
        self._log = out.with_name(f"{out.name}.txt")
        command = [sys.executable, "-m", "bench.run", *RUN, "--rounds", str(rounds), "--out", str(out), *more]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def ended(self):
        """Its exit code, and what it said."""
        return self.process.wait(LIMIT_S), self._log.read_text()


def reached(out, number):
    """Wait for the beginning of a round."""
    journal = out / "journal.jsonl"
    eventually(lambda: journal.exists() and f"round {number} (" in journal.read_text(), LIMIT_S)


def server_of(conductor):
    """The process whose forks the workers are, and these by rank."""
    (server,) = [
        one
        for one in psutil.Process(conductor.process.pid).children()
        if "worker.main" in " ".join(one.cmdline())
    ]
    return server, sorted(server.children(), key=lambda one: one.create_time())


def closed(out, because):
    """Its files and its page tell of every round that was finished."""
    found = load_run(out)
    assert found.manifest.timing.stopped_because == because
    assert found.manifest.timing.rounds >= 2
    assert found.cases["images_per_s"].notna().any()
    assert (out / "report.html").exists()


@pytest.fixture
def freezer():
    """A control group whose processes the kernel holds once it is frozen: SIGKILL waits, too."""
    group = Path("/sys/fs/cgroup/freezer") / f"ddp-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make a control group of the first version's freezer")
    yield group
    (group / "freezer.state").write_text("THAWED")
    eventually(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_worker_that_sigkill_cannot_end_does_not_hold_the_run(tmp_path, freezer):
    out = tmp_path / "run"
    with Run(out, "--case-timeout", "30s", "--quiet", rounds=500) as started:
        reached(out, 3)
        _, workers = server_of(started)
        (freezer / "cgroup.procs").write_text(str(workers[1].pid))
        (freezer / "freezer.state").write_text("FROZEN")
        code, said = started.ended()
        assert code == ExitCode.NOT_MEASURED
        *_, how_to_go_on, left = said.splitlines()
        assert "python -m bench.run --resume" in how_to_go_on
        assert left.startswith(f"bench.run: process {workers[1].pid} does not end though killed: the kernel ")
        assert "Traceback" not in said
        assert not has_ended(workers[1].pid)
    closed(out, "a process does not end")


@pytest.mark.parametrize("asked", [False, True], ids=["to its end", "asked to end"])
def test_a_stopped_fork_server_holds_nobody_up(tmp_path, *, asked):
    out = tmp_path / "run"
    with Run(out, "--quiet", rounds=500 if asked else 6) as started:
        reached(out, 3)
        server, workers = server_of(started)
        server.send_signal(signal.SIGSTOP)
        if asked:
            started.process.terminate()
        assert started.ended()[0] == (ExitCode.INTERRUPTED if asked else ExitCode.OK)
    closed(out, "interrupted" if asked else "all rounds done")
    assert all(has_ended(one.pid) for one in (server, *workers))


def test_a_killed_loader_of_images_costs_the_case_that_it_loaded_for(tmp_path):
    """Torch raises in its rank: within a block, or between commands, which ends the rank: a new one comes."""
    for red in range(16):
        path = tmp_path / "images" / "class" / f"{red}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (red, 0, 0)).save(path)
    out = tmp_path / "run"
    data = ("--data", str(tmp_path / "images"), "--data-workers", "1")
    with Run(out, "--quiet", "--case-timeout", "60s", *data, rounds=60) as started:
        reached(out, 3)
        _, workers = server_of(started)
        loaders = eventually(workers[1].children, LIMIT_S)
        loaders[0].kill()
        code, _ = started.ended()
    assert code in (ExitCode.OK, ExitCode.NOT_MEASURED)
    found = load_run(out)
    assert (out / "report.html").exists()
    failed = found.cases[found.cases["status"] == "failed"]
    if failed.empty:
        assert (out / "journal.jsonl").read_text().count('"attempt"') == 2
        assert (found.cases["num_rounds"] == 60).all()
    else:
        assert len(failed) == 1
        assert re.search(r"is killed by signal|ended with exit code 1 in round", failed["reason"].iloc[0])

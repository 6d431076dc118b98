"""What cannot be ended, or was not asked to end, and others on the machine: the run closes, with its page.

Another user's part is played by `nobody`; that and the kernel's part need root.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import ROOT, TINY, eventually, has_ended
from PIL import Image

from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.results.store import load_run

pytestmark = pytest.mark.campaign

LIMIT_S = 240.0
RUN = (*TINY, "--modes", "ddp", "--gpus", "2", "--bucket-cap-mb", "default", "--passes", "none")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Run:
    """A run under way, of cases `single-n1` and `ddp-n2`; it is killed if the test fails.

    Its stderr is a file: a pipe would last as long as a worker that does not end.
    """

    def __init__(self, out, *more, rounds=6, env=None):
        self._log = out.with_name(f"{out.name}.txt")
        command = [sys.executable, "-m", "bench.run", *RUN, "--rounds", str(rounds), "--out", str(out), *more]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | (env or {}), stdout=subprocess.DEVNULL, stderr=log
            )

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
        if "worker.forks" in " ".join(one.cmdline())
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


def test_a_gate_whose_run_sigkill_cannot_end_ends_at_a_signal(tmp_path, freezer):
    """Its workers, which have the run's stderr open, are held by the kernel too."""
    out = tmp_path / "sides"
    command = ["-m", "bench.gate", "--interleave", ".", "--launches", "1", "--out", str(out), "--"]
    gate = subprocess.Popen(
        [sys.executable, *command, *RUN, "--rounds", "500"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        reached(out / "launch1" / "candidate", 3)
        held = [one.pid for one in psutil.Process(gate.pid).children(recursive=True)]
        for pid in held:
            (freezer / "cgroup.procs").write_text(str(pid))
        (freezer / "freezer.state").write_text("FROZEN")
        gate.terminate()
        assert gate.wait(LIMIT_S) == ExitCode.INTERRUPTED
        assert not any(has_ended(pid) for pid in held)
    finally:
        gate.kill()


def test_a_stopped_fork_server_holds_nobody_up(tmp_path):
    out = tmp_path / "run"
    with Run(out, "--quiet") as started:
        reached(out, 3)
        server, workers = server_of(started)
        server.send_signal(signal.SIGSTOP)
        assert started.ended() == (0, "")
    closed(out, "all rounds done")
    assert all(has_ended(one.pid) for one in (server, *workers))


def test_a_signal_ends_a_run_whose_fork_server_is_stopped(tmp_path):
    out = tmp_path / "run"
    with Run(out, "--quiet", rounds=500) as started:
        reached(out, 3)
        server, workers = server_of(started)
        server.send_signal(signal.SIGSTOP)
        started.process.terminate()
        assert started.ended()[0] == ExitCode.INTERRUPTED
    closed(out, "interrupted")
    assert all(has_ended(one.pid) for one in (server, *workers))


def test_a_terminal_that_closes_ends_a_run_as_sigterm_does(tmp_path):
    out = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(
            sys.executable, [sys.executable, "-m", "bench.run", *RUN, "--rounds", "500", "--out", str(out)]
        )
    reached(out, 3)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == ExitCode.INTERRUPTED
    closed(out, "interrupted")


def test_another_run_in_the_place_of_a_renamed_one_is_left_as_it_is(tmp_path):
    out, other = tmp_path / "run", tmp_path / "other"
    with Run(other, "--quiet", rounds=2) as finished:
        assert finished.ended()[0] == 0
    lines = (other / "journal.jsonl").read_text().splitlines(keepends=True)
    (other / "journal.jsonl").write_text(
        "".join(line for line in lines if '"end"' not in line)
    )  # as of a killed run
    before = {path: path.read_bytes() for path in other.iterdir()}
    with Run(out, "--quiet", rounds=500) as started:
        reached(out, 3)
        out.rename(tmp_path / "renamed")
        out.symlink_to(other)
        code, said = started.ended()
    assert code == ExitCode.USAGE
    assert said.splitlines() == [
        f"bench.run: error: {out} has been removed or renamed during the run; if "
        "renamed, python -m bench.run --resume with its new name goes on"
    ]
    assert {path: path.read_bytes() for path in other.iterdir()} == before
    assert load_run(tmp_path / "renamed").blocks["round"].max() >= 2


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


ATTACK = """
import encodings.idna, json, os, socket, sys, time
os.setgid(65534); os.setuid(65534)
victim, seconds = int(sys.argv[1]), float(sys.argv[2])
before = open(f"/proc/{victim}/stat").read().rpartition(")")[2].split()[19]
boot = open("/proc/sys/kernel/random/boot_id").read().strip()
name = f"{boot}/{os.readlink('/proc/self/ns/pid')}/{victim}/{before}"
until_s, tried, held = time.monotonic() + seconds, set(), []
while time.monotonic() < until_s:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\\0")
        except OSError:
            continue
        at = next((i for i, word in enumerate(words) if word.endswith("worker.main")), None)
        if at is None or tuple(words[at + 1 : at + 4]) in tried or not words[at + 2].isdigit():
            continue
        host, port, token = words[at + 1 : at + 4]
        tried.add((host, port, token))
        hello = dict(token=token, rank=0, local_rank=0, host="here", pid=victim, process=name)
        held.append(socket.create_connection((host, int(port))))
        held[-1].sendall(json.dumps({"is": "hello", **hello}).encode() + b"\\n")
    time.sleep(0.1)
print(json.dumps(sorted(tried)))
"""


@needs_root
def test_another_user_takes_no_rank_and_has_nobody_killed(tmp_path):
    """With all that `ps` shows, where each worker is a process by itself; `sleep` is root's."""
    out = tmp_path / "run"
    threads = {"OMP_NUM_THREADS": "2"}  # the process with torch has threads, so it cannot fork
    with subprocess.Popen(["sleep", "600"]) as victim:
        with Run(out, "--quiet", "--case-timeout", "60s", rounds=3, env=threads) as started:
            attack = subprocess.Popen(
                [sys.executable, "-c", ATTACK, str(victim.pid), "60"], stdout=subprocess.PIPE, text=True
            )
            reached(out, 1)
            conductor = psutil.Process(started.process.pid)
            workers = [one for one in conductor.children() if "worker.main" in " ".join(one.cmdline())]
            assert len(workers) == 2, "each by itself"
            listens = [c for c in conductor.net_connections() if c.status == psutil.CONN_LISTEN]
            ended = started.ended()
            found, _ = attack.communicate()
        assert victim.poll() is None
        victim.kill()
    assert listens == [], "nobody can connect to it"
    assert json.loads(found) == [], "nothing in `ps` leads anywhere"
    assert ended == (0, "")
    assert load_run(out).cases["status"].eq("ok").all()

"""Temporary folders: gone at the end, and after a kill at the next start; nobody else's are touched."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ddp_bench.bench.cluster.process import interrupted_by_signals, uninterrupted
from ddp_bench.bench.cluster.scratch import PREFIX, remove_abandoned, scratch_folder

HOLDS = """
import sys
from ddp_bench.bench.cluster.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder(temporary, script=HOLDS):
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


def test_one_in_use_stays_and_one_of_a_killed_process_goes(temporary):
    process, folder = holder(temporary)
    with process:
        with scratch_folder() as own:
            remove_abandoned()
            assert (folder / "file").exists()
            assert own.exists()
        assert not own.exists()
        process.kill()
    assert folder.exists()
    remove_abandoned()
    assert not folder.exists()


def test_what_only_has_the_name_stays(temporary):
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    remove_abandoned()
    assert len(list(temporary.iterdir())) == 3


def test_a_signal_while_it_is_made_leaves_nothing(temporary, monkeypatch):
    make = tempfile.mkdtemp

    def interrupted(**options):
        found = make(**options)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals(), scratch_folder():
        pytest.fail("the signal comes before the context begins")
    assert list(temporary.iterdir()) == []


def test_a_signal_waits_for_the_end_of_what_may_not_stay_half_done():
    done = []

    def work():
        with uninterrupted(), uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("whole")
        done.append("more")

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        work()
    assert done == ["whole"]


HOLDS_FOR_A_CHILD = """
import subprocess, sys
from ddp_bench.bench.cluster.scratch import locks, scratch_folder
with scratch_folder() as folder:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=locks())
    print(folder, flush=True)
    child.wait()
"""


def test_a_process_that_works_in_it_keeps_it(temporary):
    """Also when the one that made it was killed; the child reads what this test writes."""
    process, folder = holder(temporary, HOLDS_FOR_A_CHILD)
    with process:
        process.kill()
        process.wait()
        remove_abandoned()
        assert folder.exists()
    until = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < until
        remove_abandoned()
        time.sleep(0.05)

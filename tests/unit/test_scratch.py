"""Scratch folders: made, marked, removed with their process; nothing of the user's is ever touched."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import eventually

from ddp_bench.bench.common import process as processes
from ddp_bench.bench.common import scratch
from ddp_bench.bench.common.scratch import MARK_FILE, PREFIX, make_scratch_folder, remove_abandoned

HOLDS = """
import sys
from ddp_bench.bench.common.scratch import make_scratch_folder
with make_scratch_folder() as folder:
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
        with make_scratch_folder() as own:
            remove_abandoned()
            assert (folder / "file").exists()
            assert own.exists()
        assert not own.exists()
        process.kill()
    assert folder.exists()
    remove_abandoned()
    assert not folder.exists()


def test_nothing_but_a_marked_folder_of_a_dead_process_is_removed(temporary):
    """Folders as users name them, locked or not, and copies, links and other names of a marked one."""
    process, folder = holder(temporary)
    with process:
        process.kill()
    shutil.copytree(folder, temporary / f"{PREFIX}copied", copy_function=shutil.copy2)
    shutil.copytree(folder, temporary / "ddp-bench-main")
    shutil.copytree(folder, temporary / f"{PREFIX}renamed")
    (temporary / f"{PREFIX}renamed").rename(temporary / f"{PREFIX}renamed2")
    for name in (
        "ddp-bench-r1",
        "ddp-bench-locked",
        f"{PREFIX}own",
        f"{PREFIX}empty-mark",
        f"{PREFIX}linked-mark",
    ):
        (temporary / name).mkdir()
        (temporary / name / "thesis.txt").write_text("mine")
    (temporary / f"{PREFIX}empty-mark" / MARK_FILE).touch()
    (temporary / f"{PREFIX}linked-mark" / MARK_FILE).symlink_to(folder / MARK_FILE)
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "ddp-bench-main")
    (temporary / f"{PREFIX}link-to-marked").symlink_to(folder)
    os.mkfifo(temporary / f"{PREFIX}pipe")
    before = {path: path.lstat().st_ino for path in temporary.rglob("*") if not path.is_relative_to(folder)}
    descriptor = os.open(temporary / "ddp-bench-locked", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    remove_abandoned()
    os.close(descriptor)
    assert not folder.exists(), "its own mark, and its process is gone"
    assert {path: path.lstat().st_ino for path in temporary.rglob("*")} == before


def test_a_removal_that_was_killed_is_finished_by_the_next_command(temporary, monkeypatch):
    process, folder = holder(temporary)
    with process:
        (folder / "more").mkdir()
        (folder / "more" / "file").touch()
        process.kill()
    rmtree = shutil.rmtree

    def killed(path, **how):
        if Path(path) != folder:
            return rmtree(path, **how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "rmtree", killed)
        with contextlib.suppress(KeyboardInterrupt):
            remove_abandoned()
    assert [path.name for path in folder.iterdir()] == [MARK_FILE], "what tells that it is ours goes last"
    remove_abandoned()
    assert not folder.exists()


def test_a_signal_while_it_is_made_leaves_nothing(temporary, monkeypatch):
    make = tempfile.mkdtemp

    def interrupted(**options):
        found = make(**options)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with pytest.raises(KeyboardInterrupt), processes.raise_on_signals(), make_scratch_folder():
        pytest.fail("the signal comes before the context begins")
    assert list(temporary.iterdir()) == []


HOLDS_FOR_A_CHILD = """
import subprocess, sys
from ddp_bench.bench.common.scratch import get_locks, make_scratch_folder
with make_scratch_folder() as folder:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=get_locks())
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
    eventually(lambda: remove_abandoned() or not folder.exists(), 30)

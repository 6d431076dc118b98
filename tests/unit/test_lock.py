import os
import subprocess
import sys

import pytest

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results.store import FolderLock


def test_one_at_a_time(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(UsageError, match=f"in use by another run .process {os.getpid()} "):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


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

"""The doctor on the machine the tests run on, against other tools' answers, and watched for writes."""

import json
import os
import platform
import re
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, finished

WATCHED = """
import os, runpy, sys

CHANGING = {
    *("os." + what for what in "mkdir remove rename rmdir chmod chown truncate link symlink utime".split()),
    *("os." + what for what in "kill killpg setxattr removexattr system exec fork posix_spawn".split()),
    *("subprocess.Popen", "shutil.move", "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp"),
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def watch(event, arguments):
    # What importing torch itself does: it asks the linker's cache where libdl is.
    command = [*map(os.fsdecode, arguments[1])] if event in ("subprocess.Popen", "os.posix_spawn") else []
    listing = command[1:] == ["-p"] and command[0].endswith("ldconfig")
    # A number is a descriptor that is open already: the terminal's.
    is_file = event == "open" and not isinstance(arguments[0], int) and arguments[0] != os.devnull
    wrote = is_file and (arguments[2] or 0) & WRITING
    if wrote or (event in CHANGING and not listing):
        print("CHANGED", event, arguments, file=sys.stderr)

sys.addaudithook(watch)
sys.argv = ["bench.doctor", "--json"]
runpy.run_module("bench.doctor", run_name="__main__")
"""


@pytest.fixture(scope="module")
def doctor(tmp_path_factory):
    where = tmp_path_factory.mktemp("doctor")
    # Coverage, if that is measured, would write its data.
    env = {name: None for name in os.environ if name.startswith("COV")}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return finished([sys.executable, "-c", WATCHED], where, env), where


@pytest.fixture(scope="module")
def said(doctor):
    return {found["name"]: found["text"] for found in json.loads(doctor[0].stdout)["findings"]}


def test_it_changes_nothing(doctor):
    done, where = doctor
    assert "CHANGED" not in done.stderr
    assert list(where.iterdir()) == []


def test_cores_and_memory_agree_with_coreutils_and_proc(said):
    nproc = finished(["nproc"], env={name: None for name in os.environ if name.startswith("OMP_")})
    assert re.search(r" of (\d+) cores busy", said["load"])[1] == nproc.stdout.strip()
    total_kib = re.search(r"MemTotal:\s*([0-9]+) kB", Path("/proc/meminfo").read_text())[1]
    assert f"available of {int(total_kib) / 2**20:.1f} GiB" in said["memory"]


def test_versions_agree_with_this_process(said):
    assert said["torch"].startswith(f"{torch.__version__}, Python {platform.python_version()}, ")

"""What several test folders need: real ranks, and one real run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from commands import ROOT, SMALL, listening
from in_process import first_worker
from rank_pool import Ranks

from ddp_bench.bench.results.store import RunData, load_run

pytest_plugins = ["selection", "fuzzing"]

Play = Callable[[str], list[Any]]

os.environ.pop("GITHUB_ACTIONS", None)  # what tests run has no part in the summary of the tests' own job


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Threads of two test processes that wait for each other busily would take the cores from both."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands resolve and plan in this process, as their first worker would; workers raise `Reached`."""
    monkeypatch.setattr("ddp_bench.bench.run.main.running_workers", first_worker)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.end()


@pytest.fixture
def ranks(two_ranks: Ranks) -> Play:
    """Plays a script in two real ranks that have met as `cluster`; what each passed to `report`."""
    return two_ranks.play


@dataclass(frozen=True)
class RealRun:
    """A finished run, what it said, and the addresses at which its processes listened meanwhile."""

    data: RunData
    stdout: str
    stderr: str
    listened: frozenset[tuple[str, int]]


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """A run of every mode on one and two devices, with caps of which two give one layout."""
    folder = tmp_path_factory.mktemp("real")
    sweep = ("--modes", "dp,ddp", "--gpus", "1,2", "--bucket-cap-mb", "default,0.25,50,100")
    more = ("--image-size", "16", "--rounds", "3", "--steps", "2", "--out", str(folder / "run"))
    command = [sys.executable, "-m", "bench.run", *SMALL, *sweep, *more]
    seen: set[tuple[str, int]] = set()
    with (
        (folder / "stdout").open("w+") as out,
        (folder / "stderr").open("w+") as err,
        subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, text=True) as run,
    ):
        while run.poll() is None:
            seen |= listening(psutil.Process(run.pid))
            try:
                run.wait(2)
            except subprocess.TimeoutExpired:
                continue
        said = [file.seek(0) or file.read() for file in (out, err)]
    assert run.returncode == 0, said[1][-4000:]
    return RealRun(load_run(folder / "run"), *said, frozenset(seen))

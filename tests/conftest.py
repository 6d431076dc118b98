"""What several test folders need: real ranks, and one real run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from commands import ROOT, finished
from in_process import first_worker
from made_project import project_in
from rank_pool import Ranks
from stand_ins import Patch

from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.results.store import load_run

pytest_plugins = ["selection", "fuzzing"]

Play = Callable[[str], list[Any]]

os.environ.pop("GITHUB_ACTIONS", None)  # what tests run has no part in the summary of the tests' own job


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Threads of two test processes that wait for each other busily would take the cores from both."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def monkeypatch() -> Iterator[Patch]:
    """As pytest's own, but for torch, which stays as it is."""
    with Patch.context() as patch:
        yield patch


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands resolve and plan in this process, as their first worker would; workers raise `Reached`."""
    monkeypatch.setattr("ddp_bench.bench.run.main.hold_workers", first_worker)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.end()


@pytest.fixture
def ranks(two_ranks: Ranks) -> Play:
    """Plays a script in two real ranks that have met as `cluster`; what each passed to `report`."""
    return two_ranks.play


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of a user's project, and what it said: its Transformer in four modes on one and two devices.

    Two of the bucket caps give one layout. The project has packages with our names. The run lies in the
    temporary folder, beside a user's own, of the names that people give them.
    """
    folder = tmp_path_factory.mktemp("own")
    project, run = project_in(folder / "project"), folder / "tmp" / "ddp-bench-r1"
    for name in ("ddp-bench-main", ".ddp-bench-notes"):
        (folder / "tmp" / name).mkdir(parents=True)
        (folder / "tmp" / name / "thesis.txt").write_text("mine")
    command = make_package_command(
        *("run", "--workload", "tokens:transformer", "--device", "cpu", "--gpus", "1,2", "--batch-size", "4"),
        *("--modes", "dp,ddp,fsdp,pipeline", "--data", "host", "--accumulate", "2", "--rounds", "3"),
        *("--steps", "2", "--bucket-cap-mb", "default,0.01,100", "--out", str(run)),
    )
    done = finished(command, project, {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")})
    assert done.returncode == 0, done.stderr[-4000:]
    return SimpleNamespace(project=project, data=load_run(run), said=done.stdout, warned=done.stderr)

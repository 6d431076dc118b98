"""On GPUs no step is timed after a profiled one: whole sessions, of which only device and steps are fakes."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

from ddp_bench.bench.console import Console
from ddp_bench.bench.manifest import Manifest, RankPlace
from ddp_bench.bench.measure.timed import BlockTimes
from ddp_bench.bench.modes import Place
from ddp_bench.bench.plan import Machine, Planned, expand, plan_hash
from ddp_bench.bench.recovery.lockstep import Report
from ddp_bench.bench.recovery.reopen import RankHello, open_run
from ddp_bench.bench.resolve import with_device_defaults
from ddp_bench.bench.results.recorder import Block
from ddp_bench.bench.run import blocks, session
from ddp_bench.bench.run.phases import AFTER_ROUNDS, unfinished
from ddp_bench.bench.run.prepare import LiveCase
from ddp_bench.bench.settings import ResolvedSettings, Settings


class BrokenOffError(Exception):
    """The run ends here, as with its process."""


class FakeLockstep:
    """Takes a tenth of a second for a block, and breaks off after `most`."""

    most = num_blocks = 0

    def __init__(self, _cluster: Any, _watchdog: Any, recorder: Any, elapsed_s: float) -> None:
        self._recorder = recorder
        self._elapsed_s = elapsed_s

    def elapsed_s(self) -> float:
        return self._elapsed_s

    def run(self, index: int, what: str, _work: Any, **_: float) -> tuple[float, list[Report]]:
        if FakeLockstep.num_blocks == FakeLockstep.most:
            raise BrokenOffError
        FakeLockstep.num_blocks += 1
        self._recorder.note(index, what)
        self._elapsed_s += 0.1
        case = self._recorder.journal.state.plan[index].case
        num_ranks = case.num_devices if case.mode == "ddp" else 1
        return self._elapsed_s, [Report(value=BlockTimes(1.0, (1.0,)))] * num_ranks

    def wait_for_turn(self, *_: Any, **__: Any) -> None:
        pass

    def between(self) -> None:
        self._recorder.note(None, "between rounds")


class FakeSession(session.Session):
    def _measure_rates(self) -> None:
        """There is no device."""

    def _prepare_cases(self) -> None:
        """Cases as warmed up; those that have nothing left are not, as in a real session."""
        measured, dropped = self._earlier.measured, self._earlier.dropped
        for index, planned in unfinished(
            self._plan, self._settings, measured, dropped=dropped, sustained_s={}
        ):
            assert self._recorder is not None
            self._recorder.set_outcome(index, "ok")
            live = LiveCase(
                index, planned.case, None, planned.oversubscribed, longest_step_s=0.01, step_s=0.01
            )
            self._live.append(live)


def settings_of(device_type: str = "cuda", **stored: Any) -> ResolvedSettings:
    asked = Settings.of_stored({"gpus": [1, 2, 4], "modes": ["ddp"], **stored})
    return with_device_defaults(asked, device_type=device_type, num_local_devices=4)


def plan_of(settings: ResolvedSettings, device_type: str = "cuda") -> list[Planned]:
    machine = Machine(device_type=device_type, devices_per_node=4)
    return expand(settings, machine, arch="resnet20", image_size=32)


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures a run, or goes on with it in its folder: the blocks on disk, in their order."""
    monkeypatch.setattr(blocks, "Lockstep", FakeLockstep)
    monkeypatch.setattr(blocks, "work_of", lambda *_: None)
    monkeypatch.setattr(session, "sampled", lambda *_: None)
    monkeypatch.setattr(session, "gc", Mock())
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = tmp_path / "run"

    def run(settings: ResolvedSettings, *, most: int = 10**9, device_type: str = "cuda") -> list[Block]:
        FakeLockstep.most, FakeLockstep.num_blocks = most, 0
        plan = plan_of(settings, device_type)
        manifest = Manifest(settings=replace(settings, out=str(folder)), plan_hash=plan_hash(plan))
        device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
        resume = folder if folder.exists() else None
        monkeypatch.chdir(tmp_path)
        opened = open_run(settings, plan, manifest, [RankHello("here", {}, None)], resume=resume)
        made = FakeSession(
            cluster=SimpleNamespace(  # type: ignore[arg-type]
                place=Place(rank=0, local_rank=0, device=device, cores=(0,)),
                is_first=True,
                from_first=lambda value: value,
                gather=lambda value: [value],
                gather_to_first=lambda told, more: [(told, more)],
            ),
            job=SimpleNamespace(settings=settings, plan=plan, workload=None),  # type: ignore[arg-type]
            infos=[RankPlace(rank=r, host="here", device_name="a GPU") for r in range(4)],
            recorder=opened.recorder,
            console=Console(silent=True),
            watchdog=None,  # type: ignore[arg-type]
            earlier=opened.progress,
        )
        try:
            opened.recorder.close(made.run())
        except BrokenOffError:
            pass
        finally:
            opened.lock.release()
        rows = pd.read_csv(folder / "blocks.csv")[["case_id", "phase", "round"]]
        return [tuple(row) for row, _ in itertools.groupby(rows.itertuples(index=False, name=None))]

    return run


def with_out(folder: Path, **stored: Any) -> ResolvedSettings:
    return settings_of(out=str(folder / "run"), **stored)


def communicating(settings: ResolvedSettings) -> set[str]:
    return {p.case.case_id for p in plan_of(settings) if p.skip_reason is None and p.case.communicates}


def check_traced_last(blocks: list[Block], wanted: set[str]) -> None:
    assert len(wanted) >= 2
    phases = [phase for _, phase, _ in blocks]
    assert "trace" not in phases[: -len(wanted)]
    assert set(blocks[-len(wanted) :]) == {(case_id, "trace", AFTER_ROUNDS) for case_id in wanted}
    assert max(Counter(blocks).values()) == 1, "nothing is measured twice"


@pytest.mark.parametrize(
    "length", [{"rounds": 6}, {"max_time": 4}, {"max_time": 4, "passes": ["trace"]}], ids=str
)
def test_each_case_once_after_all_rounds(measure: Any, tmp_path: Path, length: dict[str, Any]) -> None:
    settings = with_out(tmp_path, **length)
    blocks = measure(settings)
    check_traced_last(blocks, communicating(settings))
    assert {r for _, phase, r in blocks if phase == "timed"} >= {1, 2}


def test_every_case_where_traces_are_kept(measure: Any, tmp_path: Path) -> None:
    settings = with_out(tmp_path, rounds=2, trace=True)
    every = {p.case.case_id for p in plan_of(settings) if p.skip_reason is None}
    assert every > communicating(settings)
    check_traced_last(measure(settings), every)


def test_none_where_the_pass_is_left_out(measure: Any, tmp_path: Path) -> None:
    blocks = measure(with_out(tmp_path, rounds=2, passes=["anatomy"]))
    assert {phase for _, phase, _ in blocks} == {"timed", "anatomy"}


def test_on_cpus_they_come_within_the_rounds(measure: Any, tmp_path: Path) -> None:
    settings = settings_of("cpu", out=str(tmp_path / "run"), rounds=6, gpus=[1, 2])
    blocks = measure(settings, device_type="cpu")
    assert {r for _, phase, r in blocks if phase == "trace"} == {1, 6}


@pytest.mark.parametrize("length", [{"rounds": 2}, {"max_time": 4}], ids=str)
@pytest.mark.parametrize("traced", [-1, 0, 1])
def test_a_resumed_run_lacks_what_was_not_traced(
    measure: Any, tmp_path: Path, length: dict[str, Any], traced: int
) -> None:
    """Broken off in the last round, after it, and between two traces."""
    settings = with_out(tmp_path, **length)
    wanted = communicating(settings)
    whole = measure(settings)
    (tmp_path / "run").rename(tmp_path / "whole")
    broken_off = measure(settings, most=len(whole) - len(wanted) + traced)
    assert broken_off == whole[: len(broken_off)]
    left = unfinished(plan_of(settings), settings, set(broken_off), dropped=(), sustained_s={})
    assert wanted - {c for c, phase, _ in broken_off if phase == "trace"} <= {p.case.case_id for _, p in left}
    blocks = measure(settings)
    assert blocks[: len(broken_off)] == broken_off
    assert FakeLockstep.num_blocks == len(blocks) - len(broken_off), "nothing is measured for nobody"
    check_traced_last(blocks, wanted)


def test_a_run_with_all_its_traces_has_nothing_left(measure: Any, tmp_path: Path) -> None:
    settings = with_out(tmp_path, rounds=2)
    whole = set(measure(settings))
    plan = plan_of(settings)
    assert not unfinished(plan, settings, whole, dropped=(), sustained_s={})
    for block in whole:
        assert len(unfinished(plan, settings, whole - {block}, dropped=(), sustained_s={})) == 1


def test_more_rounds_later_need_no_second_trace(measure: Any, tmp_path: Path) -> None:
    first = measure(with_out(tmp_path, rounds=2))
    blocks = measure(with_out(tmp_path, rounds=3))
    assert {r for _, phase, r in blocks if phase == "timed"} == {1, 2, 3}
    assert FakeLockstep.num_blocks == len(blocks) - len(first)
    assert {phase for _, phase, _ in blocks[len(first) :]} == {"timed", "no_sync", "comm"}

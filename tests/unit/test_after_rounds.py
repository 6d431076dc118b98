"""After the rounds: traces on GPUs, so that no step is timed after a profiled one.

Sessions are whole: only device and steps are fakes.
"""

import contextlib
import gc
import itertools
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from made import planned, recorded, resolved, torchrun

from ddp_bench.bench.common.console import Console
from ddp_bench.bench.common.turns import TURNS_ENV, TurnClient, TurnServer
from ddp_bench.bench.machine.manifest import Manifest, RankPlace
from ddp_bench.bench.plan.sweep import hash_plan
from ddp_bench.bench.results.block_times import BlockTimes
from ddp_bench.bench.results.case_columns import FILES
from ddp_bench.bench.results.journal import Settled, read_blocks
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.run import case_runner, rounds, stop_rule
from ddp_bench.bench.run.case_runner import FAILED, CaseRunner
from ddp_bench.bench.run.close import close_broken_run
from ddp_bench.bench.run.open_folder import open_run
from ddp_bench.bench.run.schedule import AFTER_ROUNDS, LiveCase, list_unfinished
from ddp_bench.bench.worker import messages as m
from ddp_bench.bench.worker.facts import Begun, Prepared
from ddp_bench.report.build import build


class BrokenOffError(Exception):
    """The run ends here, as with its process."""


class FakeWorkers:
    """Breaks off after `most` blocks."""

    launched = torchrun(4)
    num_blocks = 0
    """Of the latest of them."""
    detail = {}
    """Of every block, but for that of rank 0."""

    def __init__(self, num_ranks, most):
        self._num_ranks, self._most = num_ranks, most
        FakeWorkers.num_blocks = 0

    def __len__(self):
        return self._num_ranks

    def ask(self, commands, _what, _limit_s):
        if not isinstance(commands[0], m.Block):
            return {
                r: m.Report(value=() if isinstance(one, m.Agree) else None) for r, one in commands.items()
            }
        if FakeWorkers.num_blocks == self._most:
            raise BrokenOffError
        FakeWorkers.num_blocks += 1
        block = {"block_ms": 1.0, "steps_ms": [1.0]}
        return {r: m.Report(value=block | ({"detail": self.detail} if r else {})) for r in commands}


class FakeClock:
    """A block takes a tenth of a second."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        self.now_s += 0.05
        return self.now_s


class FakeRounds(rounds.Rounds):
    def _prepare_cases(self):
        """Cases as warmed up; those that have nothing left are not, as in real ones."""
        for index, one in list_unfinished(self.plan, self.settings, self.recorder):
            self.recorder.set_outcome(index, "ok")
            self.live.append(LiveCase(index, one.case, one.oversubscribed, None, 0.01, 0.01))


def settings_of(device="cuda", **stored):
    return resolved(**{"device": device, "devices": 4, "gpus": [1, 2, 4], "modes": ["ddp"], **stored})


def plan_of(settings, device="cuda"):
    return planned(settings, device=device, devices=4, arch="resnet20", image_size=32)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measures a run, or goes on with it in its folder: the blocks on disk, in their order."""
    monkeypatch.setattr(case_runner, "time", FakeClock())
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = tmp_path / "run"

    def run(settings, *, most=10**9, device_type="cuda", silent=True):
        plan = plan_of(settings, device_type)
        manifest = Manifest(settings=replace(settings, out=str(folder)), plan_hash=hash_plan(plan))
        resume = folder if folder.exists() else None
        monkeypatch.chdir(tmp_path)
        recorder, lock, _ = open_run(settings, plan, manifest, {}, resume=resume)
        begun = [Begun(place=RankPlace(rank=r, host="here", device_name="a GPU")) for r in range(4)]
        made = FakeRounds(FakeWorkers(4, most), settings, plan, begun, recorder, Console(silent=silent))
        try:
            recorder.close(made.run())
        except BrokenOffError:
            pass
        finally:
            lock.release()
        return [(one.case_id, one.phase, one.round_index) for one in read_blocks(folder)]

    return run


@pytest.mark.parametrize("in_turns", [False, True])
def test_no_case_of_a_side_in_turns_rests(measure, tmp_path, monkeypatch, in_turns):
    """Each side would rest cases of its own, and rounds of one number lie apart in time."""
    settings = with_out(tmp_path, max_time=60, passes=["none"])
    rests = plan_of(settings)[-1].case.case_id
    monkeypatch.setattr(rounds, "find_converged", lambda *_: frozenset({rests}))
    monkeypatch.setattr(stop_rule.StopRule, "_is_narrow", lambda _: False)
    monkeypatch.setattr(rounds, "get_interleaved_id", lambda: "abc" if in_turns else None)
    timed = [case_id for case_id, phase, _ in measure(settings) if phase == "timed"]
    counts = {case_id: timed.count(case_id) for case_id in timed}
    assert max(counts.values()) > stop_rule.FIRST_LOOK_ROUND
    assert (counts[rests] >= max(counts.values()) - 1) == in_turns


def test_a_run_that_breaks_off_gives_its_turn_back_at_once(measure, tmp_path, monkeypatch):
    """Not when it is collected: its next attempt, and the other run, wait for the server meanwhile."""
    path, over = str(tmp_path / "turns"), threading.Event()
    monkeypatch.setenv(TURNS_ENV, path)

    def go_on():
        other = TurnClient(path)
        while not over.is_set():
            other.await_turn(20)
        other.leave()

    with contextlib.closing(TurnServer(Path(path), seed=1)), ThreadPoolExecutor(1) as pool:
        others = pool.submit(go_on)
        gc.disable()
        try:
            measure(with_out(tmp_path, rounds=6), most=10)
            again = TurnClient(path)
            again.await_turn(20)
            again.leave()
        finally:
            gc.enable()
            over.set()
        others.result(20)


def with_out(folder, **stored):
    return settings_of(out=str(folder / "run"), **stored)


def communicating(settings):
    return {p.case.case_id for p in plan_of(settings) if p.skip_reason is None and p.case.communicates}


def check_traced_last(blocks, wanted):
    assert len(wanted) >= 2
    phases = [phase for _, phase, _ in blocks]
    assert "trace" not in phases[: -len(wanted)]
    assert set(blocks[-len(wanted) :]) == {(case_id, "trace", AFTER_ROUNDS) for case_id in wanted}
    assert max(Counter(blocks).values()) == 1, "nothing is measured twice"


@pytest.mark.parametrize(
    "asked",
    [{"rounds": 6}, {"max_time": 4}, {"max_time": 4, "passes": ["trace"]}, {"rounds": 2, "trace": True}],
    ids=str,
)
def test_each_case_once_after_all_rounds_and_every_one_where_traces_are_kept(measure, tmp_path, asked):
    settings = with_out(tmp_path, **asked)
    every = {p.case.case_id for p in plan_of(settings) if p.skip_reason is None}
    assert every > communicating(settings)
    blocks = measure(settings)
    check_traced_last(blocks, every if settings.trace else communicating(settings))
    assert {r for _, phase, r in blocks if phase == "timed"} >= {1, 2}


def test_none_where_the_pass_is_left_out(measure, tmp_path):
    blocks = measure(with_out(tmp_path, rounds=2, passes=["anatomy"]))
    assert {phase for _, phase, _ in blocks} == {"timed", "anatomy"}


def test_on_cpus_they_come_within_the_rounds(measure, tmp_path):
    settings = settings_of("cpu", out=str(tmp_path / "run"), rounds=6, gpus=[1, 2])
    blocks = measure(settings, device_type="cpu")
    assert {r for _, phase, r in blocks if phase == "trace"} == {1, 6}


@pytest.mark.parametrize("length", [{"rounds": 2}, {"max_time": 4}], ids=str)
@pytest.mark.parametrize("traced", [-1, 0, 1])
def test_a_resumed_run_lacks_what_was_not_traced(measure, tmp_path, length, traced):
    """Broken off in the last round, after it, and between two traces."""
    settings = with_out(tmp_path, **length)
    wanted = communicating(settings)
    whole = measure(settings)
    (tmp_path / "run").rename(tmp_path / "whole")
    broken_off = measure(settings, most=len(whole) - len(wanted) + traced)
    assert broken_off == whole[: len(broken_off)]
    left = list_unfinished(plan_of(settings), settings, recorded(broken_off))
    assert wanted - {c for c, phase, _ in broken_off if phase == "trace"} <= {p.case.case_id for _, p in left}
    blocks = measure(settings)
    assert blocks[: len(broken_off)] == broken_off
    assert FakeWorkers.num_blocks == len(blocks) - len(broken_off), "nothing is measured for nobody"
    check_traced_last(blocks, wanted)


def test_a_run_with_all_its_traces_has_nothing_left(measure, tmp_path):
    settings = with_out(tmp_path, rounds=2)
    whole = set(measure(settings))
    plan = plan_of(settings)
    assert not list_unfinished(plan, settings, recorded(whole))
    for block in whole:
        assert len(list_unfinished(plan, settings, recorded(whole - {block}))) == 1


def test_more_rounds_later_need_no_second_trace(measure, tmp_path):
    first = measure(with_out(tmp_path, rounds=2))
    blocks = measure(with_out(tmp_path, rounds=3))
    assert {r for _, phase, r in blocks if phase == "timed"} == {1, 2, 3}
    assert FakeWorkers.num_blocks == len(blocks) - len(first)
    assert {phase for _, phase, _ in blocks[len(first) :]} == {"timed", "no_sync", "comm"}


@pytest.mark.parametrize("name", FAILED)
def test_a_run_says_once_what_failed_and_keeps_the_blocks(measure, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(FakeWorkers, "detail", {name: "not found"})
    blocks = measure(with_out(tmp_path, rounds=2), silent=False)
    said = [line for line in capsys.readouterr().err.splitlines() if "not found" in line]
    assert said == [f"No {FAILED[name]} from rank 1: not found; the run goes on"]
    check_traced_last(blocks, communicating(settings_of()))


@pytest.mark.parametrize(("settled", "asked"), [(True, (False, (3, 4))), (False, (True, None))])
def test_a_case_is_proven_once_whatever_starts_its_workers_again(settled, asked):
    """A planned start, a lost rank and `--resume` alike: the journal knows."""
    known = {0: Settled(index=0, status="ok", facts={"layers_by_device": "3/4"})} if settled else {}
    state, settings = SimpleNamespace(settled=known), resolved(gpus=(2,), modes=("ddp",))
    done, written = [], []
    ready = Prepared(times=BlockTimes(1.0, (1.0,)))
    run = SimpleNamespace(
        live=[],
        plan=planned(settings),
        settings=settings,
        places=[RankPlace(rank=0, host="here", device_name="a core")],
        await_turn=lambda: None,
        get_elapsed_s=lambda: 0.0,
        _proved={},
        recorder=SimpleNamespace(
            journal=SimpleNamespace(state=state), set_outcome=lambda *_, **__: written.append("outcome")
        ),
        _make_group=lambda _: None,
        _ask_case=lambda _, __, told, ___: done.append((told.proves, told.by_device)) or [ready, ready],
        _read_proof=lambda *_: {},
        _record=lambda *_: written.append("warmup"),
    )
    CaseRunner._prepare_case(run, 0, run.plan[1])
    assert done == [asked]
    assert written == ([] if settled else ["outcome", "warmup"])
    assert len(run.live) == 1


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (m.Curve(group=(2, "gloo"), num_bytes=8), [m.Curve, m.Curve, m.Wait, m.Wait]),
        (m.Block(index=0, phase="timed", steps=1), [m.Block, m.Block, m.Wait, m.Wait]),
        (m.AskNccl(name="nccl/1", num_ranks=2, sizes=(8,), backend="nccl"), [m.AskNccl, m.AskNccl]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ranks_that_no_case_needs_wait_for_what_all_begin_together_alone(command, told):
    """A launcher may start more than the largest case has; in a barrier that nobody joins they would stay."""
    workers, asked = FakeWorkers(4, 0), {}
    workers.ask = lambda commands, *_: asked.update(commands)
    run = SimpleNamespace(workers=workers, recorder=SimpleNamespace(record_start=lambda *_: None))
    CaseRunner.ask(run, command, "the test", 1.0, num_ranks=2)
    assert [type(one) for one in asked.values()] == told


def tables_of(page):
    return [line for line in page.splitlines() if line.startswith("|")]


def test_between_rounds_a_run_writes_its_log_alone_and_if_killed_is_read_by_it(measure, tmp_path):
    folder, settings = tmp_path / "run", with_out(tmp_path, rounds=1000)
    num_blocks = len(measure(settings, most=500))
    log = {"manifest.json", "journal.jsonl", ".lock"}
    assert {path.name for path in folder.iterdir()} == log
    killed = load_run(folder)
    assert killed.cases["num_rounds"].max() > stop_rule.FIRST_LOOK_ROUND
    assert killed.cases["num_blocks"].sum() == num_blocks
    assert {path.name for path in folder.iterdir()} == log, "reading writes nothing"
    told = build(folder, None, as_markdown=True)
    close_broken_run(folder, "killed")
    ended = load_run(folder)
    for name in (name.removesuffix(".csv") for name in FILES):
        pd.testing.assert_frame_equal(getattr(killed, name), getattr(ended, name), check_exact=True)
    assert tables_of(told) == tables_of(build(folder, None, as_markdown=True)) != []


@pytest.mark.parametrize(("looking_s", "most_between_s"), [(0.01, 45), (5.0, 2100)])
def test_looking_at_results_takes_little_of_the_time(monkeypatch, looking_s, most_between_s):
    """The ranks wait meanwhile."""
    monkeypatch.setattr(rounds, "read_case_results", list)
    now_s, looks = 0.0, []

    class Recorder(SimpleNamespace):
        tables = SimpleNamespace(cases=())

        def refresh(self):
            nonlocal now_s
            looks.append(now_s)
            now_s += looking_s

    run = SimpleNamespace(
        get_elapsed_s=lambda: now_s, recorder=Recorder(), settings=settings_of(race=True), _refresh_at_s=30.0
    )
    for number in range(1, 6001):
        now_s += 10
        rounds.Rounds._take_look(run, number)
    assert len(looks) * looking_s < 0.01 * now_s
    assert max(after - before for before, after in itertools.pairwise(looks)) < most_between_s

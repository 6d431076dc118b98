"""After the rounds: traces on GPUs, so that no step is timed after a profiled one, and training on.

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

import made
import pandas as pd
import pytest
from made import planned, recorded, resolved

from ddp_bench.bench.cluster.turns import TURNS_ENV, TurnClient, TurnServer
from ddp_bench.bench.console import Console
from ddp_bench.bench.manifest import Manifest, RankPlace
from ddp_bench.bench.plan import plan_hash
from ddp_bench.bench.results.aggregate import Outcome, case_rows, comparisons_of, typical_of
from ddp_bench.bench.results.round_times import CaseTimes, RoundTimes
from ddp_bench.bench.run import case_runner, rounds
from ddp_bench.bench.run.case_runner import FAILED
from ddp_bench.bench.run.failures import PATIENCE
from ddp_bench.bench.run.phases import AFTER_ROUNDS, fixed_phases, unfinished
from ddp_bench.bench.run.reopen import MAY_CHANGE, open_run
from ddp_bench.bench.run.schedule import LiveCase, Schedule
from ddp_bench.bench.run.sustain import (
    BLOCK_S,
    LEAST_BLOCKS,
    MOST_STEPS,
    blocks_left,
    expected_s,
    left_s,
    limit_s,
    next_steps,
)
from ddp_bench.bench.worker import messages as m


class BrokenOffError(Exception):
    """The run ends here, as with its process."""


class FakeWorkers:
    """Breaks off after `most` blocks."""

    launched = m.Launched(world_size=4, ranks_per_node=4)
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
        if FakeWorkers.num_blocks == self._most:
            raise BrokenOffError
        FakeWorkers.num_blocks += 1
        block = {"block_ms": 1.0, "steps_ms": [1.0]}
        values = {r: block | ({"detail": self.detail} if r else {}) for r in commands}
        return {r: m.Report(value=values[r] if one.name == "block" else None) for r, one in commands.items()}

    def values(self, commands, *_):
        return dict.fromkeys(commands)


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
        for index, one in unfinished(self.plan, self.settings, self.recorder):
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
        manifest = Manifest(settings=replace(settings, out=str(folder)), plan_hash=plan_hash(plan))
        resume = folder if folder.exists() else None
        monkeypatch.chdir(tmp_path)
        opened = open_run(settings, plan, manifest, {}, resume=resume)
        begun = [
            m.Begun(place=RankPlace(rank=r, host="here", device_name="a GPU"), fingerprint="")
            for r in range(4)
        ]
        made = FakeRounds(
            workers=FakeWorkers(4, most),
            settings=settings,
            plan=plan,
            begun=begun,
            recorder=opened.recorder,
            console=Console(silent=silent),
            start_anew=list,
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


def test_a_run_that_breaks_off_gives_its_turn_back_at_once(measure, tmp_path, monkeypatch):
    """Not when it is collected: its next attempt, and the other run, wait for the server meanwhile."""
    path, over = str(tmp_path / "turns"), threading.Event()
    monkeypatch.setenv(TURNS_ENV, path)

    def go_on():
        other = TurnClient(path)
        while not over.is_set():
            other.next_turn(20)
        other.leave()

    with contextlib.closing(TurnServer(Path(path), seed=1)), ThreadPoolExecutor(1) as pool:
        others = pool.submit(go_on)
        gc.disable()
        try:
            measure(with_out(tmp_path, rounds=6), most=10)
            again = TurnClient(path)
            again.next_turn(20)
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
    "length", [{"rounds": 6}, {"max_time": 4}, {"max_time": 4, "passes": ["trace"]}], ids=str
)
def test_each_case_once_after_all_rounds(measure, tmp_path, length):
    settings = with_out(tmp_path, **length)
    blocks = measure(settings)
    check_traced_last(blocks, communicating(settings))
    assert {r for _, phase, r in blocks if phase == "timed"} >= {1, 2}


def test_every_case_where_traces_are_kept(measure, tmp_path):
    settings = with_out(tmp_path, rounds=2, trace=True)
    every = {p.case.case_id for p in plan_of(settings) if p.skip_reason is None}
    assert every > communicating(settings)
    check_traced_last(measure(settings), every)


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
    left = unfinished(plan_of(settings), settings, recorded(broken_off))
    assert wanted - {c for c, phase, _ in broken_off if phase == "trace"} <= {p.case.case_id for _, p in left}
    blocks = measure(settings)
    assert blocks[: len(broken_off)] == broken_off
    assert FakeWorkers.num_blocks == len(blocks) - len(broken_off), "nothing is measured for nobody"
    check_traced_last(blocks, wanted)


def test_a_run_with_all_its_traces_has_nothing_left(measure, tmp_path):
    settings = with_out(tmp_path, rounds=2)
    whole = set(measure(settings))
    plan = plan_of(settings)
    assert not unfinished(plan, settings, recorded(whole))
    for block in whole:
        assert len(unfinished(plan, settings, recorded(whole - {block}))) == 1


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


# Training on: which cases, in how many blocks of how many steps, and what stays alike.


def lasting(**stored):
    return resolved(**{"gpus": [1, 2, 4], "bucket_cap_mb": ["default"], **stored})


def block(phase, number, step_ms, *, steps=1, case_id="c"):
    return made.block(case_id, number, step_ms, phase=phase, steps=steps)


def times_of(*rows):
    times = CaseTimes()
    for row in rows:
        times.add([row])
    return times


def trained(settings, step_ms, *, then_ms=None):
    """A case that trains until it is told that it is enough; after its first block at another pace."""
    times = times_of(block("timed", 1, step_ms))
    number = 0
    while steps := next_steps(settings, times):
        number += 1
        pace = step_ms if number == 1 or then_ms is None else then_ms
        times.add([block("sustained", number, pace, steps=steps)])
        assert number < 10_000
    return times


@pytest.mark.parametrize(
    ("sustain", "step_ms", "num_blocks"),
    [
        ("5m", 100, 30),  # of ten seconds each
        ("60s", 100, LEAST_BLOCKS),  # of three seconds
        ("2s", 1, LEAST_BLOCKS),
        ("2s", 500, 4),  # of one step each: longer than a twentieth of the time
        ("10m", 0.5, 238),  # of the most steps that one may have, 2.5 s; half of 10 s may be left
    ],
)
def test_blocks_of_ten_seconds_or_a_twentieth_of_the_time(sustain, step_ms, num_blocks):
    settings = lasting(sustain=sustain)
    times = trained(settings, step_ms)
    assert len(times.sustained_ms) == num_blocks
    assert times.sustained_s == pytest.approx(settings.sustain, abs=BLOCK_S / 2)
    assert max(times.sustained_ms.values()) <= 1000 * BLOCK_S


@pytest.mark.parametrize("then_ms", [50, 97, 103, 120, 200])
def test_the_pace_of_the_latest_block_counts_and_no_short_block_is_left(then_ms):
    settings = lasting(sustain="5m")
    times = trained(settings, 100, then_ms=then_ms)
    *whole, last = list(times.sustained_ms.values())[2:]
    assert times.sustained_s == pytest.approx(300, abs=BLOCK_S / 2)
    assert last >= 0.7 * max(whole), "blocks count alike, so none may be much shorter"


def test_steps_by_hand():
    """60 s in 20 blocks of 3 s; 9.5 s are done in two, the last at 200 ms a step: 50.5 s in 17 blocks."""
    settings = lasting(sustain="60s")
    timed = [block("timed", r, ms) for r, ms in enumerate((90, 100, 500), 1)]
    assert next_steps(settings, times_of(*timed)) == 30, "3 s at the median, 100 ms"
    some = [block("sustained", 1, 100, steps=45), block("sustained", 2, 200, steps=25)]
    assert blocks_left(settings, 9.5) == 17
    assert next_steps(settings, times_of(*timed, *some)) == round(50.5 / 17 / 0.2) == 15
    assert next_steps(settings, times_of(*timed, block("sustained", 1, 58_600.0))) == 0, (
        "half a block is left"
    )
    assert next_steps(settings, times_of(*timed, block("sustained", 1, 58_400.0))) > 0
    assert next_steps(settings, times_of()) == 0, "what has no timed block has no pace"
    assert next_steps(lasting(), times_of(*timed)) == 0
    assert next_steps(lasting(sustain="10h"), times_of(block("timed", 1, 0.001))) == MOST_STEPS


def test_a_block_ends_well_before_its_time_limit():
    asked = lasting(sustain="5m", case_timeout="5s")
    assert max(trained(asked, 100).sustained_ms.values()) <= 2500
    assert limit_s(asked, 0.1, 0.1) == 5
    assert limit_s(lasting(sustain="5m"), 0.1, 0.1) == PATIENCE * BLOCK_S
    assert limit_s(lasting(sustain="5m"), 60.0, 60.0) > PATIENCE * 60


def test_only_cases_that_share_no_device_train_on():
    """single, DP on 2 and DDP on 1 and 2; not DDP and DP on 4 devices of 2, nor DP on one."""
    settings = lasting(sustain="30s")
    plan = planned(settings)
    own = [p for p in plan if not p.oversubscribed and not p.skip_reason]
    assert len(own) == 4 < len([p for p in plan if not p.skip_reason])
    assert expected_s(plan, settings) == 120
    assert expected_s(plan, lasting()) == 0
    done = {own[0].case.case_id: 20.0, own[1].case.case_id: 31.0}
    assert left_s(settings, own[:3], done) == 10 + 0 + 30


def test_a_resumed_run_prepares_what_has_still_to_train():
    settings = lasting(sustain="30s", rounds=1)
    plan = planned(settings)
    measured = {
        (p.case.case_id, phase, 1)
        for p in plan
        for phase in fixed_phases(p, round_index=1, settings=settings)
    }
    own = [p.case.case_id for p in plan if not p.oversubscribed and not p.skip_reason]

    def left(asked, done_s):
        return [p.case.case_id for _, p in unfinished(plan, asked, recorded(measured, done_s))]

    assert left(settings, {}) == own
    assert left(settings, {own[0]: 29.5, own[1]: 10.0, own[2]: 30.0}) == [own[1], own[3]]
    assert left(settings, dict.fromkeys(own, 30.0)) == []
    assert left(lasting(rounds=1), {}) == []
    assert "sustain" in MAY_CHANGE


def test_the_schedule_counts_no_sustained_block():
    settings = lasting()
    schedule, first = Schedule(settings), planned(settings)[0]
    schedule.add(LiveCase(0, first.case, first.oversubscribed), "sustained", 1e6)
    assert not schedule.spent_s
    assert not schedule.visits


def test_rounds_comparisons_and_the_fit_know_nothing_of_it():
    settings = lasting(gpus=[1, 2])
    plan = [p for p in planned(settings) if not p.skip_reason]
    pace = {p.case.case_id: 100.0 + 7 * i for i, p in enumerate(plan)}
    timed = [
        [block("timed", r, pace[p.case.case_id] * (1 + r / 100), case_id=p.case.case_id)]
        for r in range(1, 8)
        for p in plan
    ]
    after = [
        [block("sustained", n, 3 * pace[p.case.case_id], case_id=p.case.case_id) | {"launch": 3}]
        for p in plan
        for n in range(1, 21)
    ]
    outcomes = [Outcome(p) for p in plan]
    without, with_it = RoundTimes(timed), RoundTimes([*after, *timed])
    assert without.launches == with_it.launches
    one, other = case_rows(outcomes, without), case_rows(outcomes, with_it)
    own = [c for c in one if c.startswith("steady_")] + ["num_blocks"]
    pd.testing.assert_frame_equal(one.drop(columns=own), other.drop(columns=own))
    assert (other["num_blocks"] - one["num_blocks"]).tolist() == [20] * len(plan)
    batch = {p.case.case_id: p.case.global_batch for p in plan}
    ids = list(pace)
    pairs = [(ids[1], ids[0]), (ids[2], ids[1])]
    before, after = (
        comparisons_of(pairs, times, batch, 0.05, typical_of(times, ())) for times in (without, with_it)
    )
    assert before == after
    wanted = [batch[c] * 1000 / (3 * pace[c]) for c in ids]
    assert other["steady_images_per_s"].tolist() == pytest.approx(wanted)
    assert one["steady_images_per_s"].isna().all()

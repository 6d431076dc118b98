"""Training on after the rounds: which cases, in how many blocks of how many steps, and what stays alike."""

import made
import pandas as pd
import pytest
from commands import SMALL
from made import planned, recorded

from ddp_bench.bench.results.aggregate import Outcome, case_rows, comparisons_of
from ddp_bench.bench.results.round_times import CaseTimes, RoundTimes
from ddp_bench.bench.run.failures import PATIENCE
from ddp_bench.bench.run.main import main
from ddp_bench.bench.run.phases import fixed_phases, unfinished
from ddp_bench.bench.run.reopen import MAY_CHANGE
from ddp_bench.bench.run.schedule import Schedule
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


def resolved(**stored):
    return made.resolved(**{"gpus": [1, 2, 4], "bucket_cap_mb": ["default"], **stored})


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
    settings = resolved(sustain=sustain)
    times = trained(settings, step_ms)
    assert len(times.sustained_ms) == num_blocks
    assert times.sustained_s == pytest.approx(settings.sustain, abs=BLOCK_S / 2)
    assert max(times.sustained_ms.values()) <= 1000 * BLOCK_S


@pytest.mark.parametrize("then_ms", [50, 97, 103, 120, 200])
def test_the_pace_of_the_latest_block_counts_and_no_short_block_is_left(then_ms):
    settings = resolved(sustain="5m")
    times = trained(settings, 100, then_ms=then_ms)
    *whole, last = list(times.sustained_ms.values())[2:]
    assert times.sustained_s == pytest.approx(300, abs=BLOCK_S / 2)
    assert last >= 0.7 * max(whole), "blocks count alike, so none may be much shorter"


def test_steps_by_hand():
    """60 s in 20 blocks of 3 s; 9.5 s are done in two, the last at 200 ms a step: 50.5 s in 17 blocks."""
    settings = resolved(sustain="60s")
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
    assert next_steps(resolved(), times_of(*timed)) == 0
    assert next_steps(resolved(sustain="10h"), times_of(block("timed", 1, 0.001))) == MOST_STEPS


def test_a_block_ends_well_before_its_time_limit():
    asked = resolved(sustain="5m", case_timeout="5s")
    assert max(trained(asked, 100).sustained_ms.values()) <= 2500
    assert limit_s(asked, 0.1, 0.1) == 5
    assert limit_s(resolved(sustain="5m"), 0.1, 0.1) == PATIENCE * BLOCK_S
    assert limit_s(resolved(sustain="5m"), 60.0, 60.0) > PATIENCE * 60


def test_only_cases_that_share_no_device_train_on():
    """single, DP on 2 and DDP on 1 and 2; not DDP and DP on 4 devices of 2, nor DP on one."""
    settings = resolved(sustain="30s")
    plan = planned(settings)
    own = [p for p in plan if not p.oversubscribed and not p.skip_reason]
    assert len(own) == 4 < len([p for p in plan if not p.skip_reason])
    assert expected_s(plan, settings) == 120
    assert expected_s(plan, resolved()) == 0
    done = {own[0].case.case_id: 20.0, own[1].case.case_id: 31.0}
    assert left_s(settings, own[:3], done) == 10 + 0 + 30


class FakeRecorder:
    def __init__(self, case_id, times):
        self.case_id, self.times = case_id, times

    def times_of(self, case_id):
        assert case_id == self.case_id
        return self.times

    def sustained_s(self):
        return {self.case_id: self.times.sustained_s}


def test_a_resumed_run_prepares_what_has_still_to_train():
    settings = resolved(sustain="30s", rounds=1)
    plan = planned(settings)
    measured = {
        (p.case.case_id, phase, 1)
        for p in plan
        for phase in fixed_phases(p.case, oversubscribed=p.oversubscribed, round_index=1, settings=settings)
    }
    own = [p.case.case_id for p in plan if not p.oversubscribed and not p.skip_reason]

    def left(asked, done_s):
        return [p.case.case_id for _, p in unfinished(plan, asked, recorded(measured, done_s))]

    assert left(settings, {}) == own
    assert left(settings, {own[0]: 29.5, own[1]: 10.0, own[2]: 30.0}) == [own[1], own[3]]
    assert left(settings, dict.fromkeys(own, 30.0)) == []
    assert left(resolved(rounds=1), {}) == []
    assert "sustain" in MAY_CHANGE


def test_the_schedule_counts_no_sustained_block():
    schedule = Schedule(resolved())
    schedule.add("c", "sustained", 1e6, oversubscribed=False)
    assert not schedule.spent_s
    assert not schedule.visits


def test_rounds_comparisons_and_the_fit_know_nothing_of_it():
    settings = resolved(gpus=[1, 2])
    plan = [p for p in planned(settings) if not p.skip_reason]
    pace = {p.case.case_id: 100.0 + 7 * i for i, p in enumerate(plan)}
    timed = [
        [block("timed", r, pace[p.case.case_id] * (1 + r / 100), case_id=p.case.case_id)]
        for r in range(1, 8)
        for p in plan
    ]
    after = [
        [block("sustained", n, 3 * pace[p.case.case_id], case_id=p.case.case_id)]
        for p in plan
        for n in range(1, 21)
    ]
    outcomes = [Outcome(p) for p in plan]
    without, with_it = RoundTimes(timed), RoundTimes([*timed, *after])
    one, other = case_rows(outcomes, without), case_rows(outcomes, with_it)
    own = [c for c in one if c.startswith("steady_")] + ["num_blocks"]
    pd.testing.assert_frame_equal(one.drop(columns=own), other.drop(columns=own))
    assert (other["num_blocks"] - one["num_blocks"]).tolist() == [20] * len(plan)
    batch = {p.case.case_id: p.case.global_batch for p in plan}
    ids = list(pace)
    pairs = [(ids[1], ids[0]), (ids[2], ids[1])]
    assert comparisons_of(pairs, without, batch, 0.05) == comparisons_of(pairs, with_it, batch, 0.05)
    wanted = [batch[c] * 1000 / (3 * pace[c]) for c in ids]
    assert other["steady_images_per_s"].tolist() == pytest.approx(wanted)
    assert one["steady_images_per_s"].isna().all()


def test_a_dry_run_tells_the_time(capsys):
    arguments = [*SMALL, "--gpus", "1", "--modes", "ddp", "--rounds", "1", "--image-size", "8", "--dry-run"]
    assert main([*arguments, "--sustain", "90s"]) == 0
    assert "After that 3m 00s of training without a pause (--sustain), in all " in capsys.readouterr().out

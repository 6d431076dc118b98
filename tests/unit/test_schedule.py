"""What is measured in a round, which cases rest, and when a run stops."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import made
import pytest
from made import cap_of, planned

from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.journal import Completion, State
from ddp_bench.bench.run.schedule import INSTRUMENTED, SHARES, LiveCase, Schedule, list_fixed_phases
from ddp_bench.bench.run.stop_rule import (
    FIRST_LOOK_ROUND,
    StopRule,
    find_converged,
    is_interim_look,
)
from ddp_bench.bench.stats.fit import MIN_ROUNDS
from ddp_bench.bench.stats.interval import Interval


def resolved(**stored):
    return made.resolved(**{"gpus": [1, 2], **stored})


def visitable(settings):
    """Every case that runs, with a step as long as its devices are many."""
    return [
        LiveCase(index, p.case, p.oversubscribed, step_s=0.1 * p.case.num_devices)
        for index, p in enumerate(planned(settings))
        if p.skip_reason is None
    ]


STEPS = {"anatomy": 2}
"""Steps of a block whose phase takes another number than `--steps`."""


def simulated(settings, num_rounds, *, resting=frozenset()):
    """Rounds whose blocks take what warm-up promised: the schedule, and what it chose.

    Cases rest from the first look on.
    """
    live, schedule, chosen = visitable(settings), Schedule(settings), []
    by_index = {one.index: one for one in live}
    for r in range(1, num_rounds + 1):
        chosen.append(schedule.plan_round(live, r, resting=resting if r > FIRST_LOOK_ROUND else frozenset()))
        for index, phases in chosen[-1].items():
            one = by_index[index]
            for phase in phases:
                steps = settings.steps if phase in ("timed", "no_sync") else STEPS.get(phase, 1)
                schedule.add(one, phase, steps * one.step_s)
    return schedule, chosen


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gpus": [1, 2, 4]},
        {"gpus": [1, 2, 4], "caps_given": True},
        {"calibrate": True},
        {"trace": True, "steps": 3},
    ],
    ids=str,
)
def test_every_kind_of_block_keeps_to_its_share(settings):
    """But for the first visits, which come whatever they cost: they count for little in a long run."""
    schedule, _ = simulated(resolved(**settings), 400)
    total_s = sum(schedule.spent_s.values())
    for kind, share in SHARES.items():
        assert schedule.spent_s[kind] <= 1.1 * share * total_s, kind
    assert schedule.spent_s["timed"] >= 0.35 * total_s


def test_a_pass_comes_after_every_second_timed_block_until_it_has_its_least():
    """Whatever it costs: by its share alone ten visits would take 70 rounds of long steps."""
    settings = resolved(modes=["ddp"], gpus=[2], bucket_cap_mb=["1"], passes=["no_sync"])
    _, chosen = simulated(settings, 40)
    ddp = visitable(settings)[-1].index
    visited = [r for r, found in enumerate(chosen, 1) if "no_sync" in found[ddp]]
    assert visited == [*range(MIN_ROUNDS + 1, 11), *range(12, 21, 2)]


def test_every_case_begins_with_timed_blocks_enough_for_an_interval():
    """Whatever its share, and whatever its preparation took."""
    settings = resolved(gpus=[1, 2], calibrate=True, trace=True)
    live, schedule = visitable(settings), Schedule(settings)
    for one in live:
        schedule.add(one, "warmup", 20.0)
    for r in range(1, MIN_ROUNDS + 1):
        assert schedule.plan_round(live, r) == {one.index: ["timed"] for one in live}
        for one in live:
            schedule.add(one, "timed", 9.0)


def test_what_a_calibration_took_decides_when_it_comes_again():
    settings = resolved(calibrate=True, gpus=[1, 2])
    live, schedule = {one.index: one for one in visitable(settings)}, Schedule(settings)
    visits = []
    for r in range(1, 501):
        for index, phases in schedule.plan_round([*live.values()], r).items():
            one = live[index]
            visits += [r for phase in phases if phase == "calibration"]
            for phase in phases:
                seconds = (60 if phase == "calibration" else 1) * one.step_s
                schedule.add(one, phase, seconds)
    assert visits[:MIN_ROUNDS] == [6, 7, 8, 9, 10]
    assert schedule.spent_s["calibration"] <= 1.1 * SHARES["calibration"] * sum(schedule.spent_s.values())


def test_a_time_that_gives_no_interval_is_told_before_the_rounds():
    live = visitable(resolved())
    round_s = sum(one.step_s for one in live)
    schedule = Schedule(resolved())
    assert schedule.explain_shortage(live, MIN_ROUNDS * round_s + 0.1) == ""
    assert "are left after preparation" in schedule.explain_shortage(live, MIN_ROUNDS * round_s - 0.1)
    assert Schedule(resolved(rounds=3)).explain_shortage(live, 0.0) == ""
    assert Schedule(resolved(calibrate=True)).explain_shortage(live, MIN_ROUNDS * round_s + 0.1)
    for one in live:
        for _ in range(MIN_ROUNDS):
            schedule.add(one, "timed", 0.1)
    assert schedule.explain_shortage(live, 0.0) == "", "an earlier attempt has them"


def test_every_case_has_its_first_pass_before_any_has_a_second():
    """Nine caps, as of the DDP paper: wherever the time ends, all have a pass, or none has."""
    caps = ["default", "1", "2", "5", "10", "15", "25", "50", "100"]
    settings = resolved(modes=["ddp"], gpus=[2], bucket_cap_mb=caps)
    _, rounds = simulated(settings, 40)
    visits = {one.index: 0 for one in visitable(settings) if one.case.mode == "ddp"}
    for phases in rounds:
        for index in visits:
            visits[index] += "no_sync" in phases[index]
        assert max(visits.values()) - min(visits.values()) <= min(1, *visits.values())
    assert len(visits) == len(caps)
    assert min(visits.values()) > 1


def test_the_least_visited_come_first():
    schedule, _ = simulated(resolved(), 200)
    for phase in ("no_sync", "comm", *INSTRUMENTED):
        visits = [n for (_, of), n in schedule.visits.items() if of == phase]
        assert max(visits) - min(visits) <= 2, phase


def test_shared_cases_come_in_ten_rounds_and_with_the_default_cap_alone():
    settings = resolved(gpus=[1, 2, 4])
    shared = [one for one in visitable(settings) if one.oversubscribed]
    assert [(one.case.mode, cap_of(one.case)) for one in shared] == [("dp", ""), ("ddp", "default")]
    schedule, chosen = simulated(settings, 400)
    for one in shared:
        assert [r for r, found in enumerate(chosen, 1) if one.index in found] == [
            *range(1, 2 * MIN_ROUNDS + 1)
        ]
    looks = {of: n for (case_id, of), n in schedule.visits.items() if case_id == shared[1].case.case_id}
    assert looks == {"timed": 2 * MIN_ROUNDS, "no_sync": MIN_ROUNDS, "anatomy": 1, "trace": 1, "comm": 1}


def test_shared_cases_get_all_the_time_where_there_are_no_others():
    settings = resolved(gpus=[4], modes=["ddp"])
    live = [one for one in visitable(settings) if one.oversubscribed]
    chosen = Schedule(settings).plan_round(live, 1)
    assert set(chosen) == {one.index for one in live}


@pytest.mark.parametrize(
    ("setting", "passes"),
    [
        ({}, {"timed", "no_sync", "comm", "anatomy", "trace"}),
        ({"comm_hook": ["powersgd"]}, {"timed", "no_sync", "anatomy", "trace"}),
        ({"zero_optimizer": [True]}, {"timed", "no_sync", "anatomy", "trace"}),
    ],
    ids=["plain", "powersgd", "zero"],
)
def test_a_pass_that_would_be_wrong_is_left_out(setting, passes):
    fixed = resolved(modes=["ddp"], gpus=[2], bucket_cap_mb=["1"], rounds=1, **setting)
    *_, ddp = visitable(fixed)
    assert set(list_fixed_phases(ddp, round_index=1, settings=fixed)) == passes
    _, rounds = simulated(replace(fixed, rounds=None), 30)
    assert set().union(*(phases.get(ddp.index, []) for phases in rounds)) == passes


@pytest.mark.parametrize("round_index", [1, 2, 5, 6, 11])
def test_fixed_rounds_give_the_fixed_phases_whatever_rests(round_index):
    settings = resolved(gpus=[1, 2, 4], rounds=12)
    live = visitable(settings)
    everything = frozenset(one.case.case_id for one in live)
    schedule = Schedule(settings)
    schedule.add(live[0], "timed", 1e6)
    assert schedule.plan_round(live, round_index, resting=everything) == {
        one.index: list_fixed_phases(one, round_index=round_index, settings=settings) for one in live
    }


def test_passes_that_are_not_wanted_do_not_come():
    schedule, _ = simulated(resolved(passes=["comm"]), 40)
    assert {of for _, of in schedule.visits} == {"timed", "comm"}


def test_resting_cases_are_not_timed():
    settings = resolved()
    resting = frozenset([visitable(settings)[0].case.case_id])
    _, chosen = simulated(settings, 200, resting=resting)
    phases = {phase for found in chosen[FIRST_LOOK_ROUND:] for phase in found.get(0, [])}
    assert phases == {"anatomy"}, "a look inside may still come, from the share that is left"


def test_neither_timed_nor_no_sync_always_comes_first():
    _, chosen = simulated(resolved(), 60)
    first = Counter(
        phases[0] for found in chosen for phases in found.values() if {"timed", "no_sync"} <= set(phases)
    )
    assert min(first["timed"], first["no_sync"]) > 0.35 * first.total()
    assert simulated(resolved(), 60)[1] == chosen, "every time the same"
    assert simulated(resolved(seed=1), 60)[1] != chosen


def test_looks_are_at_ten_and_twice_as_many_each():
    assert [n for n in range(400) if is_interim_look(n)] == [10, 20, 40, 80, 160, 320]


def comparison(first, second, half_width, *, middle=1.0):
    ends = (middle * math.exp(-half_width), middle * math.exp(half_width))
    return Comparison(first, second, Interval(middle, *ends), 0.05, 20)


NARROW, WIDE = 0.9 * math.log(1.05) / 2, 1.1 * math.log(1.05) / 2


def test_a_case_rests_once_all_its_comparisons_are_narrow():
    by = [
        comparison("ddp", "dp", NARROW),
        comparison("cap1", "ddp", NARROW),
        comparison("cap25", "ddp", WIDE),
    ]
    assert find_converged(by, {}) == {"dp", "cap1"}
    assert find_converged([], {"ddp": 0.001}) == frozenset()


def test_a_case_in_no_comparison_rests_by_its_rate():
    by = [comparison("ddp", "dp", WIDE)]
    widths = {"one": 0.02, "other": 0.03, "unknown": math.nan, "ddp": 0.001}
    assert find_converged(by, widths) == {"one"}


def rule(*by, width=math.nan, elapsed_s=0.0, num_bytes=0, **settings):
    recorder = SimpleNamespace(
        tables=SimpleNamespace(comparisons=list(by)),
        compute_half_width=lambda: width,
        journal=SimpleNamespace(state=State(table_bytes=num_bytes)),
    )
    return StopRule(resolved(**settings), recorder, lambda: elapsed_s)


AT_LOOKS, NEVER = {Completion.NARROW: [FIRST_LOOK_ROUND, 20, 40]}, {}
NARROW_ONE, WIDE_ONE = comparison("a", "b", NARROW), comparison("c", "b", WIDE)


@pytest.mark.parametrize(
    ("by", "asked", "stops"),
    [
        ([NARROW_ONE, NARROW_ONE], {}, AT_LOOKS),
        ([NARROW_ONE, WIDE_ONE], {}, NEVER),
        # Never by significance: whether 1 is within the interval changes nothing.
        *(([NARROW_ONE, comparison("c", "b", WIDE, middle=m)], {}, NEVER) for m in (0.2, 0.9, 1.1, 5.0)),
        *(([comparison("a", "b", NARROW, middle=m)], {}, AT_LOOKS) for m in (0.2, 0.9, 1.1, 5.0)),
        ([Comparison("a", "b", Interval(2.0, math.nan, math.nan), 0.05, 3)], {}, NEVER),
        # Without comparisons the rates decide.
        *(
            ([], {"width": width}, AT_LOOKS if width < 0.0251 else NEVER)
            for width in (0.025, 0.026, math.nan)
        ),
        ([], {"width": 0.04, "margin": 0.1}, AT_LOOKS),
        # The time limit ends it at any round but before the first.
        ([WIDE_ONE], {"elapsed_s": 60.0, "max_time": 60}, {Completion.TIME: [*range(1, 45)]}),
        ([WIDE_ONE], {"elapsed_s": 59.9, "max_time": 60}, NEVER),
        # Fixed rounds are neither cut short nor exceeded.
        ([NARROW_ONE], {"rounds": 15}, {Completion.ROUNDS: [*range(15, 45)]}),
        # Before blocks.csv is too large to be read: 1 GiB, with a tenth for what comes last.
        ([WIDE_ONE], {"num_bytes": 0.86 * 2**30}, {Completion.FULL: [*range(1, 22)]}),
        # A precision target is of every rate, after five rounds; the comparisons are not asked.
        (
            [WIDE_ONE],
            {"width": 0.01, "precision_target": 0.01},
            {Completion.TARGET: [*range(MIN_ROUNDS, 45)]},
        ),
        ([NARROW_ONE], {"width": 0.011, "precision_target": 0.01}, NEVER),
    ],
)
def test_when_a_run_stops(by, asked, stops):
    made = rule(*by, **asked)
    found = {}
    for n in range(45):
        if why := made.explain_end(n):
            found.setdefault(why, []).append(n)
    assert found == stops


@pytest.mark.parametrize(
    ("settings", "done", "said"),
    [
        ({"max_time": 200.0}, 0.325, "1m 05s of at most 3m 20s"),
        ({"rounds": 20, "max_time": None}, 0.2, "1m 05s, 20 rounds"),
        ({"rounds": 20, "max_time": 100.0}, 0.65, "1m 05s of at most 1m 40s, 20 rounds"),
    ],
)
def test_progress_is_of_the_whole_run(settings, done, said):
    assert rule(elapsed_s=65.0, **settings).describe_progress(4.0) == (pytest.approx(done), said)


def test_what_is_left_of_the_time_and_of_the_rounds():
    fixed = rule(rounds=15)
    assert (fixed.compute_left_s(), fixed.compute_left_share(5)) == (None, pytest.approx(2 / 3))
    now = 20.0
    made = StopRule(resolved(max_time=100), None, lambda: now)
    assert made.compute_left_share(0) == 1.0
    now = 60.0
    assert (made.compute_left_s(), made.compute_left_share(3)) == (40.0, pytest.approx(0.5))
    late = StopRule(resolved(max_time=30), None, lambda: now)
    assert late.compute_left_share(0) == late.compute_left_share(1) == 0.0, "preparation took it all"


def test_cheap_traces_do_not_crowd_out_the_anatomy_of_slow_cases():
    settings = resolved(modes=["ddp", "fsdp", "pipeline"], gpus=[2], bucket_cap_mb=["default"])
    live, (_, rounds) = visitable(settings), simulated(settings, 300)
    seen = Counter((index, phase) for phases in rounds for index, found in phases.items() for phase in found)
    looks = [seen[one.index, "anatomy"] for one in live]
    (ddp,) = [one for one in live if one.case.mode == "ddp"]
    assert min(looks) >= seen[ddp.index, "trace"] - 1 > 3

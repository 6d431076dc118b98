"""A gate in turns: its plan and its launches, when they end, and what is said of the machine meanwhile."""

import itertools
import json
import math
import re
import statistics
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gate_runs import STEADY, changed, gated, made_run, slowed
from scipy.stats import t

from ddp_bench.bench.common.errors import ExitCode, UsageError
from ddp_bench.bench.findings.wording import CPU_STAND_IN
from ddp_bench.bench.gate import interleave, output, sides
from ddp_bench.bench.gate.checkouts import Checkout
from ddp_bench.bench.gate.compare import OF_ONE_LAUNCH
from ddp_bench.bench.gate.headline import describe_verdict
from ddp_bench.bench.gate.machine import add_conditions, describe_machine
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.gate.runs import merge_launches
from ddp_bench.bench.gate.sides import GatePlan, Request, read_plan
from ddp_bench.bench.machine.load import LoadReading
from ddp_bench.bench.machine.manifest import Load

SIDES = [Checkout(name, Path(), sys.executable) for name in ("baseline", "candidate")]
PLAN = GatePlan(("single-n1", "ddp-n2"), {"baseline": "2.13.0", "candidate": "2.14.1"}, 30.0)
LAUNCH_S = 60.0


@pytest.fixture
def launches(monkeypatch):
    """Launches of made runs that each take a minute of a clock of their own; how many there were."""
    done, clock = [], itertools.count(0.0, LAUNCH_S)
    now_s = [next(clock)]

    def launch(*_, **__):
        done.append(now_s[0])
        now_s[0] = next(clock)
        return made_run(STEADY), made_run(STEADY)

    monkeypatch.setattr(sides, "check_out_both", lambda *_: nullcontext(SIDES))
    monkeypatch.setattr(sides, "check_sides", lambda *_: PLAN)
    monkeypatch.setattr(interleave, "measure_in_turns", launch)
    monkeypatch.setattr(interleave, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return done


class Decides:
    """Stands for a gate that is decided once it has so many launches; when that was asked."""

    def __init__(self, after):
        self.after, self.asked = after, []

    def __call__(self, baseline, candidate):
        launched = len({launch for launch, _ in candidate.cases[0].rounds["images_per_s"]})
        looked = self

        class Gate(SimpleNamespace):
            @property
            def needs_more_launches(self):
                looked.asked.append(launched)
                return launched < looked.after

            def compute_resolvable_change(self, _):
                return 0.019 if launched >= 3 else None

        return Gate(baseline=baseline, candidate=candidate)


def measured(gate_of, **more):
    asked = Request(reference=".", arguments=["--gpus", "1"], looks=(2, 4, 8), **more)
    gate = interleave.measure_launches(asked, gate_of=gate_of)
    return gate.baseline, gate.candidate


@pytest.mark.parametrize(("decides", "taken"), [(1, 2), (3, 4), (9, 8)])
def test_a_gate_ends_after_the_first_look_that_decides(decides, taken, launches):
    found = measured(Decides(decides))
    assert len(launches) == taken
    assert [len(side.cases[0].rounds["images_per_s"]) for side in found] == [6 * taken] * 2


@pytest.mark.parametrize(
    ("max_time_s", "taken", "looks"), [(400, 6, [2, 4]), (360, 6, [2, 4]), (359, 5, [2, 4]), (1, 1, [])]
)
def test_time_ends_a_gate_after_the_last_launch_that_fits_and_adds_no_look(
    max_time_s, taken, looks, launches, capsys
):
    gate_of = Decides(9)
    measured(gate_of, max_time_s=max_time_s)
    assert (len(launches), gate_of.asked) == (taken, looks)
    assert f"--max-time has no room for launch {taken + 1}" in capsys.readouterr().err


@pytest.mark.usefixtures("launches")
def test_every_start_says_the_time_expected_then_what_is_left_and_can_be_resolved(capsys, monkeypatch):
    monkeypatch.setattr("ddp_bench.bench.common.console.PLAIN_INTERVAL_S", 0.0)
    measured(Decides(9), max_time_s=450)
    said = capsys.readouterr().err
    assert said.index("expected time: about 1m 00s to 4m 00s, at 30s a launch") < said.index("launch 1 of 2")
    assert "launch 1 of 2, at most 8, about 1m 00s left" in said, "as planned"
    assert "launch 4 of 4, at most 8, about 1m 00s left, can resolve changes of about ±1.9%" in said
    assert "launch 6 of 7 within --max-time, about 2m 00s left" in said, "no more than the time limit leaves"


@pytest.mark.usefixtures("launches")
def test_a_time_without_room_for_the_first_look_is_told_before_the_first_launch(capsys, monkeypatch):
    """Agree in what is expected, what is left and what is made: one launch, whatever the time."""
    monkeypatch.setattr("ddp_bench.bench.common.console.PLAIN_INTERVAL_S", 0.0)
    measured(Decides(9), max_time_s=20)
    said = capsys.readouterr().err
    lack = "--max-time 20s has room for 0 of at least 2 launches: "
    lack += "the result will be undecided; 2 take about 1 min"
    assert said.index("expected time: about 30s, at 30s a launch\n") < said.index(f"{lack}\n")
    assert said.index(lack) < said.index("launch 1 of 1 within --max-time, about 30s left")


@pytest.mark.parametrize(
    ("looks", "max_time_s", "said"),
    [
        ((6, 12, 24), math.inf, "about 3m 00s to 12m 00s, at 30s a launch"),
        ((6,), math.inf, "about 3m 00s, at 30s a launch"),
        ((6, 24), 600, "about 3m 00s to 10m 00s, at 30s a launch"),
        ((6, 24), 60, "about 1m 00s, at 30s a launch"),
        ((6, 24), 10, "about 30s, at 30s a launch"),
    ],
)
def test_the_expected_time_knows_looks_and_limit(looks, max_time_s, said):
    asked = Request(reference=".", arguments=(), looks=looks, max_time_s=max_time_s)
    assert PLAN.describe_time(asked)[0] == f"expected time: {said}"


def test_a_dry_run_prints_the_plan_and_measures_nothing(capsys, launches):
    how = ["--interleave", "main", "--env", "A=1", "--launches", "6,12", "--dry-run"]
    assert main([*how, "--", "--gpus", "1"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"baseline: git reference main, {sys.executable}, torch 2.13.0",
        f"candidate: the code as it stands, {sys.executable}, torch 2.14.1, A=1",
        "2 cases a side: single-n1, ddp-n2",
        "The gate launches both sides anew 6 or 12 times, as soon as they decide.",
        "Expected time: about 3m 00s to 6m 00s, at 30s a launch.",
    ]
    assert launches == []


def test_a_launch_alone_decides_nothing_where_several_were_planned():
    for slower in (1.0, 1.5):
        gate = gated(STEADY, slowed(slower), looks=(6, 12, 24))
        assert gate.exit_code == ExitCode.UNDECIDED
        assert gate.ended_early
        assert {c.reason for c in gate.undecided} == {OF_ONE_LAUNCH["reason"]}
    assert gated(STEADY, slowed(1.5), looks=(1,)).exit_code == ExitCode.FAILED


def in_launches(ratios, rounds=6):
    """Both sides of a gate whose launches have these ratios of the candidate's step to the baseline's."""
    steps = [100.0] * len(ratios) * rounds, [100.0 * ratio for ratio in ratios for _ in range(rounds)]
    return [made_run({("single", 1): ms}, launches=len(ratios)) for ms in steps]


def test_what_can_be_resolved_follows_from_how_launches_scatter():
    """Oracle: Student's interval of the mean of the launches, as textbooks have it."""
    ratios = [1.01, 0.99, 1.02, 0.98, 1.0, 1.015]
    logs = [-math.log(one) for one in ratios]
    gate = gated(*in_launches(ratios), looks=(6, 12, 24))
    looks = (
        (6, 0.25, gate.compute_resolvable_change()),
        (6, 0.25, gate.compute_resolvable_change(6)),
        (24, 0.5, gate.compute_resolvable_change(24)),
    )
    for launched, share, found in looks:
        half = t.ppf(1 - 0.01 * share, launched - 1) * statistics.stdev(logs) / math.sqrt(launched)
        assert found == pytest.approx(half, rel=0.02)
    assert any("can resolve changes of about ±" in note for note in output.list_notes(gate))
    assert gated(*in_launches(ratios[:2]), looks=(6, 12)).compute_resolvable_change(6) is None, (
        "two launches tell too little"
    )


def test_a_pass_says_which_slowdown_it_excludes_where_it_judges_a_rate():
    """`--ratios-only` judges none, and passes."""
    step_ms = [100.0 + r % 3 for r in range(36)]
    sides = [made_run({("single", 1): step_ms, ("ddp", 2): step_ms}, launches=6) for _ in range(2)]
    for is_told, options in ((True, {}), (False, {"ratios_only": True})):
        gate = gated(*sides, looks=(6,), **options)
        assert gate.decision.verdict == "pass"
        assert (
            any(note.startswith("No case is slower by more") for note in output.list_notes(gate)) == is_told
        )


def reading(at_s, own_s, busy_s):
    return LoadReading("a", (0, 1), at_s, own_s, (busy_s / 2,) * 2, (0.0, 0.0))


def test_other_programs_are_measured_while_the_sides_are_launched(launches, monkeypatch):
    """Two cores: ours use half of them in each minute; others nothing in the first and a core afterwards."""
    found = iter(
        [reading(0, 0, 0), reading(60, 60, 60), *(reading(60 + s, 60 + s, 60 + 2 * s) for s in (0, 60))]
    )
    monkeypatch.setattr(interleave, "read_load", lambda: next(found))
    runs = measured(Decides(1))
    assert len(launches) == 2
    for run in runs:
        (load,) = run.manifest.load
        assert (load.cores, load.others, load.seconds) == (2, pytest.approx(0.5), 120)


def under_load(others, ratios=(1.0, 1.2, 0.8)):
    """Both sides of three launches that tell little, while other programs used so many of two cores."""
    return add_conditions(in_launches(ratios), ({}, {}), [Load(cores=2, others=others, seconds=60.0)])


ASKED = ("--interleave", "main", "--launches", "3", "--json", "--", "--gpus", "1")


def test_free_the_machine_first_where_its_load_hides_a_change():
    gate = gated(*under_load(0.9), looks=(3,), asked=ASKED)
    assert gate.decision.verdict == "undecided"
    step = gate.more
    assert step.why == "free the machine first: other programs used 45% of the cores; then gate again"
    assert step.command == "python -m bench.gate --interleave main --launches 3 -- --gpus 1"
    (load,) = json.loads(output.encode_gate(gate))["load"]["candidate"]
    assert load["others"] / load["cores"] == 0.45
    assert any(
        "Other programs used 45% of the cores during the rounds" in w for w in output.list_warnings(gate)
    )
    quiet = gated(*under_load(0.02), looks=(3,), asked=ASKED)
    assert "free the machine" not in quiet.more.why
    assert "Other programs used 1% of the cores." in output.list_facts(quiet)
    decided = gated(*under_load(0.9, (1.5, 1.51, 1.49)), looks=(3,), asked=ASKED)
    assert decided.more is None, "a regression is one under load too"
    assert describe_verdict(decided).startswith("Regression: ")


@pytest.mark.parametrize(
    ("others", "free"), [(0.0, ""), (0.9, "free the machine first: other programs used ")]
)
def test_a_gate_that_time_ended_before_its_first_look_is_given_time_for_it(others, free):
    """The time that had no room is not repeated; a launch of both sides took 30 s."""
    wide = {("single", 1): [100.0, 101, 99, 100.5, 99.5, 102], ("ddp", 2): [100.0, 300, 40, 250, 60, 90]}
    load = [{"cores": 2, "others": others, "seconds": 60.0}]
    runs = [made_run(one, load=load, timing={"total_s": 30.0}) for one in (slowed(1.0, steps=wide), wide)]
    runs[0] = made_run(dict.fromkeys(wide, wide["single", 1]), load=load, timing={"total_s": 30.0})
    asked = "--interleave main --max-time 45s --html g.html --junit g.xml --json -- --gpus 2"
    gate = gated(*runs, looks=(6, 8), asked=asked.split())
    assert gate.exit_code == ExitCode.UNDECIDED
    assert gate.more.command == (
        "python -m bench.gate --interleave main --html g.html --junit g.xml -- --gpus 2"
    )
    assert gate.more.why.startswith(free)
    assert gate.more.why.endswith("ive the gate about 3 min (6 launches)")
    assert gate.more.minutes == 3
    said = describe_verdict(gate)
    assert said.startswith("Undecided: throughput of DDP on 2 CPU cores changed by ")
    assert " after 1 of at least 6 launches. " in said
    assert re.search(r"changed by -\d+ to >999% after", said), "an estimate would say nothing"
    assert len(said.split(". ")[0]) <= 115
    assert any("another launch may differ by more" in note for note in output.list_notes(gate))


def test_the_headline_names_the_undecided_case_that_may_be_slowest():
    """DDP's estimate is faster, and its interval reaches far below the limit, which single's excludes."""
    ratios = {
        ("single", 1): [1.001, 0.999, 1.06, 1.07, 1.06, 1.0],
        ("ddp", 2): [0.7, 1.1, 0.8, 1.4, 0.9, 0.6],
    }
    steps = [
        {key: [100.0 * ratio for ratio in one or own for _ in range(6)] for key, own in ratios.items()}
        for one in ([1.0] * 6, None)
    ]
    gate = gated(*(made_run(one, launches=6) for one in steps), looks=(6, 8))
    by_case = {c.case_id: c for c in gate.undecided if c.metric == "images_per_s"}
    assert by_case["ddp-n2"].ratio.estimate > by_case["single-n1"].ratio.estimate
    assert by_case["ddp-n2"].ratio.low < by_case["single-n1"].ratio.low
    said = describe_verdict(gate)
    assert said.startswith("Undecided: throughput of DDP on 2 CPU cores changed by ")
    reason, action = said.split(". ")
    assert reason.endswith(": a regression over 5% is possible")
    assert re.fullmatch(r"Measure \d+ launches, interleaved\.", action)
    assert len(reason) <= 115


def test_separate_runs_name_the_side_that_was_loaded():
    quiet, busy = made_run(STEADY), made_run(STEADY, load=[{"cores": 2, "others": 1.0, "seconds": 9.0}])
    _, cautions = describe_machine(quiet, busy, [*zip(quiet.cases, busy.cases, strict=True)])
    assert [one.partition(" during")[0] for one in cautions] == [
        CPU_STAND_IN,
        "candidate: other programs used 50% of the cores",
    ]
    _, cautions = describe_machine(on_gpus(1980.0), quiet, [])
    assert cautions == (f"candidate: {CPU_STAND_IN}",), "not said of GPUs"


def on_gpus(mhz, throttled_pct=0.0):
    run = made_run(STEADY)
    how = {"device_type": "cuda", "sm_clock_mhz": mhz, "throttled_pct": throttled_pct}
    cases = [changed(case, **how, throttle_reasons="power cap") for case in run.cases]
    return replace(run, cases=tuple(cases))


@pytest.mark.parametrize(
    ("sides_of", "cautions"),
    [
        ((on_gpus(1980.0), on_gpus(1975.0)), []),
        ((on_gpus(1980.0), on_gpus(1700.0)), ["the GPU clock was 1,980 MHz for the baseline, 1,700 MHz"]),
        ((on_gpus(1980.0), on_gpus(1980.0, 30.0)), ["candidate: 3 cases of 3 ran with a GPU slowed by"]),
    ],
)
def test_clocks_and_throttling_are_named(sides_of, cautions):
    pairs = [*zip(*(run.cases for run in sides_of), strict=True)]
    _, found = describe_machine(*sides_of, pairs)
    assert all(said.startswith(begin) for said, begin in zip(found, cautions, strict=True))


def test_the_clocks_of_several_launches_are_those_of_the_slowest():
    (case, *_) = merge_launches([on_gpus(1980.0), on_gpus(1500.0, 40.0), on_gpus(1970.0)]).cases
    assert (case.result.sm_clock_mhz, case.result.throttled_pct) == (1500.0, 40.0)


def test_a_side_that_prints_beside_its_plan_is_refused_in_a_line(tmp_path):
    file = tmp_path / "candidate.json"
    file.write_text('{"cases": []}')
    assert read_plan("candidate", file) == {"cases": []}
    file.write_text('hello from a hook\n{"cases": []}')
    with pytest.raises(UsageError, match=r"the candidate side printed .* from 'hello from a hook' on; let"):
        read_plan("candidate", file)

"""A machine that changes by itself, between runs and between launches: what the gate makes of it."""

import math
import re
import shlex
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from accuracy_tables import FITTED, SINGLE, figures, interval_of, rounds
from commands import ROOT
from gate_runs import (
    STEADY,
    gated,
    in_one_launch,
    made_result,
    made_run,
    of_metric,
    rounds_of,
    slowed,
    with_rounds,
    write_run,
)
from made import made_manifest
from msgspec import structs

from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.headline import describe_verdict
from ddp_bench.bench.gate.judge import find_typical_sides
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.gate.more import write_interleave_command
from ddp_bench.bench.gate.output import NOT_INTERLEAVED
from ddp_bench.bench.gate.runs import GateCase, GateRun, merge_launches, read_run
from ddp_bench.bench.gate.wording import format_row
from ddp_bench.bench.results.store import load_run, read_manifest
from ddp_bench.bench.run.main import parse_settings
from ddp_bench.bench.stats.fit import FittedSteps
from ddp_bench.bench.stats.interval import Estimate, add_between_run_variance


@cache
def singles():
    """What each recorded run measured on one device, which no link slows: figures, fit and rounds."""
    found = []
    for row in (row for row in figures() if row["case"] == SINGLE):
        batch, steps = int(row["global_batch"]), rounds()[row["run"]]
        step = FittedSteps({(case, "timed"): ms for case, ms in steps.items()}).estimate(
            lambda log_ms: log_ms[0], (SINGLE, "timed")
        )
        if row["run"].startswith("tune/"):  # nothing but steps was measured
            again = step.compute_interval().exponentiate().invert(1000 * batch)
            assert again.to_columns("") == pytest.approx(interval_of(row, FITTED).to_columns(""), rel=1e-5)
        rate = replace(step, value=math.log(1000 * batch) - step.value)
        found.append((row, rate, list(steps[SINGLE].values())))
    return found


def changes(slower=1.0):
    """Which pairs of runs of a model on a machine are a change: by their rounds alone, and to the gate."""
    by_rounds, whole = [], []
    for (row, fit, ms), (other, later, later_ms) in combinations(singles(), 2):
        if (row["arch"], row["cpu"]) != (other["arch"], other["cpu"]):
            continue
        alone = later.shift(-math.log(slower)).subtract(fit)
        for found, one in (
            (by_rounds, alone),
            (whole, add_between_run_variance(alone, np.log(ms), np.log(later_ms))),
        ):
            ratio = one.compute_interval(0.98).exponentiate()
            found.append(abs(ratio.estimate - 1) > 0.05 and ratio.is_clear_of(1))
    return by_rounds, whole


def test_runs_of_the_same_code_are_seldom_a_change():
    """Oracle: the same plain model on the same machine, hours apart; the truth of every pair is 1."""
    by_rounds, whole = changes()
    assert (len(whole), sum(by_rounds), sum(whole)) == (85, 29, 5), "as docs/gate.md says"


def test_a_run_that_is_much_slower_is_a_change():
    assert (sum(changes(1.5)[1]), sum(changes(2.3)[1])) == (68, 85), "as docs/gate.md says"


def test_a_steady_run_is_hardly_widened_and_a_clear_change_stays_one():
    rng = np.random.default_rng(1)
    known, ratios = Estimate(0.0, 0.01, 40), []
    for _ in range(200):
        wider = add_between_run_variance(known, *(rng.normal(0, 0.02, 40) for _ in range(2)))
        ratios.append(wider.error / known.error)
    assert np.median(ratios) < 1.3
    half = add_between_run_variance(Estimate(-50.0, 1.0, 40), [50.0, 51.0] * 10, [100.0, 101.0] * 10)
    assert half.compute_interval().high < -45


def test_too_few_rounds_or_no_interval_are_left_as_they_are():
    known, unknown = Estimate(0.5, 0.05, 9), Estimate(0.5, float("nan"), 1)
    assert add_between_run_variance(known, [1.0, 9.0] * 5, [1.0] * 11).error == known.error
    assert np.isnan(add_between_run_variance(unknown, [1.0, 9.0] * 9, [1.0, 2.0] * 9).error)


def test_figures_are_widened_in_their_own_unit():
    """By hand: quarters of 0, 10, 20 and 30 ms without scatter have a variance of 500 / 3."""
    steps = [ms for ms in (0.0, 10.0, 20.0, 30.0) for _ in range(4)]
    wider = add_between_run_variance(Estimate(5.0, 1.0, 1e9), steps, [10.0] * 16)
    assert wider.error == pytest.approx(np.hypot(1, np.sqrt(500 / 3)), rel=1e-3)
    assert wider.freedom == pytest.approx(3, rel=0.02), "four quarters tell it"


def loaded(steps, *paces):
    """The same work while something else takes the machine, more or less of it in each part of the run."""
    return {
        key: [
            ms / pace
            for part, pace in zip(np.array_split(series, len(paces)), paces, strict=True)
            for ms in part
        ]
        for key, series in steps.items()
    }


LONG = {key: [*series] * 4 for key, series in STEADY.items()}


def test_a_machine_that_changes_by_itself_leaves_it_undecided():
    """The code is at 0.90x; the machine was taken away, so that the runs have 0.43x."""
    base = made_run(LONG, git={"commit": "0123456789abcdef"})
    gate = gated(base, loaded(slowed(1 / 0.9, steps=LONG), 0.75, 0.35, 0.55, 0.4))
    rates = of_metric(gate, "images_per_s")
    assert all(c.ratio is not None and 0.40 < c.ratio.estimate < 0.46 for c in rates)
    assert {c.verdict for c in rates} == {"undecided"}
    assert {c.verdict for c in gate.comparisons if c not in rates} == {"no regression"}
    assert gate.exit_code == 3, "though speed-up is known"
    assert gate_output.list_warnings(gate)[0] == NOT_INTERLEAVED
    assert "bench.gate --interleave 0123456789ab --launches 9 -- " in gate.more.command


def test_runs_that_took_turns_are_compared_round_by_round_in_their_folders_too():
    """The machine of the test above meets both sides: the code's 0.90x is found to a percent."""
    base = loaded(LONG, 0.75, 0.35, 0.55, 0.4)
    slow = slowed(1 / 0.9, steps=base)
    together = [made_run(steps, interleaved_id="abc") for steps in (base, slow)]
    gate = gated(*together)
    rates = of_metric(gate, "images_per_s")
    assert {c.verdict for c in rates} == {"regressed"}
    assert all(c.ratio is not None and abs(c.ratio.estimate - 0.9) < 0.01 for c in rates)
    said = [*gate_output.list_warnings(gate), *gate_output.list_notes(gate), describe_verdict(gate)]
    assert not any("not interleaved" in line or "--interleave" in line for line in said)
    for others in ({"interleaved_id": "abd"}, {}, {"interleaved_id": "abc", "resumed": [{"utc": ""}]}):
        assert not gated(together[0], made_run(slow, **others)).interleaved


def test_a_table_leaves_out_what_is_undecided_and_decides_nothing():
    gate = gated(STEADY, STEADY)
    assert {c.metric for c in gate.shown} == {"images_per_s"}
    assert f"Not shown: {len(gate.comparisons) - 3} changes" in " ".join(gate_output.list_notes(gate))
    every = [structs.replace(c, verdict="improved") if c.metric == "speedup" else c for c in gate.comparisons]
    assert {c.metric for c in replace(gate, comparisons=tuple(every)).shown} == {"images_per_s", "speedup"}
    assert gated(STEADY, STEADY, strict=True).shown == [*gated(STEADY, STEADY, strict=True).comparisons]


CLEAN = {"git": {"commit": "0123456789abcdef", "dirty": False}}


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (CLEAN, 3),
        ({"git": {"commit": "fedcba9876543210", "dirty": False}}, 1),
        ({"git": {**CLEAN["git"], "dirty": True}}, 1),
        ({**CLEAN, "versions": {"torch": "2.16.0", "python": "3.12.1"}}, 1),
    ],
    ids=["same", "other commit", "uncommitted changes", "other torch"],
)
def test_the_same_code_under_the_same_conditions_is_no_regression(now, code, tmp_path, capsys):
    base = write_run(tmp_path / "base", LONG, **CLEAN)
    slow = write_run(tmp_path / "slow", loaded(LONG, 0.43), **now)
    # One launch on CPU cores tells ratios of modes to some 15% at 98%.
    ratios_only = ["--ratios-only", "--threshold", "25%"] if "versions" in now else []
    assert main([str(base), str(slow), *ratios_only]) in (code, 0 if ratios_only else code)
    said = " ".join(capsys.readouterr().out.split())
    assert ("conditions: the machine changed" in said.partition(" Baseline ")[0]) == (code == 3)


def test_figures_of_separate_runs_are_those_of_the_runs_own_tables(tmp_path):
    """Medians of rounds contradict each other where single and DDP have other good rounds."""
    rng = np.random.default_rng(3)
    steps = {key: [ms * float(rng.choice([1.0, 1.7])) for ms in series] for key, series in LONG.items()}
    base, same = (read_run(write_run(tmp_path / name, steps)) for name in ("a", "b"))
    cases = load_run(tmp_path / "a").cases.set_index("case_id")
    compared = of_metric(gated(base, same), "images_per_s", "speedup")
    assert len(compared) == 5
    for c in compared:
        assert c.baseline == c.candidate == pytest.approx(cases.loc[c.case_id, c.metric])
        assert c.ratio.estimate == 1


def test_a_strict_gate_needs_every_metric_decided():
    """Of what communication adds nothing is known; throughputs are."""
    run = made_run(LONG)
    wild = with_rounds(run, only=("ddp-n2",), exposed_comm_ms=in_one_launch([0.0, 90.0] * 12))
    assert gated(wild, wild).exit_code == 0
    assert gated(wild, wild, strict=True).exit_code == 3
    assert gated(run, run, strict=True).exit_code == 0


@pytest.mark.parametrize("run", ["cpu-lab-1gbit-2hosts", "predictions/resnet18-2hosts/1gbit"])
def test_the_command_measures_what_the_run_measured(run):
    """Oracle: the parser of bench.run, with the options that the gate refuses."""
    measured = read_manifest(ROOT / "results/samples" / run)
    assert write_interleave_command(measured, measured) == "", "no gate measures in a lab"
    manifest = structs.replace(measured, link=None)
    assert " --interleave . -- " in write_interleave_command(manifest, manifest), "both are of one commit"
    candidate = structs.replace(manifest, git=structs.replace(manifest.git, commit="f" * 40))
    command = shlex.split(write_interleave_command(manifest, candidate))
    start, arguments = command[:5], command[6:]
    assert start == ["python", "-m", "bench.gate", "--interleave", str(manifest.git.commit)[:12]]
    refused = ("resume", "dry_run", "json", "out")
    settings = parse_settings(arguments, decided=refused)
    for name in ("modes", "gpus", "arch", "batch_size", "image_size", "axes", "rounds", "max_time"):
        assert getattr(settings, name) == getattr(manifest.settings, name), name


def run_of(images_per_s, *, status="ok", memory=None):
    images_per_s = in_one_launch(images_per_s)
    case = GateCase(
        made_result("ddp", 2, status=status),
        rounds=rounds_of(
            images_per_s,
            images_per_s,
            step_ms=dict.fromkeys(images_per_s, 100.0),
            exposed_comm_ms={r: -value for r, value in images_per_s.items()},
            peak_mem_mib=memory,
        ),
    )
    return GateRun(Path("run"), made_manifest(), (case,))


def test_rounds_of_launches_stay_apart():
    (case,) = merge_launches([run_of([5.0, 6.0], memory=10.0), run_of([7.0], memory=12.0)]).cases
    assert case.rounds["images_per_s"] == {(0, 0): 5.0, (0, 1): 6.0, (1, 0): 7.0}
    assert case.rounds["speedup"] == case.rounds["images_per_s"]
    assert case.rounds["exposed_comm_ms"] == {(0, 0): -5.0, (0, 1): -6.0, (1, 0): -7.0}
    assert case.rounds["peak_mem_mib"] == {(0, 0): 12.0}
    (case,) = merge_launches([run_of([5.0]), run_of([], status="timeout")]).cases
    assert (case.result.is_ok, case.result.status) == (False, "timeout"), "what failed once has failed"


def drifting(seed):
    """Both sides of a slower and slower machine that pauses at times; the candidate takes 2% longer."""
    rng = np.random.default_rng(seed)
    pace = np.linspace(1, 2, 30) * np.exp(rng.normal(0, 0.1, 30))
    base, other = (pace * np.exp(rng.normal(0, 0.2, (3, 30))) for _ in range(2))
    cases = (("single", 1), ("dp", 2), ("ddp", 2))
    return {k: list(100 * b) for k, b in zip(cases, base, strict=True)}, {
        k: list(102 * o) for k, o in zip(cases, other, strict=True)
    }


def shown(cell):
    """A number as printed, and half a unit of its last digit."""
    (written,) = re.findall(r"^[-+]?[\d,]+\.?\d*", cell)
    return float(written.replace(",", "")), 0.5 * 10.0 ** -len(written.partition(".")[2])


def test_what_stands_beside_a_paired_ratio_has_that_quotient():
    contradicted = 0
    for seed in range(10):
        base, other = drifting(seed)
        gate = gated(base, other, interleaved=True)
        assert len(gate.comparisons) == 5
        for comparison in gate.comparisons:
            (b, b_off), (c, c_off), (change, off) = map(shown, format_row(comparison)[2:5])
            assert 100 * (c / b - 1) == pytest.approx(change, abs=off + 100 * c / b * (b_off / b + c_off / c))
        for key in base:
            medians = np.median(1 / np.array(other[key])) / np.median(1 / np.array(base[key]))
            paired = np.median(np.array(base[key]) / np.array(other[key]))
            contradicted += (medians - 1) * (paired - 1) < 0
    assert contradicted > 0, "medians of each side by itself would not agree"


def test_typical_sides_lie_where_the_sides_lie():
    left, right = {r: 90.0 + r for r in range(9)}, {r: 45.0 + r / 2 for r in range(9)}
    assert find_typical_sides(left, right, 2.0) == pytest.approx((94.0, 47.0))

"""A machine that changes by itself, between runs and between launches: what the gate makes of it."""

import math
import re
import shlex
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from accuracy_tables import FITTED, SINGLE, figures, interval_of, rounds
from commands import ROOT
from gate_runs import STEADY, gated, made_run, of_metric, rounds_of, slowed, with_rounds, write_run
from selection import in_campaign

from ddp_bench.bench.findings.next_step import NOT_INTERLEAVED, interleave_command
from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.judge import compare_metric, launch_ratio, typical_sides
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.gate.runs import LAUNCH, GateCase, GateRun, merged, read_run
from ddp_bench.bench.results.schema import GATED
from ddp_bench.bench.results.store import load_run, read_manifest
from ddp_bench.bench.results.typical import LAUNCH_SD, Typical
from ddp_bench.bench.run.main import settings_of
from ddp_bench.bench.stats import two_runs
from ddp_bench.bench.stats.interval import Interval, median_of_ratios
from ddp_bench.bench.stats.two_runs import ratio_of_runs, with_change_of_runs


@cache
def singles():
    """What each recorded run measured on one device, which no link slows: figures, fit and rounds."""
    found = []
    for row in (row for row in figures() if row["case"] == SINGLE):
        batch, steps, fit = int(row["global_batch"]), rounds()[row["run"]], interval_of(row, FITTED)
        if row["run"].startswith("tune/"):  # nothing but steps was measured
            again = Typical.of({"timed": steps}).step_ms(SINGLE).inverted(1000 * batch)
            assert again.columns("") == pytest.approx(fit.columns(""), rel=1e-5)
        found.append((row, fit, [1000 * batch / ms for ms in steps[SINGLE].values()]))
    return found


def with_launch(fit):
    """As a run's own intervals are: the error of its launch added to that of its rounds."""
    log, reach = fit.log(), 1.96 * LAUNCH_SD
    low, high = math.hypot(log.estimate - log.low, reach), math.hypot(log.high - log.estimate, reach)
    ends = Interval(log.estimate, log.estimate - low, log.estimate + high).exp()
    return Interval(fit.estimate, ends.low, ends.high)


@pytest.fixture(scope="module", autouse=True)
def _one_bootstrap_of_a_sample():
    """The same rounds are in many pairs, and their variance comes of a seeded bootstrap each time."""
    original = two_runs._median_variance
    of_bytes = cache(lambda sample: original(np.frombuffer(sample)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            two_runs, "_median_variance", lambda sample: of_bytes(np.asarray(sample, float).tobytes())
        )
        yield


def changes(slower=1.0):
    """Which pairs of runs of a model on a machine are a change: by their rounds alone, and to the gate."""
    by_rounds, whole = [], []
    for (row, fit, rates), (other, later_fit, later_rates) in combinations(singles(), 2):
        if (row["arch"], row["cpu"]) != (other["arch"], other["cpu"]):
            continue
        later, now = later_fit.scaled(1 / slower), [rate / slower for rate in later_rates]
        ratio, _ = ratio_of_runs((later, fit), (now, rates), confidence=0.98)
        _, wider = ratio_of_runs((with_launch(later), with_launch(fit)), (now, rates), confidence=0.98)
        assert ratio.low < wider.estimate == ratio.estimate < ratio.high
        assert wider.low <= ratio.low * (1 + 1e-9)
        assert wider.high >= ratio.high * (1 - 1e-9)
        by_rounds.append(abs(ratio.estimate - 1) > 0.05 and ratio.excludes(1))
        whole.append(abs(ratio.estimate - 1) > 0.05 and wider.excludes(1))
    return by_rounds, whole


def test_runs_of_the_same_code_are_seldom_a_change():
    """Oracle: the same plain model on the same machine, hours apart; the truth of every pair is 1."""
    by_rounds, whole = changes()
    assert (len(whole), sum(by_rounds), sum(whole)) == (85, 27, 4), "as docs/gate.md says"


def test_a_run_that_is_much_slower_is_a_change():
    assert (sum(changes(1.5)[1]), sum(changes(2.3)[1])) == (75, 85), "as docs/gate.md says"


def test_a_steady_run_is_hardly_widened_and_a_clear_change_stays_one():
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(200):
        before, after = (list(rng.normal(0, 0.02, 40)) for _ in range(2))
        wider = with_change_of_runs(Interval(0.0, -0.02, 0.02), after, before)
        ratios.append((wider.high - wider.low) / 0.04)
    assert np.median(ratios) < 1.3
    half = with_change_of_runs(Interval(-50.0, -52.0, -48.0), [50.0, 51.0] * 10, [100.0, 101.0] * 10)
    assert half.high < -45


def test_too_few_rounds_or_no_interval_are_left_as_they_are():
    known, unknown = Interval(0.5, 0.4, 0.6), Interval(0.5, float("nan"), float("nan"))
    assert with_change_of_runs(known, [1.0, 9.0] * 3, [1.0] * 7) == known
    assert np.isnan(with_change_of_runs(unknown, [1.0, 9.0] * 9, [1.0, 2.0] * 9).low)


def test_figures_are_widened_in_their_own_unit():
    """By hand: quarters of 0, 10, 20 and 30 ms without scatter have a variance of 500 / 3."""
    steps = [ms for ms in (0.0, 10.0, 20.0, 30.0) for _ in range(4)]
    wider = with_change_of_runs(Interval(5.0, 4.0, 6.0), steps, [10.0] * 16, confidence=0.6827)
    assert wider.high - 5 == pytest.approx(np.hypot(1, np.sqrt(500 / 3)), rel=1e-3)


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
    assert {(c.verdict, c.suspected) for c in rates} == {("inconclusive", True)}
    assert {c.verdict for c in gate.comparisons if c not in rates} == {"unchanged"}
    assert gate.exit_code == 3, "though speed-up and efficiency are known to be unchanged"
    assert gate_output.conditions(gate)[0] == NOT_INTERLEAVED
    assert "bench.gate --interleave 0123456789ab -- " in gate_output.notes(gate)[-2]


def test_runs_that_took_turns_are_compared_round_by_round_in_their_folders_too():
    """The machine of the test above meets both sides: the code's 0.90x is found to a percent."""
    base = loaded(LONG, 0.75, 0.35, 0.55, 0.4)
    slow = slowed(1 / 0.9, steps=base)
    together = [made_run(steps, interleaved_id="abc") for steps in (base, slow)]
    gate = gated(*together)
    rates = of_metric(gate, "images_per_s")
    assert {c.verdict for c in rates} == {"regressed"}
    assert all(c.ratio is not None and abs(c.ratio.estimate - 0.9) < 0.01 for c in rates)
    said = [*gate_output.conditions(gate), *gate_output.notes(gate), gate_output.verdict(gate)]
    assert not any("nterleave" in line for line in said)
    for others in ({"interleaved_id": "abd"}, {}, {"interleaved_id": "abc", "resumed": [{"utc": ""}]}):
        assert not gated(together[0], made_run(slow, **others)).interleaved


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
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("the machine changed" in last) == (code == 3)


def test_figures_of_separate_runs_are_those_of_the_runs_own_tables(tmp_path):
    """Medians of rounds contradict each other where single and DDP have other good rounds."""
    rng = np.random.default_rng(3)
    steps = {key: [ms * float(rng.choice([1.0, 1.7])) for ms in series] for key, series in LONG.items()}
    base, same = (read_run(write_run(tmp_path / name, steps)) for name in ("a", "b"))
    cases = load_run(tmp_path / "a").cases.set_index("case_id")
    compared = of_metric(gated(base, same), "images_per_s", "speedup", "efficiency")
    assert len(compared) == 7
    for c in compared:
        assert c.baseline == c.candidate == pytest.approx(cases.loc[c.case_id, c.metric])
        assert c.ratio.estimate == 1
    by_name = {(c.case_id, c.metric): c for c in compared}
    for (case_id, name), c in by_name.items():
        if name == "efficiency":
            speedup = by_name[case_id, "speedup"]
            assert c.baseline == pytest.approx(speedup.baseline / 2)
            assert (c.ratio.low, c.ratio.high) == pytest.approx((speedup.ratio.low, speedup.ratio.high))


def test_a_strict_gate_does_not_pass_while_anything_is_open(tmp_path):
    wild = {**LONG, ("ddp", 2): [ms * (1, 3)[i % 2] for i, ms in enumerate(LONG["ddp", 2])]}
    base, same = (str(write_run(tmp_path / name, wild)) for name in ("a", "b"))
    roughly = ("--threshold", "25%")
    assert main([base, same, *roughly]) == 0
    assert main([base, same, *roughly, "--strict"]) == 3
    steady = [str(write_run(tmp_path / name, LONG, no_sync_ms=60.0)) for name in ("c", "d")]
    assert main([*steady, *roughly, "--strict"]) == 0


@pytest.mark.parametrize("run", ["cpu-lab-1gbit-2hosts", "predictions/resnet18-2hosts/1gbit"])
def test_the_command_measures_what_the_run_measured(run):
    """Oracle: the parser of bench.run, with the options that the gate refuses."""
    manifest = read_manifest(ROOT / "results/samples" / run)
    command = shlex.split(interleave_command(manifest, manifest))
    start, arguments = command[:5], command[6:]
    assert start == ["python", "-m", "bench.gate", "--interleave", str(manifest.git.commit)[:12]]
    refused = ("resume", "dry_run", "json", "out")
    settings = settings_of(arguments, decided=refused)
    for name in ("modes", "gpus", "arch", "batch_size", "image_size", "bucket_cap_mb", "rounds", "max_time"):
        assert getattr(settings, name) == getattr(manifest.settings, name), name


def run_of(images_per_s, *, status="ok", memory=None):
    row = {"status": status, "mode": "ddp", "num_devices": "2", "case_id": "ddp-n2"}
    case = GateCase(
        case_id="ddp-n2",
        row=row,
        rounds=rounds_of(
            images_per_s,
            images_per_s,
            step_ms=dict.fromkeys(images_per_s, 100.0),
            exposed_comm_ms={r: -value for r, value in images_per_s.items()},
            peak_mem_mib=memory,
        ),
    )
    return GateRun(Path("run"), {}, (case,))


def test_rounds_of_launches_stay_apart():
    (case,) = merged([run_of({1: 5.0, 2: 6.0}, memory=10.0), run_of({1: 7.0}, memory=12.0)]).cases
    assert case.rounds["images_per_s"] == {1: 5.0, 2: 6.0, LAUNCH + 1: 7.0}
    assert case.rounds["speedup"] == case.rounds["images_per_s"]
    assert case.rounds["exposed_comm_ms"] == {1: -5.0, 2: -6.0, LAUNCH + 1: -7.0}
    assert case.rounds["peak_mem_mib"] == {0: 12.0}
    (case,) = merged([run_of({1: 5.0}), run_of({}, status="timeout")]).cases
    assert (case.ok, case.row["status"]) == (False, "timeout"), "what failed once has failed"


def test_one_launch_is_the_paired_ratio():
    left, right = {r: 10.0 + r for r in range(9)}, {r: 11.0 + r * r for r in range(9)}
    assert launch_ratio(left, right, confidence=0.98) == median_of_ratios(left, right, confidence=0.98)


@pytest.mark.parametrize(("num_launches", "covered"), [(3, 0.85), (5, 0.88)])
def test_the_interval_holds_the_spread_between_launches(num_launches, covered):
    """Launches that differ by 2% (sd): the truth is 1, and rounds alone claim to know better."""
    rng = np.random.default_rng(7)
    inside, inside_rounds_alone, trials = 0, 0, 400
    for _ in range(trials):
        candidate, baseline = {}, {}
        for launch in range(num_launches):
            bias = rng.normal(0, 0.02)
            for r in range(30):
                candidate[launch * LAUNCH + r] = float(np.exp(bias + rng.normal(0, 0.05)))
                baseline[launch * LAUNCH + r] = 1.0
        whole = launch_ratio(candidate, baseline, confidence=0.95)
        rounds = median_of_ratios(candidate, baseline, confidence=0.95)
        inside += whole.low <= 1 <= whole.high
        inside_rounds_alone += rounds.low <= 1 <= rounds.high
    assert inside / trials >= covered, "few launches know their spread roughly"
    assert inside_rounds_alone / trials <= 0.75


def false_verdicts(trials, *, disturbed):
    """Verdicts on exposed communication of equal code, in launches that differ."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(trials):
        sides = []
        for _ in range(2):
            bias = rng.normal(0, 1.5, 3)
            rounds = {i * LAUNCH + r: 20 + bias[i] + rng.normal(0, 2) for i in range(3) for r in range(20)}
            if disturbed and not sides:
                rounds[5] = -3.0
            steps = dict.fromkeys(rounds, 25.0)
            sides += with_rounds(run_of({1: 5.0}), exposed_comm_ms=rounds, step_ms=steps).cases
        more = {"confidence": 0.995, "threshold": 0.05, "blocked": "", "interleaved": True}
        found += compare_metric(*sides, GATED["exposed_comm_ms"], **more).verdict in ("regressed", "improved")
    return found


@pytest.mark.parametrize("trials", [100, *in_campaign(1000)])
def test_a_disturbed_round_below_zero_brings_no_false_verdicts(trials):
    usual = false_verdicts(trials, disturbed=False)
    assert false_verdicts(trials, disturbed=True) <= usual + 0.04 * trials


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
    (written,) = re.findall(r"^[\d,]+\.?\d*", cell)
    return float(written.replace(",", "")), 0.5 * 10.0 ** -len(written.partition(".")[2])


def test_what_stands_beside_a_paired_ratio_has_that_quotient():
    contradicted = 0
    for seed in range(10):
        base, other = drifting(seed)
        gate = gated(base, other, interleaved=True)
        assert len(gate.comparisons) == 7
        for comparison in gate.comparisons:
            baseline, candidate, ratio = gate_output.cells(comparison)[3:6]
            (b, b_off), (c, c_off), (r, r_off) = map(shown, (baseline, candidate, ratio))
            assert c / b == pytest.approx(r, abs=r_off + c / b * (b_off / b + c_off / c))
        for key in base:
            medians = np.median(1 / np.array(other[key])) / np.median(1 / np.array(base[key]))
            paired = np.median(np.array(base[key]) / np.array(other[key]))
            contradicted += (medians - 1) * (paired - 1) < 0
    assert contradicted > 0, "medians of each side by itself would not agree"


def test_typical_sides_lie_where_the_sides_lie():
    left, right = {r: 90.0 + r for r in range(9)}, {r: 45.0 + r / 2 for r in range(9)}
    assert typical_sides(left, right, 2.0) == pytest.approx((94.0, 47.0))

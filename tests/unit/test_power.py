"""Power trials: how they are cut from launches, judged by the gate itself, recorded and read back."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate import power
from ddp_bench.bench.gate.options import DEFAULT_LAUNCHES
from ddp_bench.bench.gate.power import EVERY_TRIAL, Launch, rates, regressed, trials_of
from ddp_bench.bench.gate.trial_process import slowed
from ddp_bench.bench.gate.trials import COLUMNS, append, load, measure_power


def launch(slow_down: float, *, noise: float, seed: int, num_rounds: int = 25) -> Launch:
    rng = np.random.default_rng(seed)
    sides = [np.exp(rng.normal(0, noise, num_rounds)) * 20 for _ in range(2)]
    baseline, candidate = (dict(enumerate(map(float, side))) for side in sides)
    slower = {r: ms * (1 + slow_down) for r, ms in candidate.items()}
    return Launch(slow_down=slow_down, baseline_ms=baseline, candidate_ms=slower)


def test_the_gate_judges_a_trial() -> None:
    assert regressed([launch(0.10, noise=0.02, seed=s) for s in range(3)], threshold=0.05)
    assert not regressed([launch(0.0, noise=0.02, seed=s) for s in range(3)], threshold=0.05)
    assert not regressed([launch(0.10, noise=0.02, seed=s) for s in range(3)], threshold=0.15)


def test_trials_share_no_launch() -> None:
    launches = [[launch(0.0, noise=0.1, seed=s), launch(0.1, noise=0.1, seed=s + 100)] for s in range(7)]
    trials = list(trials_of(launches, 3))
    assert [len(trial) for trial in trials] == [3, 3, 3, 3]
    assert len({id(one) for trial in trials for one in trial}) == 12
    assert all(len({one.slow_down for one in trial}) == 1 for trial in trials)


def test_rates_have_exact_intervals() -> None:
    trials = [[launch(s, noise=0.02, seed=i)] for i in range(10) for s in (0.0, 0.10)]
    found = {rate.slow_down: rate for rate in rates(trials, threshold=0.05)}
    assert found[0.0].num_trials == found[0.10].num_trials == 10
    assert found[0.10].num_regressed == 10
    assert found[0.10].low == pytest.approx(stats.beta.ppf(0.025, 10, 1)), "Clopper-Pearson at all of ten"


def test_launches_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "power.csv"
    first = [launch(s, noise=0.1, seed=1) for s in EVERY_TRIAL]
    append(path, 1, first)
    append(path, 2, first[:1])
    back = load(path)
    assert [len(of_launch) for of_launch in back] == [len(EVERY_TRIAL), 1]
    assert back[0][2].slow_down == pytest.approx(EVERY_TRIAL[2])
    assert back[0][2].candidate_ms == pytest.approx(first[2].candidate_ms, abs=1e-5)


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "launch,slow_down_pct,round,baseline_ms\n1,x,1,2\n"])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "power.csv"
    path.write_text(content)
    with pytest.raises(UsageError, match="no file of power trials"):
        load(path)


HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("1,0,1,2.0,2.0\n1,0,2,2.0,2", "its last line is cut off"),
        ("1,0,1,nan,2.0\n", "nan is not between"),
        ("1,0,1,2.0,inf\n", "inf is not between"),
        ("1,0,1,0,2.0\n", "0 is not between"),
        ("1,0,1,2.0,-2.0\n", "-2.0 is not between"),
        ("1,-5,1,2.0,2.0\n", "-5 is not between"),
    ],
)
def test_a_damaged_record_is_refused(rows: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "power.csv"
    path.write_text(f"{HEADER}\n{rows}")
    with pytest.raises(UsageError, match=why):
        load(path)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_a_slowed_step_is_slower_by_the_share(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += 100
        return now_ns

    def step() -> None:
        nonlocal now_ns
        now_ns += 2_000_000

    monkeypatch.setattr(time, "perf_counter_ns", clock)
    slowed(step, share, torch.device("cpu"))()
    assert now_ns == pytest.approx(2_000_000 * (1 + share), abs=1000)


def test_a_record_in_no_folder_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere is no folder"):
        measure_power(tmp_path / "nowhere" / "power.csv", num_trials=1, quiet=True)


def test_the_table_names_every_rate() -> None:
    trials = [[launch(s, noise=0.02, seed=i)] for i in range(4) for s in (0.0, 0.10)]
    text = power.report(rates(trials, threshold=0.05))
    assert "| none (A/A) | 0 | 4 | 0% [0, 60] |" in text
    assert "| 10% | 4 | 4 | 100% [40, 100] |" in text


def test_a_finished_record_is_only_judged(tmp_path: Path) -> None:
    record = tmp_path / "power.csv"
    for number in range(1, DEFAULT_LAUNCHES + 1):
        append(record, number, [launch(s, noise=0.02, seed=number) for s in (0.0, 0.10)])
    before = record.read_bytes()
    found = measure_power(record, num_trials=1, quiet=True)
    assert [rate.num_regressed for rate in found] == [0, 1]
    assert record.read_bytes() == before

"""What earlier runs of a plan tell of the next one: found in the results folder, and counted."""

import math
import os

import numpy as np
import pytest
from gate_runs import STEADY, write_run
from scipy import stats

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.findings.confidence import UNKNOWN_REPEATABILITY, describe_repeatability, find_agreements
from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.machine.manifest import MANIFEST
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.interval import Interval


def written(folder, number, steps=STEADY, **more):
    told = {"plan_hash": "same", "created_utc": f"2026-01-01T00:{number:02d}:00+00:00", **more}
    write_run(folder / f"run{number}", steps, **told)
    return load_run(folder / f"run{number}")


def paced(pace):
    """Steps of a machine that is so many times as slow; DDP's ratio to single moves by half of that."""
    power = {"ddp": 0.5}
    return {key: [ms * pace ** power.get(key[0], 1) for ms in series] for key, series in STEADY.items()}


def test_the_fifth_run_says_how_far_the_runs_before_lie_apart(tmp_path):
    """Rates lie apart by the paces' scatter, DDP over `single` by half of it; intervals hold neither."""
    paces = [1.0, 1.1, 0.9, 1.2, 1.05]
    runs = [written(tmp_path, i, paced(pace)) for i, pace in enumerate(paces)]
    assert [len(run.earlier) for run in runs] == [0, 1, 2, 3, 4]
    scatter = 100 * np.std(np.log(paces), ddof=1)
    assert conclude_run(runs[4]).trust.next_run.startswith(
        f"In this and 4 earlier runs of the plan, rates vary by {scatter / 2:.2g}% to {scatter:.2g}%, ratios "
        f"by {scatter / 2:.2g}% (standard deviation): if runs differ by more than an interval, "
        "decide by that difference. 0 of 5 intervals of ratios hold the common value: "
        "0%, where 95% would if rounds alone differed."
    )
    for run in runs[:2]:
        assert UNKNOWN_REPEATABILITY in conclude_run(run).trust.next_run, "two have no scatter"


def test_only_runs_of_this_plan_and_machine_that_began_before_count(tmp_path):
    written(tmp_path, 1)
    written(tmp_path, 2, plan_hash="other")
    written(tmp_path, 3, environment={"cpu_model": "Another CPU", "num_cores": 2, "gpus": []})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MANIFEST).write_text("{")
    run = written(tmp_path, 4)
    written(tmp_path, 5)
    assert len(run.earlier) == 1
    assert written(tmp_path, 6, interleaved_id="abc").earlier == []


HOSTILE = {
    "half of a surrogate pair": '{"schema_version": 3, "git": "\\ud800", "plan_hash": "same"}',
    "nested": "[" * 100_000,
    "numbers": '{"schema_version": 1e999, "plan_hash": 1e400}',
    "other types": '{"schema_version": 3, "settings": {"gpus": "\\udfff"}, "ranks": [[]]}',
    "no text": "\x00\x00",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_no_neighbour_can_break_a_run(content, tmp_path):
    written(tmp_path, 1)
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / MANIFEST).write_text(content)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / MANIFEST)
    run = written(tmp_path, 2)
    assert len(run.earlier) == 1
    with pytest.raises(UsageError):  # and as the run itself it is one line
        load_run(evil)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_runs_of_other_users_do_not_count(tmp_path):
    """In a shared folder anyone could make up what my next run is said to be."""
    for number in (1, 2):
        written(tmp_path, number)
    os.chown(tmp_path / "run1", 12345, 12345)
    (tmp_path / "linked").symlink_to(tmp_path / "run2")
    assert len(written(tmp_path, 3).earlier) == 1


def test_runs_that_differ_by_their_rounds_alone_hold_what_they_have_in_common():
    rng, held, total = np.random.default_rng(1), 0, 0
    half = float(stats.norm.ppf(0.975)) * 0.01
    for _ in range(200):
        logs = rng.normal(0, 0.01, 10)
        (found,) = find_agreements([{"a": Interval(x, x - half, x + half).exponentiate()} for x in logs])
        held, total = held + found.holding, total + found.num_runs
    assert held / total == pytest.approx(0.95, abs=0.015)


def test_intervals_without_a_width_or_with_an_end_of_nothing_count_for_nothing():
    ends = [(0.9, 1.1), (1.0, 1.0), (0.0, 1.2), (0.9, math.inf), (math.nan, math.nan), (0.9, 1.1)]
    assert find_agreements([{"a": Interval(1.0, low, high)} for low, high in ends]) == []
    (found,) = find_agreements([{"a": Interval(1.0, low, high)} for low, high in (*ends, (0.8, 1.1))])
    assert found.num_runs == 3


def test_a_run_without_rates_says_how_to_find_out(tmp_path):
    run = written(tmp_path, 1)
    assert UNKNOWN_REPEATABILITY in describe_repeatability(run.results, run.compared, [])

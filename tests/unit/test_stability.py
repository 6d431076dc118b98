from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from gate_runs import block_rows, plan

from ddp_bench.bench.findings.stability import cautions, split_levels
from ddp_bench.bench.results.aggregate import Outcome, case_rows
from ddp_bench.bench.results.schema import BLOCKS, typed_frame

Noise = Callable[[np.random.Generator, int], np.ndarray]

TRIALS = 200


def found(*series, target=None):
    """The cautions about a run whose cases had these step times by round, in ms; by kind."""
    planned = plan()[: len(series)]
    rows = [
        row
        for p, times in zip(planned, series, strict=True)
        for row in block_rows(p.case.case_id, p.case.mode, times)
    ]
    blocks = typed_frame(rows, BLOCKS)
    cases = case_rows([Outcome(p) for p in planned], blocks)
    made = cautions(cases, blocks, target=target)
    assert len({caution.kind for caution in made}) == len(made)
    return {caution.kind: caution for caution in made}


def normal(rng, size):
    return 100 * np.exp(0.02 * rng.normal(size=size))


def log_normal(rng, size):
    return 100 * np.exp(0.25 * rng.normal(size=size))


@pytest.mark.campaign
@pytest.mark.parametrize(("noise", "num_rounds"), [(normal, 10), (log_normal, 20)])
def test_each_check_leaves_mere_noise_alone(noise, num_rounds):
    rng = np.random.default_rng(num_rounds)
    alarms = {}
    for _ in range(TRIALS):
        for kind in found(*(noise(rng, num_rounds) for _ in range(3))):
            alarms[kind] = alarms.get(kind, 0) + 1
    # 2% of 200 are 4; 10 or more would come once in a hundred times.
    assert all(count <= 9 for count in alarms.values()), alarms


def test_drift_is_told_with_its_size_and_interval():
    rng = np.random.default_rng(0)
    slower = np.linspace(1.0, 1.1, 20)
    caution = found(*(normal(rng, 20) * slower for _ in range(3)))["drift"]
    size, low, high = (
        float(part.strip("%,[]+")) for part in caution.text.split("changed by ")[1].split()[:3]
    )
    assert low < size < high < 0
    assert low < 100 * (1 / 1.1 - 1) < high
    assert "from round 1 to 20" in caution.text
    assert "bench.doctor" in caution.sentence
    assert "bench.gate --interleave" in caution.sentence


def test_drift_alone_is_not_called_two_levels_or_outliers():
    rng = np.random.default_rng(1)
    assert set(found(100 * np.linspace(1, 1.5, 30) * np.exp(0.005 * rng.normal(size=30)))) == {"drift"}


def test_two_levels_name_the_worst_case_and_both_speeds():
    rng = np.random.default_rng(2)
    slow = rng.permutation([1.06] * 7 + [1.0] * 13)
    steady = normal(rng, 20)
    caution = found(steady, steady[::-1] * 1.0, 100 * slow * np.exp(0.003 * rng.normal(size=20)))[
        "two levels"
    ]
    assert caution.case_id == plan()[2].case.case_id
    assert caution.text.startswith("1 of 3 cases has rounds at two speeds")
    assert "35% of 20 rounds near" in caution.text
    assert "bench.doctor" in caution.advice


def test_a_split_in_two_is_the_one_that_was_made():
    rng = np.random.default_rng(3)
    levels = split_levels([*rng.normal(100, 1, 40), *rng.normal(110, 1, 20)])
    assert levels.share_low == pytest.approx(2 / 3)
    assert (levels.low, levels.high) == pytest.approx((100, 110), abs=1)


@pytest.mark.parametrize("size", [10, 20, 60])
def test_noise_alone_is_no_split(size):
    rng = np.random.default_rng(size)
    for draw in (rng.standard_normal, lambda n: rng.standard_t(3, n), lambda n: rng.gumbel(size=n)):
        assert sum(split_levels(list(np.exp(draw(size)))) is not None for _ in range(500)) <= 4


def test_one_pause_is_told_by_its_round():
    times = normal(np.random.default_rng(6), 12)
    times[6] = 300
    caution = found(times)["outliers"]
    assert caution.text.startswith("1 of 12 blocks (8.3%)")
    assert "round 7" in caution.text
    assert "more --rounds" in caution.advice


def test_a_first_round_that_is_still_warming_up():
    times = normal(np.random.default_rng(7), 12)
    times[0] = 125
    caution = found(times)["warm-up"]
    assert "round 1 ran 2" in caution.text
    assert "below the others" in caution.text
    assert "--rounds" in caution.advice


def test_few_rounds_and_the_number_that_the_target_needs():
    few = found([100.0, 101, 99])
    assert set(few) == {"few rounds"}
    assert "bench.run --rounds 10" in few["few rounds"].advice
    noisy = list(np.random.default_rng(8).normal(100, 4, 10))
    assert "wide intervals" not in found(noisy)
    wide = found(noisy, target=0.02)["wide intervals"]
    assert "±2%" in wide.text
    needed = int(wide.advice.split("--rounds ")[1].split(",")[0])
    assert 10 < needed <= 1000


def test_a_run_that_measured_nothing_or_lacks_its_blocks_has_no_cautions():
    planned = plan()
    blocks = typed_frame(block_rows(planned[0].case.case_id, "single", [100.0, 101]), BLOCKS)
    nothing = case_rows([Outcome(p, "failed", "no such luck") for p in planned], blocks)
    assert cautions(nothing, blocks, target=0.02) == []
    cases = case_rows([Outcome(planned[0])], blocks)
    assert cautions(cases, blocks.iloc[:0], target=None) == []
    broken = blocks.assign(block_ms=pd.Series([0.0, float("nan")]))
    assert cautions(cases, broken[broken["block_ms"] > 0], target=0.02) == []


def sustained(rounds, after):
    """The caution about a case with these step times in the rounds and these without a pause."""
    planned = plan()[0]
    rows = block_rows(planned.case.case_id, planned.case.mode, rounds)
    rows += block_rows(planned.case.case_id, planned.case.mode, after, "sustained")
    blocks = typed_frame(rows, BLOCKS)
    made = cautions(case_rows([Outcome(planned)], blocks), blocks, target=None)
    return next((caution for caution in made if caution.kind == "steady rate"), None)


@pytest.mark.parametrize(
    ("ms", "said", "advice"), [(110.0, "-9.1%", "bench.doctor"), (95.0, "+5.3%", "a higher --steps")]
)
def test_another_rate_without_a_pause_is_told(ms, said, advice):
    wobble = [1.0, 1.001, 0.999, 1.0005, 0.9995] * 4
    caution = sustained([100 * w for w in wobble], [ms * w for w in wobble])
    assert caution.case_id == plan()[0].case.case_id
    assert f"{said} in the last half of --sustain" in caution.text
    assert "1 of 1 case without a pause at another rate" in caution.text
    assert advice in caution.advice


def test_a_rate_within_two_percent_or_the_intervals_is_no_caution():
    alike = [100.0, 100.1, 99.9] * 7
    assert sustained(alike, [1.015 * ms for ms in alike]) is None
    rng = np.random.default_rng(10)
    noisy = 100 * np.exp(0.2 * rng.normal(size=20))
    assert sustained(noisy, list(1.04 * noisy)) is None
    assert sustained(alike, [150.0] * 4) is None, "four blocks have no interval"
    assert sustained([100.0, 100.0], [150.0] * 20) is None, "two rounds have none"


@pytest.mark.campaign
def test_mere_noise_is_not_called_another_rate():
    rng = np.random.default_rng(11)
    alarms = sum(sustained(log_normal(rng, 20), log_normal(rng, 20)) is not None for _ in range(TRIALS))
    assert alarms <= 4, alarms


def test_steps_without_any_noise_are_no_cause_for_alarm():
    assert found([100.0] * 20, [50.0] * 20) == {}


def test_what_one_round_among_many_does_is_not_mentioned():
    rng = np.random.default_rng(9)
    times = normal(rng, 100)
    times[0], times[50] = 140, 300
    assert found(times, normal(rng, 100) * 1.4 ** np.eye(100)[0]) == {}

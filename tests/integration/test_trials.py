"""Trials of the gate with real processes."""

import itertools
from contextlib import closing

import pytest

from ddp_bench.bench.gate.noise import FEWEST_ROUNDS
from ddp_bench.bench.gate.power import EVERY_TRIAL, TrialStep
from ddp_bench.bench.gate.trials import TrialProcess, measure_launch, measure_noise

pytestmark = pytest.mark.campaign


def test_equal_processes_train_in_turns() -> None:
    found = measure_noise(0.1, step=TrialStep(batch_size=1, steps=1), num_launches=2, quiet=True)
    assert found.num_rounds >= FEWEST_ROUNDS
    assert found.num_launches == len(found.launch_ratios) == 2
    assert found.round_s * 1000 > found.step_ms > 0, "a round is a block of each side"
    assert found.device, "the processes say what they train on"
    assert all(one.num_rounds > other.num_rounds for other, one in itertools.pairwise(found.resolutions))


def test_a_real_launch_measures_every_slow_down() -> None:
    step = TrialStep(batch_size=2, steps=1)
    with closing(TrialProcess(step)) as baseline, closing(TrialProcess(step)) as candidate:
        launches = measure_launch([baseline, candidate], step, slow_downs=EVERY_TRIAL, num_rounds=2, seed=0)
    assert tuple(one.slow_down for one in launches) == EVERY_TRIAL
    for one in launches:
        assert set(one.baseline_ms) == set(one.candidate_ms) == {1, 2}
        assert min(*one.baseline_ms.values(), *one.candidate_ms.values()) > 0

"""A against A with real processes."""

import itertools

import pytest

from bench.gate.noise import FEWEST_ROUNDS
from bench.gate.power import TrialStep
from bench.gate.trials import measure_noise


@pytest.mark.campaign
def test_equal_processes_train_in_turns() -> None:
    found = measure_noise(0.1, step=TrialStep(batch_size=1, steps=1), num_launches=2, quiet=True)
    assert found.num_rounds >= FEWEST_ROUNDS
    assert found.num_launches == len(found.launch_ratios) == 2
    assert found.round_s * 1000 > found.step_ms > 0, "a round is a block of each side"
    assert all(one.num_rounds > other.num_rounds for other, one in itertools.pairwise(found.resolutions))

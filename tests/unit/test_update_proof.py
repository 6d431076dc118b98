"""When the first steps of a case count as proven, as wrong, or as telling nothing."""

import math

import pytest
import torch
from test_reference import case_of
from torch import nn

from ddp_bench.bench.axes import COMM_HOOKS
from ddp_bench.bench.modes.base import SingleMode, gradients_of
from ddp_bench.bench.settings import PRECISIONS
from ddp_bench.bench.worker.proof import ProofError
from ddp_bench.bench.worker.update_proof import (
    AMPLIFIED,
    HOOK_TOLERANCES,
    MOST_TELLING,
    PROOF_STEPS,
    TOLERANCES,
    FirstSteps,
    UpdateError,
    judged,
)


def test_every_precision_and_hook_has_a_tolerance_below_what_faults_do():
    assert set(TOLERANCES) == set(PRECISIONS)
    assert set(HOOK_TOLERANCES) == set(COMM_HOOKS)
    assert max(*TOLERANCES.values(), *HOOK_TOLERANCES.values()) <= MOST_TELLING
    lost_momentum = 0.9 / (1.9 + 1.0)
    assert lost_momentum > MOST_TELLING, "equal gradients g: 1.9 g + g with momentum, g + g without"


@pytest.mark.parametrize("noise", [0.02 / AMPLIFIED * 1.01, 0.3])
def test_an_error_within_what_rounding_does_is_proven(noise):
    assert judged(0.02, 0.01, noise, "fp32") == UpdateError(error=0.02)


@pytest.mark.parametrize("error", [0.02, 1.0, math.inf, math.nan])
def test_an_error_beyond_rounding_fails(error):
    with pytest.raises(ProofError, match=r"parameters after 2 steps differ .* at most 1e-02 in fp32"):
        judged(error, 0.01, 0.0005, "fp32")


@pytest.mark.parametrize(("error", "noise"), [(0.4, 0.2), (0.3, 5.0), (math.nan, math.nan)])
def test_a_large_error_that_rounding_may_have_made_tells_nothing(error, noise):
    found = judged(error, 0.01, noise, "bf16")
    assert found.error is None
    assert "rounding" in found.why_not


def test_beyond_even_large_rounding_it_fails():
    with pytest.raises(ProofError, match=r"by 0\.9 .*at most 6e-01"):
        judged(0.9, 0.01, 0.2, "bf16")


class Steps:
    """A trainer whose loss scales are given."""

    def __init__(self, scales):
        self.module = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.BatchNorm1d(1))
        self.mode = SingleMode(self.module)
        self._scales = iter(scales)

    @property
    def loss_scale(self):
        return next(self._scales)


def watched(scales, **settings):
    trainer = Steps(scales)
    first = FirstSteps(case_of(**settings), trainer, keeps=True)
    dropout, batch_norm = trainer.module[1:]
    assert not dropout.training
    assert batch_norm.training
    for _ in scales[1:]:
        first.after_step()
    assert dropout.training == (first.state is not None)
    first.end()
    assert dropout.training
    return first


def test_without_loss_scaling_the_first_two_steps_are_proven():
    first = watched([1.0] * (1 + PROOF_STEPS))
    assert first.scales == (1.0, 1.0, 1.0)
    assert first.num_taken == 2


def test_steps_that_overflow_do_not_count():
    first = watched([8.0, 4.0, 4.0, 2.0, 2.0], precision="fp16")
    assert first.scales == (8.0, 4.0, 4.0, 2.0, 2.0)
    assert first.num_taken == 2
    assert watched([8.0, 4.0, 4.0], precision="fp16").state is None


def test_powersgd_is_proven_before_it_compresses():
    first = watched([8.0, 4.0, 4.0], precision="fp16", comm_hook="powersgd")
    assert first.num_taken == 1
    assert first.state is not None


def test_the_state_is_a_copy_of_its_moment():
    trainer = Steps([1.0] * 3)
    first = FirstSteps(case_of(), trainer, keeps=True)
    first.after_step()
    assert first.state is None
    first.after_step()
    before = first.state["0.weight"].clone()
    with torch.no_grad():
        trainer.module[0].weight.add_(1)
    assert torch.equal(first.state["0.weight"], before)


def test_sparse_and_missing_gradients_are_read_as_dense_ones():
    module = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True), "unused": nn.Linear(1, 1, bias=False)})
    module["words"](torch.tensor([1])).sum().backward()
    found = gradients_of(module)
    assert found["words.weight"].tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    assert found["unused.weight"].tolist() == [[0]]

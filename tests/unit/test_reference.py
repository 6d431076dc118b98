"""What a case's parameters have to be, and when its first steps count as proven."""

import contextlib
import math
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import made
import pytest
import torch
from held import held, place_of
from torch import _inductor, nn

from ddp_bench.bench.measure.faults import PeerFailedError, PeerFullError
from ddp_bench.bench.modes import Stages
from ddp_bench.bench.modes.base import Mode
from ddp_bench.bench.plan.case import BatchSplit, split_batch
from ddp_bench.bench.plan.case_settings import COMM_HOOKS
from ddp_bench.bench.plan.settings import PRECISIONS
from ddp_bench.bench.proof.comparison import (
    NO_MEMORY,
    Facts,
    ProofError,
    ReferenceCheck,
    report_full_memory,
)
from ddp_bench.bench.proof.first_steps import FirstSteps, TakeGradients
from ddp_bench.bench.proof.judge import (
    EXACT,
    GRADIENT_TOLERANCES,
    HOOK_TOLERANCES,
    MAX_AMPLIFICATION,
    MAX_CONCLUSIVE_ERROR,
    MAX_IN_16_BITS,
    PROOF_STEPS,
    UPDATE_TOLERANCES,
    RelativeError,
    Tolerance,
    compute_error,
    judge,
)
from ddp_bench.bench.proof.making import Maker
from ddp_bench.bench.proof.reference import Computed, Reference, Subject, Work, make_training
from ddp_bench.bench.proof.weights import compute_norm, get_gradient, subtract_weights
from ddp_bench.bench.results.block_times import ProofResult
from ddp_bench.models.data import Share, open_source
from ddp_bench.models.workload import Workload

CPU = torch.device("cpu")
START = 3.0
LR, MOMENTUM = 0.01, 0.9


def case_of(**settings):
    return made.case_of(**{"batch_per_device": 3, "data": "host", **settings})


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(START))

    def forward(self, x):
        return self.w * x


def rows(size, generator):
    return torch.rand(size, 1, generator=generator), torch.zeros(size, 1)


LINE = Workload(name="line", module=Line, batch=rows, loss=nn.functional.mse_loss)
"""The gradient is 2 w mean(x²)."""


class Trains:
    """A reference on one rank, and what it adds to the weights."""

    def __init__(self, workload=LINE):
        self._reference = Reference(Maker(workload, 5, CPU))

    def update(self, case, scales, **how):
        stages = None
        if case.spec.is_staged:
            stages = Stages(layers=lambda module: [module, nn.Identity()], by_device=(1, 1))
        work = make_training(self._reference.maker, Subject(case=case, stages=stages), scales)
        return self._reference.compute_result(replace(work, **how)).update


reference = Trains


DP = case_of(mode="dp")


def sources(num, batch_size, data="host"):
    """Of each rank."""
    shares = [Share(batch_size=batch_size, rank=rank, world_size=num, seed=5) for rank in range(num)]
    return [open_source(LINE, data, share) for share in shares]


def squares(case, num_steps):
    """Mean of x² over the global batch of each step, from what each rank is given."""
    split = split_batch(case)
    opened = sources(split.num_sources, split.batch_size, case.data)
    return [
        fmean(float((s.get_batch()[0] ** 2).mean()) for _ in range(case.accumulate) for s in opened)
        for _ in range(num_steps)
    ]


def by_hand(means):
    w, velocity = START, 0.0
    for mean in means:
        velocity = MOMENTUM * velocity + 2 * w * mean
        w -= LR * velocity
    return w


@pytest.mark.parametrize(
    "settings",
    [
        *({"mode": "dp", "data": "device"}, {"mode": "dp", "accumulate": 2}, {"mode": "dp"}),
        {"mode": "dp", "num_devices": 3, "accumulate": 2},
        *({"mode": "single", "num_devices": 1}, {"sync_batchnorm": True}),
    ],
    ids=str,
)
def test_two_steps_are_those_of_momentum_on_the_mean_gradient(settings):
    case = case_of(**settings)
    means = squares(case, 2)
    first, again = (reference().update(case, (1.0, 1.0, 1.0), perturbed=again) for again in (False, True))
    assert float(first["w"]) == pytest.approx(by_hand(means) - START, rel=2e-5)
    assert float(again["w"]) == pytest.approx(by_hand(means) - START, rel=2e-4)


def test_a_step_that_loss_scaling_left_out_moves_nothing():
    case = DP
    means = squares(case, 3)
    found = reference().update(case, (65536.0, 32768.0, 32768.0, 32768.0))
    assert START + float(found["w"]) == pytest.approx(by_hand(means[1:]), rel=1e-6)


def test_every_mode_splits_its_batch_as_it_trains():
    assert split_batch(case_of(num_devices=4, accumulate=2)) == BatchSplit(4, 3, accumulate=2)
    assert split_batch(case_of(mode="dp", num_devices=4)) == BatchSplit(1, 12, num_chunks=4, gathered=True)
    assert split_batch(case_of(mode="dp", num_devices=4)).num_forwards == 4
    assert split_batch(case_of(mode="dp", num_devices=4)).num_losses == 1
    assert (
        split_batch(case_of(mode="single", num_devices=1))
        == BatchSplit(1, 3)
        == split_batch(case_of(num_devices=1))
    )
    assert split_batch(case_of(num_devices=4)).num_forwards == 4
    assert split_batch(case_of(num_devices=4, sync_batchnorm=True)).num_forwards == 1


class Centred(Line):
    """Takes the mean of its own batch away, as batch norm does."""

    def forward(self, x):
        return self.w * (x - x.mean())


CENTRED = replace(LINE, module=Centred)


@pytest.mark.parametrize("settings", [{"mode": "dp"}, {"sync_batchnorm": True}], ids=str)
def test_each_chunk_has_statistics_of_its_own_but_for_sync_batchnorm(settings):
    case = case_of(**settings)
    num_ranks = 1 if case.mode == "dp" else 2
    x = [one.get_batch()[0] for one in sources(num_ranks, 6 // num_ranks)]
    chunks = torch.cat(x).chunk(1 if case.sync_batchnorm else 2)
    mean = fmean(float(chunk.var(correction=0)) for chunk in chunks)
    found = reference(CENTRED).update(case, (1.0, 1.0))
    assert START + float(found["w"]) == pytest.approx(by_hand([mean]), rel=1e-6)


class Remembering(Line):
    """Adds the mean of the batch it saw last."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.tensor(0.0))

    def forward(self, x):
        found = self.w * (x + self.last)
        self.last.copy_(x.mean())
        return found


def test_the_first_replicas_buffers_are_kept():
    opened = sources(1, 6)
    first, second = (torch.cat([one.get_batch()[0] for one in opened]).chunk(2) for _ in range(2))
    means = [fmean(float((x**2).mean()) for x in first)]
    means += [fmean(float(((x + first[0].mean()) ** 2).mean()) for x in second)]
    found = reference(replace(LINE, module=Remembering)).update(case_of(mode="dp"), (1.0, 1.0, 1.0))
    assert START + float(found["w"]) == pytest.approx(by_hand(means), rel=1e-6)


def test_trained_again_gradients_are_rounded_as_the_hook_does():
    case = case_of(mode="dp", comm_hook="bf16")
    gradient = 2 * START * squares(case, 1)[0]
    rounded = float(torch.tensor(gradient).bfloat16())
    assert gradient != pytest.approx(rounded, rel=3e-4), "or the test tells nothing"
    one = reference()
    plain = one.update(DP, (1.0, 1.0), perturbed=True)
    found = one.update(case, (1.0, 1.0), perturbed=True)
    assert float(plain["w"]) == pytest.approx(-LR * gradient, rel=1e-4)
    assert float(found["w"]) == pytest.approx(-LR * rounded, rel=1e-4)
    assert one.update(case, (1.0, 1.0)) is one.update(DP, (1.0, 1.0)), "trained once for all hooks"


def test_each_precision_has_a_reference_of_its_own():
    """Also where one was trained before, in another."""
    workload = replace(LINE, module=lambda: nn.Linear(1, 1))
    one, bf16 = reference(workload), case_of(mode="dp", precision="bf16")
    plain = one.update(DP, (1.0, 1.0))["weight"]
    assert not torch.equal(one.update(bf16, (1.0, 1.0))["weight"], plain)


def test_what_one_side_lacks_is_off_by_all_of_it():
    both, one = {"a": torch.tensor(3.0), "b": torch.tensor(4.0)}, {"b": torch.tensor(4.0)}
    assert compute_error(one, both, "gradients").total == pytest.approx(3 / 5)
    assert compute_error(both, one, "gradients").total == pytest.approx(3 / 4)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_the_norm_of_a_difference_is_over_all_parameters(scale):
    one = {"a": scale * torch.tensor([1.0, 0.0]), "b": scale * torch.tensor([[5.0]])}
    other = {"b": scale * torch.tensor([[1.0]]), "a": scale * torch.tensor([1.0, 3.0])}
    assert compute_norm(subtract_weights(one, other)) == pytest.approx(5.0 * scale)


def test_weights_of_half_the_digits_are_subtracted_in_float32():
    one, other = (torch.tensor([value]).bfloat16() for value in (256.0, 1.5))
    assert subtract_weights({"a": one}, {"a": other})["a"].item() == 254.5


def test_every_precision_and_hook_has_a_tolerance_below_what_faults_do():
    assert set(UPDATE_TOLERANCES) == set(PRECISIONS)
    assert set(HOOK_TOLERANCES) == set(GRADIENT_TOLERANCES) == set(COMM_HOOKS)
    assert max(*UPDATE_TOLERANCES.values(), *HOOK_TOLERANCES.values()) <= MAX_CONCLUSIVE_ERROR
    lost_momentum = 0.9 / (1.9 + 1.0)
    assert lost_momentum > MAX_CONCLUSIVE_ERROR, "equal gradients g: 1.9 g + g with momentum, g + g without"


def compared(reference, scales=(1.0, 1.0), of=ReferenceCheck, **settings):
    """The steps of a case with a plain module whose results are given."""
    work = Work(Subject(case=case_of(**settings)), BatchSplit(1, 1), None, None, scales)
    return of(SimpleNamespace(compute_result=reference), work)


def proved(error, noise, tolerance):
    """Proves what is off by `error`; rounding alone makes `noise`, and the plain module repeats itself."""
    errors = {"perturbed": noise, "recompute": RelativeError()}

    class Told(ReferenceCheck):
        on_any = Facts(1.0, draws=False, asks=False)

        def compute_max_error(self, found, _):
            return errors.get(found, error)

    def computed(work, *, recompute=False):
        return "recompute" if recompute else "perturbed" if work.perturbed else "plain"

    return compared(computed, of=Told).prove("by the mode", tolerance)


def off(total, of_one=0.0, one=""):
    return RelativeError(total, of_one, "parameters", f"parameters {one}")


@pytest.mark.parametrize(
    ("error", "noise", "precision", "wrong"),
    [
        *((off(error), off(0.0005), "fp32", "at most 1e-02 in fp32") for error in (0.02, 1.0, math.inf)),
        (off(math.nan), off(0.0005), "fp32", "at most 1e-02 in fp32"),
        (off(0.9), off(0.2), "bf16", "at most 6e-01"),
        (
            off(1e-4, 1.0, "bias"),
            off(1e-5, 0.1),
            "fp32",
            r"parameters of bias differ from those of single by 1 .*; at most 5e-01",
        ),
    ],
)
def test_an_error_beyond_rounding_is_wrong(error, noise, precision, wrong):
    """Of a single parameter beside many that are right, too."""
    with pytest.raises(ProofError, match=wrong) as said:
        proved(error, noise, Tolerance(0.01, of_update=True, where=f" in {precision}"))
    assert "after 2 steps (relative to the update; " in str(said.value)


@pytest.mark.parametrize(
    ("error", "noise", "tells"),
    [
        (off(0.02), off(0.02 / MAX_AMPLIFICATION * 1.01), True),
        (off(0.02), off(0.3), True),
        (off(1e-4, 1.0, "bias"), off(1e-5, 0.4), True),
        *((off(error), off(noise), False) for error, noise in ((0.4, 0.2), (0.3, 5.0), (math.nan, math.nan))),
    ],
)
def test_an_error_that_rounding_may_have_made_is_none_and_a_large_one_tells_nothing(error, noise, tells):
    found = proved(error, noise, Tolerance(0.01, of_update=True))
    assert found.error == (error.total if tells else None)
    assert ("rounding" in found.inconclusive_reason) is not tells


@pytest.mark.parametrize(
    ("tolerance", "noise", "most", "most_of_one"),
    [
        (EXACT, 1.0, EXACT, 10 * EXACT),
        (0.02, 0.0, 0.02, 0.2),
        (0.02, 0.03, 0.09, 0.5),
        (0.02, 0.2, MAX_IN_16_BITS, 0.5),
        (MAX_IN_16_BITS, 5.0, MAX_IN_16_BITS, 0.5),
    ],
)
def test_gradients_are_off_by_rounding_where_16_bits_make_some_and_never_by_more(
    tolerance, noise, most, most_of_one
):
    """Whatever rounding does to a single one, and to arithmetic that is exact."""
    allowed, made = Tolerance(tolerance), off(noise, 9.0)
    for error, is_right in (
        (off(most), True),
        (off(1.01 * most), False),
        (off(0.0, most_of_one), True),
        (off(0.0, 1.01 * most_of_one), False),
        (off(math.nan), False),
    ):
        if is_right:
            assert proved(error, made, allowed) == ProofResult(error=error.total)
        else:
            with pytest.raises(ProofError, match=r"\(relative; at most "):
                proved(error, made, allowed)
    assert judge(off(math.nan), allowed, off(math.nan)) is False, "of gradients rounding makes no NaN"


PLAIN = {"mode": "single", "num_devices": 1}


@pytest.mark.parametrize(
    ("settings", "draws", "recompute", "why"),
    [
        *(({}, draws, 1.0, "") for draws in (False, True)),
        ({}, True, 1.2, "two runs of the plain module under equal seeds differ by 0.2"),
        (PLAIN, False, 1.0, "two runs of the plain module under equal seeds differ by 3"),
        (PLAIN | {"compile": "default"}, False, 1.0, ""),
        ({"sync_batchnorm": True}, True, 1.0, "it draws random numbers, and with SyncBatchNorm"),
        ({"sync_batchnorm": True}, False, 1.0, ""),
    ],
)
def test_a_case_that_is_off_is_wrong_unless_the_plain_module_tells_nothing(settings, draws, recompute, why):
    runs = iter(Computed(update={"w": torch.tensor([length])}, draws=draws) for length in (1.0, recompute))
    with_plain, tolerance = compared(lambda *_, **__: next(runs), **settings), Tolerance(0.01, of_update=True)
    error = with_plain.compute_max_error(Computed(update={"w": torch.tensor([4.0])}), tolerance)
    if why:
        assert with_plain.explain_mismatch(error, tolerance, "wrong").reason.startswith(why)
    else:
        with pytest.raises(ProofError, match="wrong"):
            with_plain.explain_mismatch(error, tolerance, "wrong")


@pytest.mark.parametrize("scales", [(), (1.0, 1.0)], ids=["gradients", "parameters"])
def test_what_is_not_a_number_is_off_whatever_else_is_right(scales):
    right = Computed(update={"w": torch.tensor([1.0]), "b": torch.tensor([1.0])})
    with_plain, tolerance = compared(lambda *_, **__: right, scales), Tolerance(1.0, of_update=bool(scales))
    found = with_plain.compute_max_error(
        Computed(update=right.update | {"w": torch.tensor([math.nan])}), tolerance
    )
    assert math.isnan(found.total)
    assert judge(found, tolerance) is False


def test_a_comparison_that_finds_no_memory_proves_nothing_and_other_errors_are_raised():
    def fails_with(error):
        def compare():
            raise error

        return compare

    for full in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), PeerFullError()):
        assert report_full_memory(fails_with(full)) == ProofResult(not_proved=NO_MEMORY)
    for other in (RuntimeError("broken"), PeerFailedError(), ProofError("wrong")):
        with pytest.raises(type(other)):
            report_full_memory(fails_with(other))


class Steps:
    """A trainer whose loss scales are given."""

    def __init__(self, scales):
        self.module = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.BatchNorm1d(1))
        self.mode = Mode(self.module)
        self._scales = iter(scales)

    @property
    def loss_scale(self):
        return next(self._scales)

    def _train(self, batch):
        """It is told when random numbers begin."""

    def _propagate(self, loss):
        """It is watched for what changes parameters."""


def watched(scales, **settings):
    trainer = Steps(scales)
    first = FirstSteps(case_of(**settings), trainer, seed=0, part=0)
    for _ in scales[1:]:
        first.note_step()
    first.close()
    assert not {"_train", "_propagate"} & vars(trainer).keys(), "the class's own methods show again"
    return first


@pytest.mark.parametrize(
    ("scales", "settings", "num_taken"),
    [
        ([1.0] * (1 + PROOF_STEPS), {}, 2),
        ([8.0, 4.0, 4.0, 2.0, 2.0], {"precision": "fp16"}, 2),  # steps that overflow do not count
        ([8.0, 4.0, 4.0], {"precision": "fp16", "comm_hook": "powersgd"}, 1),  # before it compresses
    ],
)
def test_the_first_steps_that_are_taken_are_proven(scales, settings, num_taken):
    first = watched(scales, **settings)
    assert first.scales == tuple(scales)
    assert first.num_taken == num_taken
    assert first.weights is not None
    assert watched([8.0, 4.0, 4.0], precision="fp16").weights is None, "one was taken, of two"


def test_a_case_that_fails_in_its_first_steps_leaves_the_compiler_as_it_was():
    trainer, seen = Steps([1.0, 1.0]), []

    def fail():
        seen.append(_inductor.config.fallback_random)
        raise RuntimeError("late bug")

    trainer.step, trainer.load_ahead = fail, contextlib.nullcontext
    prover = SimpleNamespace(draws=True, maker=SimpleNamespace(seed=0, start={}))
    with pytest.raises(RuntimeError, match="late bug"):
        held(case_of(compile="default"), trainer, place_of(), prover=prover).warm_up(0.0, proves=True)
    assert seen == [True]
    assert not _inductor.config.fallback_random


def test_sparse_and_missing_gradients_are_read_as_dense_ones():
    module = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True), "unused": nn.Linear(1, 1, bias=False)})
    module["words"](torch.tensor([1])).sum().backward()
    frozen = nn.Parameter(torch.tensor(3.0), requires_grad=False)
    assert get_gradient(module["words"].weight).tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    TakeGradients([*module.parameters(), frozen]).step()
    assert module["words"].weight.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    assert module["unused"].weight.tolist() == [[0]]
    assert frozen == 3.0, "it has no gradient to tell"
    TakeGradients([]).step()  # of a stage without parameters

"""The proof passes on what is right and, more to the point, fails on what is wrong."""

import contextlib
import dataclasses
from inspect import signature

import pytest
import torch
from held import place_of
from made import case_of
from real_ranks import make_prover
from selection import in_campaign
from test_workloads import PROVEN
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.modes import Unsupported
from ddp_bench.bench.modes.base import Mode
from ddp_bench.bench.modes.ddp import ARGUMENTS
from ddp_bench.bench.modes.dp import DataParallelStandIn
from ddp_bench.bench.proof import proof
from ddp_bench.bench.proof.comparison import NO_MEMORY, ProofError
from ddp_bench.bench.proof.reference import Reference
from ddp_bench.models.registry import make_resnet_workload
from ddp_bench.models.workload import Workload

PLACE = place_of()
CASE = case_of(mode="dp", num_devices=2, batch_per_device=2)


def stale(self, *given):
    made = replicate(self, *given)
    torch.nn.init.normal_(next(iter(self._copies[0].values())).detach())
    return made


def of_the_first(_self, leaves):
    return [leaf.grad for leaf in leaves[0].values() if leaf.requires_grad]


replicate, reduce = DataParallelStandIn.replicate, DataParallelStandIn.reduce_gradients


def in_the_eighth_digit(self, leaves):
    return [gradient.mul_(1 + 1e-8) for gradient in reduce(self, leaves)]


def prefixed(self):
    return {f"module.{k}": v for k, v in self.module.state_dict().items()}


@pytest.mark.parametrize(
    ("owner", "method", "fault", "said"),
    [
        (DataParallelStandIn, "reduce_gradients", of_the_first, "gradients differ"),
        (DataParallelStandIn, "reduce_gradients", in_the_eighth_digit, "gradients differ .* 1e-08"),
        (DataParallelStandIn, "replicate", stale, "gradients differ"),
        (Mode, "gather_state_dict", prefixed, "its state dict is not the plain module's: "),
    ],
    ids=["a lost replica", "half of the digits", "stale weights", "a prefix in the state dict"],
)
def test_a_fault_of_dp_is_caught(monkeypatch, owner, method, fault, said):
    monkeypatch.setattr(owner, method, fault)
    with pytest.raises(ProofError, match=said):
        make_prover(make_resnet_workload("resnet20", 16), PLACE, 0).prove(CASE, None)


DDP_PROOF = """
from ddp_bench.bench.measure.faults import PeerFailedError
from ddp_bench.bench.measure.groups import set_default_group
workload = make_resnet_workload("resnet20", 16)
prover = make_prover(workload, cluster.place, 0)
group = cluster.group(2, "gloo")
base = dict(image_size=16, batch_per_device=2, backend="gloo")
def error(**settings):
    with set_default_group(group):  # it is not what ranks speak through in the proof
        return prover.prove(case_of(**base | settings), group).error
def outcome(**settings):
    try:
        return error(**settings)
    except (ProofError, Unsupported, UnusedParametersError, PeerFailedError) as reason:
        return f"{type(reason).__name__}: {reason}"
"""


@pytest.fixture
def ddp(ranks):
    return lambda script: ranks(DDP_PROOF + script)


def test_ddp_is_proven_under_every_setting(ddp):
    settings = [
        {},
        {"bucket_cap_mb": "0.1"},
        *({name: True} for name in ARGUMENTS if name in signature(DistributedDataParallel).parameters),
        {"sync_buffers": False},
        {"accumulate": 3},
        {"compile": "default", "optimize_ddp": "no_optimization"},
        {"comm_hook": "fp16"},
        {"comm_hook": "bf16"},
        {"comm_hook": "powersgd", "bucket_cap_mb": "100"},
    ]
    hangs = {"comm_hook": "powersgd", "bucket_cap_mb": "0.1"}
    *found, said = ddp(f"report([outcome(**s) for s in {[*settings, hangs]!r}])\n")[0]
    assert said.startswith("Unsupported: over gloo PowerSGD hangs with several buckets")
    for setting, error in zip(settings, found, strict=True):
        rounds = setting.get("comm_hook") in ("fp16", "bf16")
        assert 1e-6 < error < 2e-2 if rounds else error < 1e-12, setting


def test_a_parameter_without_gradient_is_named_with_what_helps(ddp):
    found = ddp("""
class WithSpare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3 * 16 * 16, 8), torch.nn.Linear(8, 10)
        self.spare = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    def forward(self, x):
        return self.last(self.first(x.flatten(1)))
prover = make_prover(replace(workload, module=WithSpare), cluster.place, 0)
report([outcome(), outcome(gradient_as_bucket_view=True), outcome(find_unused_parameters=True),
        outcome(static_graph=True), outcome(find_unused_parameters=True, skip_all_reduce_unused_params=True)])
""")
    for refused in found[0][:2]:
        assert refused.startswith("UnusedParametersError: give --find-unused-parameters on, ")
        assert "does not use spare.0.weight, spare.0.bias, spare.1.weight and 5 more," in refused
    assert max(found[0][2:]) < 1e-12, "no gradient is that of the plain module"


def test_a_parameter_that_one_rank_alone_leaves_unused_is_named_and_nothing_hangs(ddp):
    """As where a mask that is drawn is empty: in DDP the other rank would wait for its gradient for ever."""
    found = ddp("""
class Sometimes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3 * 16 * 16, 8), torch.nn.Linear(8, 10)
        self.mask = torch.nn.Parameter(torch.zeros(8))
    def forward(self, x):
        hidden = self.first(x.flatten(1))
        return self.last(hidden + self.mask if torch.rand(()) < share else hidden)
def tried(share_of_used, **settings):
    global prover, share
    share, prover = share_of_used, make_prover(replace(workload, module=Sometimes), cluster.place, 0)
    return outcome(**settings)
report([[tried(share), tried(share, find_unused_parameters=True)] for share in (0.0, 0.6, 1.0)])
""")
    (never, sometimes, always), others = found
    assert max(searched for on_rank in found for _, searched in on_rank) < 1e-12
    assert "does not use mask, whose gradients DDP waits for" in never[0]
    assert {sometimes[0].partition(":")[0], others[1][0].partition(":")[0]} == {
        "UnusedParametersError",
        "PeerFailedError",
    }
    assert always[0] < 1e-12


def test_models_that_ranks_draw_otherwise_begin_with_the_first_ones_weights(ddp):
    """As DDP's constructor has it; where another rank kept its own, the proof would fail."""
    found = ddp("""
def holds(**more):
    global prover
    prover = make_prover(workload, cluster.place, cluster.rank)
    prover.maker.seed = 0  # of the batch, which is the same
    vars(prover).update(more)
    try:
        return error() < 1e-12
    except ProofError:
        return False
report([holds(), holds(_is_given=True)])
""")
    assert found[0] == [True, False]


class ForFloat32(torch.nn.Linear):
    """Raises for float64 what it was told to."""

    def __init__(self, error):
        super().__init__(3 * 8 * 8, 10)
        self.error = error

    def forward(self, x):
        if x.dtype == torch.float64 and self.error is not None:
            raise self.error
        return super().forward(x.flatten(1).to(torch.float32 if self.error is None else x.dtype))


def prover_for(error):
    workload = dataclasses.replace(make_resnet_workload("resnet20", 8), module=lambda: ForFloat32(error))
    return make_prover(workload, PLACE, 0)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and Double"),
        (NotImplementedError("\"linear\" not implemented for 'Double'"), 'NotImplementedError: "linear" not'),
        (TypeError("expected float32"), "TypeError: expected float32"),
        (AssertionError(), "AssertionError"),
    ],
    ids=str,
)
def test_what_does_not_run_in_float64_is_proven_in_float32(error, why):
    made = prover_for(error)
    assert made.prove(CASE, None).error < 1e-3
    assert made.inputs.arithmetic.dtype == torch.float32
    assert made.inputs.arithmetic.why_float32.startswith(why)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ],
    ids=str,
)
def test_full_memory_and_a_broken_device_are_no_reason_for_float32(error):
    made = prover_for(error)
    with pytest.raises(type(error)):
        made.prove(CASE, None)
    with pytest.raises(type(error)):
        _ = made.inputs.arithmetic


class Largest(torch.autograd.Function):
    """The largest value of each row, and where it is, through which no gradient passes."""

    @staticmethod
    def forward(ctx, x):
        values, indices = x.max(1)
        ctx.save_for_backward(x, indices)
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx, grad, _):
        x, indices = ctx.saved_tensors
        return torch.zeros_like(x).scatter(1, indices[:, None], grad[:, None])


@pytest.mark.parametrize(
    ("compute", "tolerance"),
    [
        (lambda y: Largest.apply(y)[0], 0.0),
        (lambda y: torch.fft.rfft(y).abs(), 0.0),
        (lambda y: y.float().double(), 1e-3),
    ],
    ids=["indices beside", "complex", "rounds inside"],
)
def test_an_error_is_allowed_only_where_gradients_pass_through_a_coarser_type(compute, tolerance):
    class Model(torch.nn.Linear):
        def forward(self, x):
            return compute(super().forward(x.flatten(1)))

    workload = dataclasses.replace(
        make_resnet_workload("resnet20", 8),
        module=lambda: Model(3 * 8 * 8, 10),
        batch_loss=lambda model, batch: model(batch[0]).sum(),
        loss=None,
    )
    assert make_prover(workload, PLACE, 0).inputs.arithmetic.tolerance == tolerance


def test_a_model_that_runs_in_neither_says_why():
    class Broken(torch.nn.Linear):
        def forward(self, x):
            raise ValueError(f"no such luck with {x.dtype}")

    workload = dataclasses.replace(make_resnet_workload("resnet20", 8), module=lambda: Broken(1, 1))
    with pytest.raises(ValueError, match=r"no such luck with torch\.float32"):
        make_prover(workload, PLACE, 0).prove(CASE, None)


def test_the_proof_is_without_tf32_whatever_the_run_uses(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def noted(precision, device):
        assert device == PLACE.device
        seen.append(precision)
        yield
        seen.append("as before")

    computed = Reference.compute_result
    monkeypatch.setattr(proof, "set_float32_precision", noted)
    monkeypatch.setattr(
        Reference, "compute_result", lambda *given, **how: seen.append("plain") or computed(*given, **how)
    )
    prover_for(None).prove(CASE, None)
    assert [seen[0], seen[-1]] == ["fp32", "as before"]
    assert set(seen[1:-1]) == {"plain"}


class Own(torch.nn.Linear):
    """Takes its input by name."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return super().forward(x)


def by_name(size, generator):
    return {"x": torch.randn(size, 4, generator=generator)}, torch.zeros(size, 3)


def prover_of(**changes):
    given = {"name": "own", "module": Own, "batch": by_name, "loss": functional.mse_loss}
    workload = Workload(**given | changes)
    return make_prover(workload, PLACE, 0)


def test_a_loss_of_the_modules_own_is_one_for_each_device_of_dp():
    class WithLoss(Own):
        def forward(self, x):
            return super().forward(x).square().mean()

    changes = {"module": WithLoss, "loss": functional.cross_entropy}
    mean = prover_of(**changes, batch_loss=lambda model, batch: model(**batch[0]).mean())
    assert mean.prove(CASE, None).error < 1e-12
    with pytest.raises(UsageError, match=r"in dp a loss that the module computes .* take its mean\(\)"):
        prover_of(**changes, batch_loss=lambda model, batch: model(**batch[0])).prove(CASE, None)


def test_what_cannot_be_split_into_stages_is_skipped_with_the_reason():
    staged = dataclasses.replace(CASE, mode="partition", backend="gloo")
    with pytest.raises(Unsupported, match="inputs and targets are more than that"):
        prover_of().splitter.split(staged)


PREPARED = f"""
{PROVEN}
from ddp_bench.bench.results.block_times import ProofResult
def proven(workload=None, mode="ddp", **settings):
    workload = workload or make_resnet_workload("resnet20", 16)
    made = replace(workload, channels_last=settings.get("channels_last", False))
    usual = dict(image_size=16, batch_per_device=4, bucket_cap_mb="100")
    found = outcome(made, mode, **usual | settings)
    return found[1] if isinstance(found, list) else found
"""


FIRST_STEPS = [{}, {"accumulate": 3}, {"mode": "dp"}, {"precision": "bf16"}, {"comm_hook": "fp16"}]
MORE_FIRST_STEPS = [
    {"data": "device"},
    {"comm_hook": "powersgd"},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"sync_buffers": False},
    {"fused_optimizer": True},
    {"channels_last": True},
    {"mode": "dp", "precision": "bf16"},
    {"comm_hook": "bf16"},
]


@pytest.mark.parametrize("settings", [FIRST_STEPS, *in_campaign(MORE_FIRST_STEPS)], ids=["usual", "every"])
def test_the_first_steps_of_a_setting_are_those_of_plain_training(ranks, settings):
    on_first, on_second = ranks(f"{PREPARED}report([proven(**s) for s in {settings!r}])")
    *exact, rounded = on_first
    assert max(exact) < 1e-3
    assert 1e-5 < rounded < 0.1, "a hook is seen to round"
    assert [one is None for one in on_second] == [s.get("mode") == "dp" for s in settings]


def test_the_first_proof_runs_the_code_of_the_timed_step(ranks):
    """A mode that had a way of its own for the proof alone would be proved in what nobody times."""
    script = """
import sys
ways = {}
def note(kind):
    frame, names = sys._getframe(), []
    while frame := frame.f_back:
        if any(f"/bench/{room}/" in frame.f_code.co_filename for room in ("measure", "modes", "proof")):
            names.append((frame.f_globals["__package__"], frame.f_code.co_qualname))
    for outermost in ("Prover.prove", "Trainer.step"):
        if outermost in [name for _, name in names]:  # the proof's step is that of a trainer, too
            found = {name for package, name in names if not package.endswith("proof") and name[0].isupper()}
            ways.setdefault(f"{outermost} {kind}", set()).update(found)
            break
def noted_loss(output, labels):
    note("loss")
    loss = functional.cross_entropy(output, labels)
    loss.register_hook(lambda gradient: note("backward"))
    return loss
def called(mode):
    ways.clear()
    outcome(of(Mlp, loss=noted_loss), mode, data="device")
    return {kind: sorted(names) for kind, names in ways.items()}
report({mode: called(mode) for mode in ("single", "dp", "ddp")})
"""
    for mode, ways in ranks(PROVEN + script)[0].items():
        for kind in ("loss", "backward"):
            assert ways[f"Prover.prove {kind}"] == ways[f"Trainer.step {kind}"] != [], mode


def test_arithmetic_that_is_coarser_than_asked_is_caught(ranks):
    """On a model that amplifies it; the first proof, whose steps are others, sees none of it."""
    script = """
evaluate = Trainer._evaluate
def halved(self, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return evaluate(self, batch)
patch.setattr(Trainer, "_evaluate", halved)
report(proven())
"""
    for said in ranks(PREPARED + script):
        assert "differ from those of single by" in str(said)
        assert "after 2 steps" in said


def test_what_rounding_alone_would_change_as_much_is_measured_and_chance_is_none(ranks):
    """The true gradient of a bias before batch norm is 0, and Adam makes a full step of its rounding."""
    script = """
class Biased(torch.nn.Sequential):
    def __init__(self):
        layers = torch.nn.Linear(3 * 16 * 16, 4096), torch.nn.BatchNorm1d(4096), torch.nn.Linear(4096, 10)
        super().__init__(torch.nn.Flatten(), *layers)
        self[1].weight.requires_grad_(False)
def adam(parameters):
    return torch.optim.Adam([p for p in parameters if p.requires_grad], eps=1e-16)
class Noisy(Biased):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.5))
made = replace(make_resnet_workload("resnet20", 16), module=Biased, optimizer=adam)
noisy = replace(make_resnet_workload("resnet20", 16), module=Noisy)
patch.setattr(Prover, "prove", lambda *_: ProofResult(error=0.0))  # frozen batch norm makes the bias count
report([proven(made, comm_hook="fp16"), proven(noisy)])
"""
    found = ranks(PREPARED + script)
    rounded, noisy = found[0]
    assert "rounding alone changes the update of the reference by" in rounded
    assert noisy < 1e-3, "both sides draw the same numbers"


def test_nothing_is_proved_on_any_rank_where_one_has_no_memory_for_the_plain_module(ranks):
    script = """
from ddp_bench.bench.proof import reference
prove, get_gradient, found = Prover.prove, reference.get_gradient, []
def full(parameter):
    if cluster.rank:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return get_gradient(parameter)
patch.setattr(reference, "get_gradient", full)
def noted(*given):
    found.append(prove(*given).not_proved.reason)
    return ProofResult(error=0.0)
patch.setattr(Prover, "prove", noted)
report([proven(), *found])
"""
    assert ranks(PREPARED + script) == [2 * [NO_MEMORY.reason]] * 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ('torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")', 2 * [NO_MEMORY.reason]),
        (
            'ValueError("no such row")',
            ["ValueError: no such row", "PeerFailedError: another rank of the case failed"],
        ),
    ],
    ids=["no memory", "an exception"],
)
def test_where_the_first_rank_alone_computes_the_reference_and_fails_no_other_waits(ddp, error, said):
    """With SyncBatchNorm the whole batch of all ranks is on the first one; on the others it has no part."""
    script = f"""
class Line(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
def whole_fails(model, batch):
    inputs, targets = batch
    if broken and len(inputs) > 2:
        raise {error}
    return functional.cross_entropy(model(inputs), targets)
workload = replace(workload, module=Line, loss=None, batch_loss=whole_fails)
prover = make_prover(workload, cluster.place, 0)
def tried():
    try:
        with set_default_group(group):
            shown = prover.prove(case_of(**base, sync_batchnorm=True), group)
        return shown.not_proved.reason if shown.not_proved else shown.error
    except (ValueError, PeerFailedError) as reason:
        return f"{{type(reason).__name__}}: {{reason}}"
broken = True
found = [tried()]
broken = False
report([*found, tried()])
"""
    found = ddp(script)
    assert [first for first, _ in found] == said
    assert max(error for _, error in found) < 1e-12, "and the next proof is in step"

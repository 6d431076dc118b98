"""What trains in plain PyTorch is proved, and what does not train as it should is not."""

import pytest
from people import PROVED
from rank_pool import Ranks
from selection import in_campaign

PROVEN = """
import people
from people import *
from ddp_bench.bench.measure.clock import Clock
from ddp_bench.bench.modes.ddp import DistributedMode
from ddp_bench.bench.plan.resolve import fill_device_defaults
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.worker import held_case
from ddp_bench.bench.measure.groups import set_default_group
control, size = torch.distributed.group.WORLD, cluster.world_size
alone, everyone = cluster.group(1, "gloo"), cluster.group(size, "gloo")
run = fill_device_defaults(Settings(), device_type="cpu", num_local_devices=size)
def prover_of(workload):
    return make_prover(workload, cluster.place, control=control, alone=alone)
def live_of(prover, case, group):
    shared = held_case.Shared(place=cluster.place, settings=run, clock=Clock(), prover=prover)
    return held_case.build(case, group, shared, None)
def outcome(workload, mode="ddp", **settings):
    how = {"num_devices": 1 if mode == "single" else size, "batch_per_device": 8, "data": "host"}
    case = case_of(**how | {"mode": mode, "backend": "gloo"} | settings)
    if cluster.rank >= case.num_ranks:
        return None
    group, live = everyone if mode == "ddp" else None, None
    try:
        with set_default_group(group or alone):
            prover = prover_of(workload)
            shown = prover.prove(case, group)
            live = live_of(prover, case, group)
            update = live.warm_up(0.0, proves=True).update
    except (ProofError, Unsupported) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if live is not None:
            live.trainer.close()
    doubt = shown.not_proved or update.not_proved
    return doubt.reason if doubt else update.inconclusive_reason or [shown.error, update.error]
"""
MODES = ("single", "dp", "ddp")

FEW = ("noise in the loss", "draws around what draws", "a hook of a gradient", "rows that do not count")
FEW += ("negatives of all ranks", "batch norm in float32")
MOST = [name for name in PROVED if name not in FEW]

IN_DP = {
    "a penalty on slopes": "Unsupported: DP as emulated on CPU cores does not take this model",
    "a loss in training alone": None,
    "negatives of all ranks": None,
}
"""What the stand-in cannot do."""


@pytest.mark.parametrize("names", [FEW, *in_campaign(MOST)], ids=["few", "most"])
def test_what_people_bring_is_proved_in_every_mode(ranks, names):
    script = f"report({{n: [outcome(PROVED[n], mode) for mode in {MODES}] for n in {list(names)}}})"
    on_first, on_second = ranks(PROVEN + script)
    for name, found in on_first.items():
        for mode, said in zip(MODES, [*found], strict=True):
            wanted = IN_DP.get(name) if mode == "dp" else None
            if wanted is not None:
                assert said.startswith(wanted), name
                continue
            assert isinstance(said, list), (name, mode, said)
            assert said[0] < 1e-3, (name, mode)
            assert said[1] < 1e-3, (name, mode)
    assert all(isinstance(found[-1], list) for found in on_second.values()), "each rank compares its own"


WITHOUT_ROWS_IN_DDP = """
from torch.nn.parallel import DistributedDataParallel
from ddp_bench.models.data import make_seed
from ddp_bench.models.workload import make_loss_function
def by_plain_ddp(workload, num_steps):
    prover = prover_of(workload)
    ddp = DistributedDataParallel(prover.maker.make_module(), process_group=everyone)
    optimizer, loss = workload.optimizer(ddp.parameters()), make_loss_function(workload)
    generator = torch.Generator().manual_seed(make_seed(0, cluster.rank))
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss(ddp, workload.batch(8, generator)).backward()
        optimizer.step()
    return [one.detach() for one in ddp.module.parameters()]
def by_the_mode(workload, num_steps):
    case = case_of(mode="ddp", backend="gloo", num_devices=size, batch_per_device=8, data="host")
    with set_default_group(everyone):
        live = live_of(prover_of(workload), case, everyone)
        for _ in range(num_steps):
            live.trainer.step()
        live.trainer.close()
    return [one.detach() for one in live.trainer.mode.module.parameters()]
def trains_as_plain_ddp(workload):
    pairs = zip(by_the_mode(workload, 3), by_plain_ddp(workload, 3), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)
"""


def test_batches_that_cannot_be_split_are_proved_where_ranks_ask_for_parts_of_their_own(ranks):
    script = f"""{WITHOUT_ROWS_IN_DDP}
report({{name: [trains_as_plain_ddp(one), *(outcome(one, mode) for mode in {MODES})]
    for name, one in people.WITHOUT_ROWS.items()}})
"""
    on_first, on_second = ranks(PROVEN + script)
    assert on_first
    for name, (is_plain, single, dp, ddp) in on_first.items():
        assert is_plain, name
        assert max(single) < 1e-3, name
        assert dp.startswith("Unsupported: nn.DataParallel scatters a batch along dimension 0"), name
        assert max(ddp) < 1e-3, name
        assert isinstance(on_second[name][-1], list), name


def test_faults_with_batches_that_cannot_be_split_are_caught(ranks):
    script = """
def found(**settings):
    return outcome(people.WITHOUT_ROWS["graphs"], **settings)
right = found(accumulate=2)
with patch.context() as faulty:
    faulty.setattr(held_case, "open_case_source", of_first)
    twice = found()
with patch.context() as faulty:
    for owner, method, fault in with_gradients(scaled(size)):
        faulty.setattr(owner, method, fault)
    summed = found()
report([right, twice, summed, found(sync_batchnorm=True)])
"""
    (right, update), twice, summed, joined = ranks(PROVEN + MUTANTS + script)[0]
    assert right < 1e-9
    assert update < 1e-3
    assert twice.startswith("ProofError: parameters")
    assert summed.startswith("ProofError: gradients")
    assert joined.startswith(
        "Unsupported: with SyncBatchNorm one device would have to see the batches of all"
    )


PAST_THE_WRAPPER = """
from ddp_bench.bench.worker.rank import make_report
from ddp_bench.models.checks import check_learned
def inner(model):
    return getattr(model, "module", model)
def of_inner(model, batch):
    return functional.cross_entropy(inner(model)(batch["x"]), batch["y"])
def of_part(model, batch):
    hidden = inner(model).first(batch["x"])
    return functional.cross_entropy(inner(model).last(hidden.tanh()), batch["y"])
def of_method(model, batch):
    return classified(model, batch) + model.hidden(batch["x"]).mean()
class StepsInBackward(torch.optim.SGD):
    def __init__(self, parameters):
        parameters = [*parameters]
        super().__init__(parameters, lr=0.0)
        for one in parameters:
            self.hook(one, torch.optim.SGD([one], lr=0.1))
    def hook(self, one, own):
        one.register_post_accumulate_grad_hook(lambda _: own.step())
class StepsByHand(StepsInBackward):
    def hook(self, one, _):
        def stepped(gradient):
            with torch.no_grad():
                one.sub_(0.1 * gradient)
        one.register_hook(stepped)
class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(WIDTH, 3, batch_first=True)
    def forward(self, x, lengths):
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0]
def padded(n, generator):
    x = torch.randn(n, n, WIDTH, generator=generator)
    return (x, torch.arange(n) + 1), torch.zeros(n)
learned = nn.Parameter(torch.ones(3))
def reason(*given, **more):
    try:
        return outcome(*given, **more)
    except Exception as error:
        return make_report(error).fault.reason
report({
    "inner": reason(of(Mlp, named, batch_loss=of_inner)),
    "part": reason(of(Mlp, named, batch_loss=of_part)),
    "method": reason(of(Mlp, named, batch_loss=of_method)),
    "method in dp": reason(of(Mlp, named, batch_loss=of_method), "dp"),
    "hook": reason(of(Mlp, optimizer=StepsInBackward)),
    "by hand": reason(of(Mlp, optimizer=StepsByHand)),
    "padded": [reason(of(Padded, padded, loss=lambda x, _: x.square().mean()), m) for m in ("ddp", "dp")],
    "learned": reason(of(Mlp, loss=lambda x, y: functional.cross_entropy(x * learned, y)), "single"),
})
"""


def test_what_users_do_that_ddp_does_not_see_is_named_beside_what_differs(ranks):
    said, _ = ranks(PROVEN + PAST_THE_WRAPPER)
    wrong = "ProofError: gradients differ from those of single by "
    assert said["inner"].startswith(wrong)
    assert "most in first." in said["inner"] or "most in last." in said["inner"]
    assert said["inner"].endswith("; the loss calls model.module, which DDP does not see: call model(…)")
    assert said["part"].startswith(wrong)
    assert said["part"].endswith(
        "the loss calls first of model.module, which DDP does not see: call model(…)"
    )
    for name in ("method", "method in dp"):
        assert said[name].endswith(
            "has no attribute 'hidden'; only forward() goes through the wrapper of the"
            " model: call hidden inside of forward()"
        ), name
    for name in ("hook", "by hand"):
        assert said[name].startswith("ProofError: parameters"), name
        assert said[name].endswith("in the backward runs before DDP averages: step after the backward"), name
    (proof, _), of_dp = said["padded"]
    assert proof < 1e-9
    assert of_dp.endswith("cannot gather; where pad_packed_sequence makes them, give it total_length=")
    assert "has parameters (one of shape (3,)) that module() does not hold" in said["learned"]


@pytest.mark.parametrize(
    ("workload", "settings"),
    [
        ("codebook", {"accumulate": 3}),
        ("codebook", {"accumulate": 2, "sync_buffers": False}),
        ("drawing", {"accumulate": 2}),
    ],
)
def test_micro_batches_have_the_buffers_and_the_draws_that_they_train_with(ranks, workload, settings):
    made = {"codebook": "Codebook", "drawing": "SkipsAndDrops"}[workload]
    found = ranks(PROVEN + f"report(outcome(of({made}), **{settings!r}))")
    assert found[0][0] < 1e-9
    assert found[0][1] < 1e-3


STEPS = [
    *({"precision": "fp16"}, {"comm_hook": "fp16"}, {"zero_optimizer": True}, {"fused_optimizer": True}),
    *({"accumulate": 2}, {"mode": "dp"}, {"mode": "dp", "accumulate": 2}),
]


def test_each_way_to_take_a_step_is_proved(ranks):
    """On a model whose buffers tell of the rows and steps that it has seen: they are sent, and not stale.

    So are weights: the first step is so long that the gradients of the second are others.
    """
    script = f"""
class Counts(Codebook):
    def build(self):
        super().build()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls
def strides(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
report([outcome(of(Counts, optimizer=strides), **settings) for settings in {STEPS!r}])
"""
    for settings, found in zip(STEPS, ranks(PROVEN + script)[0], strict=True):
        assert isinstance(found, list), (settings, found)
        assert found[1] < (1e-1 if "fp16" in settings.values() else 1e-3), settings
        assert found[1] > 1e-5 or "comm_hook" not in settings, "a hook is seen to round"


def test_weights_of_bf16_are_proved_by_their_digits_and_what_differs_each_time_not_at_all(ranks):
    script = f"report([outcome(of(InBf16)), *(outcome(of(Entropy), mode) for mode in {MODES})])"
    (proof, update), *differs = ranks(PROVEN + script)[0]
    assert 1e-12 < proof < 0.1
    assert update < 0.1
    assert all("two runs of the plain module under equal seeds differ" in said for said in differs)


def test_hooks_are_called_as_often_as_in_plain_pytorch(ranks):
    """Twice by the reference and once in each step of the warm-up: gradients are proved without it."""
    script = """
from ddp_bench.bench.measure.timed import Trainer
steps, forwards = [], []
step = Trainer.step
def counted(self):
    steps.append(isinstance(self.optimizer, torch.optim.AdamW))
    step(self)
patch.setattr(Trainer, "step", counted)
found = []
for fused in (False, True):
    Averages.calls = 0
    steps.clear()
    assert outcome(of(Mlp, optimizer=Averages), fused_optimizer=fused)[1] < 1e-3
    found.append([Averages.calls - sum(steps)])
report([*found, outcome(of(Mlp, optimizer=Averages), zero_optimizer=True)])
"""
    of_plain, of_fused, zero = ranks(PROVEN + script)[0]
    assert of_plain == of_fused == [2], "the reference takes two steps"
    assert zero == "Unsupported: the optimizer has step hooks, which ZeroRedundancyOptimizer drops"


MUTANTS = """
last = cluster.rank == size - 1
class Follows(Codebook):
    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(lambda gradient: gradient / 8)
    def forward(self, x):
        return functional.dropout(super().forward(x.to(self.first.weight.dtype)), 0.5, self.training)
class Follows32(Follows):
    def hidden(self, x):
        return super().hidden(x).float().to(x.dtype)
class Follows16(Follows):
    def hidden(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().hidden(x).to(x.dtype)
from torch.nn.parallel import DistributedDataParallel
train, built, update = Trainer._train, DistributedMode.__init__, Trainer._update
mean_loss, propagate = Trainer._compute_mean_loss, Trainer._propagate
def with_gradients(change):
    def propagated(self, loss):
        propagate(self, loss)
        change({name: p for name, p in self.mode.module.named_parameters() if p.grad is not None})
    return [(Trainer, "_propagate", propagated)]
def scaled(by):
    return lambda named: [p.grad.mul_(by) for p in named.values()]
def ignoring(*names):
    def build(self, case, module, *more, **rest):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        built(self, case, module, *more, **rest)
    return [(DistributedMode, "__init__", build)]
def unhooked(self, case, module, *more, **rest):
    for one in module.parameters():
        one._backward_hooks = None
    built(self, case, module, *more, **rest)
def draws_once_more(self, batch):
    torch.rand(int(last))
    train(self, batch)
def in_evaluation(self, batch):
    self.mode.module.train(not last)
    train(self, batch)
def left_out(self, *given):
    return mean_loss(self, *given) * (not last)
def other_weights(self, case, module, *more, **rest):
    with torch.no_grad():
        module.first.weight.mul_(2 if last else 1)
    built(self, case, module, *more, **rest)
opened = held_case.open_case_source
def of_first(case, shared):
    return opened(case, replace(shared, place=replace(shared.place, rank=0)))
def unsent(self, *more, **rest):
    built(self, *more, **rest)
    vars(self.ddp)["_sync_buffers"] = lambda: None
def silent(self, *more, **rest):
    built(self, *more, **rest)
    self.ddp.require_backward_grad_sync = False
def skipped(self):
    if not last:
        update(self)
def forgetful(self):
    update(self)
    self.optimizer.state.clear()
def unset(self):
    update(self)
    for state in self.optimizer.state.values():
        state["momentum_buffer"].normal_(std=state["momentum_buffer"].std())
fetch = Trainer._fetch
def of_others(self):
    return tuple(part.roll(1, 0) if part.ndim == 1 else part for part in fetch(self))
mutants = {
    "a rank left out": [(Trainer, "_compute_mean_loss", left_out)],
    "a sum for a mean": with_gradients(scaled(size)),
    "a mean of one rank too many": with_gradients(scaled(size / (size + 1))),
    "a small parameter not synchronised": ignoring("last.bias"),
    "not synchronised": [(DistributedMode, "__init__", silent)],
    "buffers not sent": [(DistributedMode, "__init__", unsent)],
    "a hook dropped": [(DistributedMode, "__init__", unhooked)],
    "other draws on one rank": [(Trainer, "_train", draws_once_more)],
    "evaluation on one rank": [(Trainer, "_train", in_evaluation)],
    "other weights on one rank": [(DistributedMode, "__init__", other_weights)],
    "a batch twice": [(held_case, "open_case_source", of_first)],
    "a step skipped on one rank": [(Trainer, "_update", skipped)],
    "momentum lost": [(Trainer, "_update", forgetful)],
    "momentum unset": [(Trainer, "_update", unset)],
    "labels of others": [(Trainer, "_fetch", of_others)],
}
"""

CAUGHT = """
def caught(module, precision):
    right = outcome(of(module), precision=precision)
    assert isinstance(right, list), right
    found = {}
    for name, faults in mutants.items():
        with patch.context() as faulty:
            for owner, method, fault in faults:
                faulty.setattr(owner, method, fault)
            found[name] = outcome(of(module), precision=precision)
    return found
"""
MODELS = [("Follows", "fp32"), ("Follows32", "fp32"), ("Follows16", "bf16")]
"""Proved in float64, in float32 and in bf16."""

LOST = """
lost = (LosesReal, LosesImaginary)
report({one.__name__: outcome(of(one, two_views, loss=functional.mse_loss)) for one in lost})
"""


@pytest.mark.parametrize("num_ranks", [2, *in_campaign(4, 8)])
def test_every_fault_of_training_is_caught(ranks, tmp_path, num_ranks):
    made = Ranks(num_ranks, tmp_path)
    play = ranks if num_ranks == 2 else made.play
    scripts = [f"{MUTANTS}{CAUGHT}report(caught({module}, {precision!r}))" for module, precision in MODELS]
    try:
        found = [on_rank for script in (*scripts, LOST) for on_rank in play(PROVEN + script)]
    finally:
        made.end()
    assert [len(one) for one in found] == [15] * 3 * num_ranks + [2] * num_ranks
    said = [pair for one in found for pair in one.items()]
    assert [pair for pair in said if not str(pair[1]).startswith("ProofError")] == []

"""Training loops as people write them, played one after another in one rank.

Each kind ends with, bit for bit, loss, parameters, buffers and random numbers, and with as many collectives
as its groups saw; where it is watched also with its rows. KIND@WHERE:N lets the watch's own WHERE raise on
rank 1, the N-th time that it is called, and KIND@WHERE=N lets it return N there.
"""

import contextlib
import copy
import hashlib
import io
import sys
import time
import types
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 16
PACKAGE = "_ddp_bench_watch"


def net(width=24):
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def wrapped(module=None, **more):
    """Buckets of a kilobyte: several of them."""
    return DistributedDataParallel(module or net(), **{"bucket_cap_mb": 0.001, **more})


def sgd(model):
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(number=STEPS, salt=0):
    for step in range(number):
        torch.manual_seed(1000 * salt + 2 * step + 7 * dist.get_rank())
        yield torch.randn(6, 8), torch.randint(4, (6,))


def loss_of(model, x, y):
    return functional.cross_entropy(model(x), y)


def train(model, optimizer=None, number=STEPS, *, to_none=True, data=None, lose=loss_of, step=None):
    """Train as most do; the loss is that of `lose`, and `step` comes in place of the optimizer's."""
    optimizer = optimizer or sgd(model)
    for batch in batches(number) if data is None else data:
        optimizer.zero_grad(set_to_none=to_none)
        loss = lose(model, *batch)
        loss.backward()
        (step or optimizer.step)()
    return loss


def deprecated_option():
    """A warning of the constructor names the user's line."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = wrapped(check_reduction=True)
    assert [one.filename for one in told if one.category is FutureWarning] == [__file__]
    return model, train(model)


def wrapped_by_a_package():
    """As a Trainer does: DDP is called from a module of that name."""
    package = types.ModuleType("transformers")
    exec("def wrap(wrapper, model):\n    return wrapper(model)", vars(package))
    model = package.wrap(DistributedDataParallel, net())
    return model, train(model)


def gathers_before_the_forward():
    """As a Trainer does that counts the items of a batch."""
    model, counts = wrapped(), [torch.tensor(0) for _ in range(dist.get_world_size())]

    def lose(model, x, y):
        dist.all_gather(counts, torch.tensor(len(x)))
        return loss_of(model, x, y) * int(sum(counts)) / len(x)

    return model, train(model, lose=lose)


def loaders_and_evaluation():
    model, generator = wrapped(), torch.Generator().manual_seed(5)
    optimizer = sgd(model)
    data = TensorDataset(
        torch.randn(96, 8, generator=generator), torch.randint(4, (96,), generator=generator)
    )
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data), num_workers=1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        model.train()
        loss = train(model, optimizer, data=loader)
        model.eval()
        with torch.no_grad():
            model(data[:6][0])
    return model, loss


def kept_views():
    model = wrapped(gradient_as_bucket_view=True)
    return model, train(model, to_none=False)


def accumulated(sync_of):
    model = wrapped()
    optimizer, data = sgd(model), list(batches(3 * STEPS))
    for i, (x, y) in enumerate(data):
        with sync_of(model, i % 3 == 2):
            loss = loss_of(model, x, y) / 3
            loss.backward()
        if i % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if i % 15 == 14 and dist.get_rank() == 0:
                with torch.no_grad():
                    model.eval()(x)  # rank 0 alone
                model.train()
    return model, loss


def no_sync():
    return accumulated(lambda model, last: contextlib.nullcontext() if last else model.no_sync())


def by_flag():
    def flagged(model, last):
        model.require_backward_grad_sync = last
        return contextlib.nullcontext()

    return accumulated(flagged)


def every_micro_step():
    return accumulated(lambda _model, _last: contextlib.nullcontext())


def gan():
    first, second = wrapped(nn.Sequential(net(), nn.BatchNorm1d(4))), wrapped(nn.Linear(4, 1))
    optimizers = sgd(first), torch.optim.Adam(second.parameters())
    judge = functional.binary_cross_entropy_with_logits
    for x, _ in batches():
        optimizers[1].zero_grad()
        judge(second(x[:, :4]), torch.ones(6, 1)).backward()
        made = first(x)
        judge(second(made.detach()), torch.zeros(6, 1)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = judge(second(made), torch.ones(6, 1))
        loss.backward()
        optimizers[0].step()
    return nn.ModuleList([first, second]), loss


def two_in_one_backward():
    both = nn.ModuleList([wrapped(), wrapped()])
    return both, train(both, lose=lambda both, x, y: loss_of(both[0], x, y) + loss_of(both[1], x + 1, y))


def skipped_steps():
    model, scaler = wrapped(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y) * (float("inf") if i % 7 == 5 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return model, loss


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 24), nn.Linear(24, 4)
        self.inner = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        return self.last(self.inner[(self.turn + dist.get_rank()) % 3](self.first(x).relu()))


def epoch_never_set():
    model, data = wrapped(), TensorDataset(torch.arange(96 * 8.0).reshape(96, 8) / 768)
    optimizer = sgd(model)
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data))
    for _ in range(2):
        loss = train(model, optimizer, data=loader, lose=lambda model, x: model(x).square().mean())
    return model, loss


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.rest = nn.EmbeddingBag(50, 8, sparse=True), net()

    def forward(self, x):
        return self.rest(self.table((x.abs() * 10).long() % 50))


def sparse_gradients():
    model = wrapped(Sparse())
    return model, train(model, SGD(model.parameters(), lr=0.05))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x):
        x = checkpoint(self.inner, self.first(x).relu(), use_reentrant=True)
        return self.last(checkpoint(self.inner, x, use_reentrant=True))


def joined(**more):
    model = wrapped()
    train(model, number=6)
    with model.join(**more):
        loss = train(model, number=STEPS + 5 * dist.get_rank())
    return model, loss


def joined_by_active_ranks():
    return joined(divide_by_initial_world_size=False)


def siamese():
    model = wrapped(nn.Linear(8, 4))
    return model, train(model, lose=lambda model, x, _: (model(x) - model(x + 1)).square().mean())


def two_backwards_a_step():
    """As sharpness-aware minimisation: up the slope, then down from there."""
    model = wrapped()
    optimizer = sgd(model)
    for x, y in batches():
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            with torch.no_grad():
                for one in model.parameters():
                    one.add_(one.grad, alpha=0.01)
        optimizer.step()
    return model, loss


def closures():
    model = wrapped(nn.Linear(8, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    return model, loss


def sharded_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrapped()
    return model, train(model, ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.05))


def copied():
    model = wrapped()
    train(model)
    model = copy.deepcopy(model)
    return model, train(model)


def pickled():
    model = wrapped(bucket_cap_mb=1)
    train(model)
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    model = wrapped(torch.load(file, weights_only=False), bucket_cap_mb=1)
    return model, train(model)


class Averaging(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Averaged(nn.Sequential):
    function = Averaging

    def forward(self, x):
        for i, layer in enumerate(self):
            x = layer(x) if i != 4 else self.function.apply(layer(x))
        return x


def group_of_one():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = wrapped(process_group=groups[dist.get_rank()])
    return model, train(model)


def hook_of_the_user():
    model = wrapped()
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return model, train(model)


def late_hook_of_the_user():
    model = wrapped()
    train(model)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return model, train(model)


def power_sgd():
    model = wrapped(bucket_cap_mb=None)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=4)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, train(model)


def builtin_hook():
    model = wrapped()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model, train(model)


def delayed_all_reduce():
    module = net()
    delayed = {"delay_all_reduce_named_params": [("7.bias", module[7].bias)]}
    model = wrapped(module, bucket_cap_mb=1, param_to_hook_all_reduce=module[0].weight, **delayed)
    return model, train(model)


def optimizer_in_the_backward():
    model = wrapped()
    model._register_fused_optim(SGD, lr=0.05)
    for x, y in batches():
        loss = loss_of(model, x, y)
        loss.backward()
    return model, loss


def by_hand():
    model = net()
    optimizer = sgd(model)

    def step():
        for one in model.parameters():
            dist.all_reduce(one.grad)
        optimizer.step()

    return model, train(model, optimizer, step=step)


def over_mesh(wrap):
    from torch.distributed.device_mesh import init_device_mesh

    model = wrap(net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    loss = train(model)
    return nn.ParameterList([one.full_tensor() for one in model.parameters()]), loss


def sharded():
    from torch.distributed.fsdp import fully_shard

    return over_mesh(fully_shard)


def composed():
    """DDP without its forward."""
    from torch.distributed._composable.replicate import replicate

    model = replicate(net())
    return model, train(model)


def replicated():
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return over_mesh(replicate)


def raising_backward():
    """All ranks raise in the middle of a backward, and go on with a new model."""

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.view_as(x)

        @staticmethod
        def backward(_, gradient):
            if next(steps) == 11:
                raise ValueError
            return gradient

    class Broken(Averaged):
        function = Raising

    steps = iter(range(99))
    with contextlib.suppress(ValueError):
        train(wrapped(Broken(*net())))
    model = wrapped()
    return model, train(model)


def compiled_step():
    model = wrapped()
    optimizer = sgd(model)
    return model, train(model, optimizer, step=torch.compile(optimizer.step))


def compiled_collective():
    """A collective within a compiled function, whose graph must not break."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def shifted(x):
        total = x * 2
        dist.all_reduce(total)
        return x + total.tanh()

    model = wrapped()
    return model, train(model, lose=lambda model, x, y: loss_of(model, shifted(x), y))


MODELS = {
    "plain": wrapped,
    "default_caps": lambda: wrapped(bucket_cap_mb=None),
    "caps_by_bucket": lambda: wrapped(bucket_cap_mb=None, bucket_cap_mb_list=[0.001, 0.002]),
    "views": lambda: wrapped(gradient_as_bucket_view=True),
    "unused_parameters": lambda: wrapped(Branches(), find_unused_parameters=True),
    "nothing_unused": lambda: wrapped(find_unused_parameters=True),
    "static_graph": lambda: wrapped(Checkpointed(), static_graph=True),
    "collectives_in_the_backward": lambda: wrapped(Averaged(*net())),
    "own_group": lambda: wrapped(process_group=dist.new_group()),
    "compiled_inside": lambda: wrapped(torch.compile(net()), bucket_cap_mb=None),
    "compiled_outside": lambda: torch.compile(wrapped(bucket_cap_mb=None)),
    "one_device": net,
}
"""Models of kinds that `train` trains; the other kinds are functions."""


def caps_of(model):
    """The bucket caps that a DDP has now."""
    return [getattr(model, f"bucket_bytes_cap{end}", None) for end in ("", "_default", "_list")]


def digest(model, loss):
    """A hash of all bits that training has made."""
    made = hashlib.sha256(float(loss.detach()).hex().encode() + torch.get_rng_state().numpy().tobytes())
    for one in (*model.parameters(), *model.buffers()):
        made.update(one.detach().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]


def break_watch(fault):
    """Let a part of the watch raise at its N-th call, and none later, or return N always."""
    where, number = fault.replace("=", ":").split(":")
    module, _, path = where.partition(".")
    owner = sys.modules[f"{PACKAGE}.{module}"]
    *names, last = path.split(".")
    for name in names:
        owner = getattr(owner, name)
    original, calls = getattr(owner, last), iter(range(1, 10**9))

    def breaking(*arguments, **more):
        if "=" in fault:
            return int(number)
        if next(calls) == int(number):
            time.sleep(0.05)  # other ranks go on as far as they can
            raise ZeroDivisionError("on purpose")
        return original(*arguments, **more)

    setattr(owner, last, breaking)
    return lambda: setattr(owner, last, original)


def begin_watch(rows):
    """Watch anew, and collect the rows."""
    watch = sys.modules[PACKAGE].watch
    sys.modules[f"{PACKAGE}.buckets"].PROBE_SHARE = 0.6
    watch.restart()
    write = type(watch.rows).write
    watch.rows.write = lambda **row: (rows.append({"rank": dist.get_rank(), **row}), write(watch.rows, **row))


def play(kinds):
    """Play kinds; the end of each."""
    found = {}
    for kind in kinds:
        name, _, fault = kind.partition("@")
        rows, restore = [], lambda: None
        if PACKAGE in sys.modules:
            begin_watch(rows)
            if fault and dist.get_rank() == 1:
                restore = break_watch(fault)
        torch.manual_seed(0)
        before = dist.group.WORLD._get_sequence_number_for_group()
        if name in MODELS:
            model = MODELS[name]()
            loss = train(model)
        else:
            model, loss = globals()[name]()
        sent = dist.group.WORLD._get_sequence_number_for_group() - before
        restore()
        norms = [one.double().norm().item() for one in model.parameters()]
        ended = {"end": digest(model, loss), "sent": sent, "caps": caps_of(model), "norms": norms}
        found[kind] = ended | {"rows": rows}
    return found

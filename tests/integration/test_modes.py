"""What modes train with: ZeRO and batch norm on real ranks, and the stand-in of DP."""

import copy
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import scatter_gather

from ddp_bench.bench.modes.dp import CudaDataParallel, DataParallelStandIn

COMMON = """
def case(**settings):
    return case_of(**dict(image_size=16, batch_per_device=2, backend="gloo") | settings)
"""


@pytest.fixture
def built(ranks):
    return lambda script: ranks(COMMON + script)


ZERO = """
def groups_of(parameters):
    first, *others = parameters
    return [{"params": [first], "lr": 0.5}, {"params": others}]
def adam(parameters):
    return torch.optim.Adam(groups_of(parameters), lr=0.01, betas=(0.8, 0.9))
workload = replace(make_resnet_workload("resnet20", 16), optimizer=adam)
group = cluster.group(2, "gloo")
def trainer(workload=workload, **settings):
    torch.manual_seed(0)
    return trainer_of(case(arch="resnet20", **settings), workload, cluster.place, group)
def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.mode.module.parameters()])
"""


def test_zero_trains_alike_with_its_share_of_the_state(built):
    """The weights of plain Adam with two groups, its state shared out; a local step sends nothing.

    ResNet-20 has 19 convolutions, 19 batch norms of two parameters and a layer of two: 59.
    """
    script = """
plain, zero = trainer(), trainer(zero_optimizer=True)
for _ in range(3):
    plain.step()
    zero.step()
apart = ((weights(zero) - weights(plain)).norm() / weights(plain).norm()).item()
states = [len(plain.optimizer.state), len(zero.optimizer.optim.state)]
with Collectives() as local:
    zero.step_locally()
with Collectives() as whole:
    zero.step()
others = weights(zero).clone()
dist.all_reduce(others, dist.ReduceOp.MAX, group=group)
class Own(torch.optim.SGD):
    def __init__(self, params, rate):
        super().__init__(params, lr=rate)
try:
    trainer(replace(workload, optimizer=lambda parameters: Own(parameters, 0.1)), zero_optimizer=True)
except Unsupported as unsupported:
    why = str(unsupported)
sent = [seen.names.count("broadcast_") for seen in (local, whole)]
report([apart, states, *sent, bool(torch.equal(others, weights(zero))), why])
"""
    found = built(ZERO + script)
    for apart, (_, own), while_local, in_a_step, alike, why in found:
        assert apart < 1e-6
        assert 0 < own < 59
        assert while_local == 0
        assert in_a_step == 59 + 2, "each of the parameters once; buffers together, by type"
        assert alike, "the step after a local one sends all parameters"
        assert why.startswith("ZeroRedundancyOptimizer does not take this Own: ")
    assert sum(own for _, (_, own), *_ in found) == found[0][1][0] == 59


SYNCED = """
from ddp_bench.bench.modes import ddp
sizes = []
class Synced(nn.BatchNorm2d):
    def forward(self, inputs):
        world_size = dist.get_world_size(self.process_group or dist.group.WORLD)
        if world_size > 1:
            sizes.append(world_size)
        return super().forward(inputs)
    @staticmethod
    def convert_sync_batchnorm(module, process_group):
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.__class__, part.process_group = Synced, process_group
        return module
stand_in(patch, ddp, {"nn.SyncBatchNorm": Synced})
"""
"""Stands in for torch's SyncBatchNorm, which takes no CPU tensors; asks as that does whether to."""


def test_a_step_without_communication_does_not_synchronise_batch_norm(built):
    script = """
torch.manual_seed(cluster.rank)
plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
group = cluster.group(2, "gloo")
mode = build_mode(case(sync_batchnorm=True), copy.deepcopy(plain), cluster.place, group)
inputs = torch.randn(2, 3, 8, 8)
with mode.skip_communication():
    local = mode.wrapped(inputs)
    local.sum().backward()
    while_local = len(sizes)
    differs = (local - plain(inputs)).abs().max().item()
with mode.no_sync():
    mode.wrapped(inputs)
groups = [layer.process_group is group for layer in mode.module.modules() if hasattr(layer, "process_group")]
report([while_local, differs, sizes, groups])
"""
    found = built(SYNCED + script)
    for while_local, differs, sizes, restored in found:
        assert while_local == 0
        assert differs == 0, "what plain batch norm makes of this rank's batch"
        assert sizes == [2, 2], "each of the two layers synchronises again after it, under `no_sync` too"
        assert restored == [True, True]


class Output(OrderedDict):
    """Outputs by name, as those of Hugging Face models are."""


class Nested(nn.Module):
    """Takes and returns tensors of every kind, in nested containers; has its own loss."""

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)

    def forward(self, ids, *, extra, scale):
        mask = extra["mask"]
        x = self.norm(self.words(ids)) * mask.unsqueeze(-1) * scale
        logits = self.head(x)
        loss = (functional.cross_entropy(logits.mT, ids, reduction="none") * mask).mean()
        hidden = (x, [logits.detach(), None])
        return Output(loss=loss, logits=logits, hidden=hidden, best=logits.argmax(-1), kept=mask)


NESTED_IDS = torch.arange(12).reshape(4, 3) % 7
NESTED = {"ids": NESTED_IDS, "extra": {"mask": NESTED_IDS > 1, "rest": [None]}, "scale": 0.5}
NESTED_LOSSES = {
    "the module's own": lambda found: found["loss"].mean(),
    "one output": lambda found: found["logits"].square().sum(),
    "several": lambda found: (found["logits"] * found["hidden"][0].sum(-1, keepdim=True)).sum(),
    "what has no gradient": lambda found: (found["logits"] * found["kept"].unsqueeze(-1)).logsumexp(-1).sum(),
}


@pytest.mark.parametrize("loss", NESTED_LOSSES.values(), ids=NESTED_LOSSES)
@pytest.mark.parametrize("calls", [1, 2])
def test_the_stand_in_splits_and_joins_nested_values(loss, calls):
    """Twice as well: a loss may compare two outputs of one batch."""
    torch.manual_seed(0)
    plain = Nested().double()
    parallel = DataParallelStandIn(copy.deepcopy(plain), (0, 0))
    found = [parallel(**NESTED) for _ in range(calls)]
    wanted = [plain(**NESTED) for _ in range(calls)]
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        assert one["loss"].shape == (2,), "one of each device, as nn.DataParallel gathers scalars"
        torch.testing.assert_close(one["hidden"], other["hidden"])
        for name in ("best", "kept"):
            assert torch.equal(one[name], other[name])
            assert not one[name].requires_grad
        assert not one["hidden"][1][0].requires_grad, "it has none in the module either"
    torch.stack([loss(one) for one in found]).sum().backward()
    torch.stack([loss(one) for one in wanted]).sum().backward()
    for expected, parameter in zip(plain.parameters(), parallel.module.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    with torch.no_grad():
        logits = parallel(**NESTED)["logits"]
    assert not logits.requires_grad
    torch.testing.assert_close(logits, wanted[0]["logits"])
    parallel.close()


def test_a_replica_of_the_stand_in_without_a_gradient_is_left_out():
    class Gated(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else torch.zeros(len(x), 2)

    parallel = DataParallelStandIn(Gated(1, 2), (0, 0))
    parallel(torch.tensor([[1.0], [3.0], [-1.0], [-2.0]])).sum().backward()
    assert parallel.module.weight.grad.tolist() == [[4.0], [4.0]]
    parallel.close()


def test_the_stand_in_refuses_what_torch_does_not_gather():
    class Counting(nn.Linear):
        def forward(self, x):
            return super().forward(x), 0.5

    parallel = DataParallelStandIn(Counting(2, 2), (0, 0))
    with pytest.raises(TypeError, match="gathers tensors, and the module's outputs hold a float"):
        parallel(torch.zeros(2, 2))
    with pytest.raises(TypeError):
        scatter_gather.gather([0.5, 0.5], "cpu")
    parallel.close()


class Recorded(nn.Module):
    """Notes the autocast state that its forward finds, replica by replica."""

    def __init__(self, device_type):
        super().__init__()
        self.device_type = device_type
        self.found = []

    def forward(self, inputs):
        enabled = torch.is_autocast_enabled(self.device_type)
        self.found.append((enabled, torch.get_autocast_dtype(self.device_type)))
        return inputs


class Threads(nn.DataParallel):
    """Runs replicas as torch's own `parallel_apply` does: in threads that enter autocast without a type."""

    def parallel_apply(self, replicas, inputs, kwargs):
        def run(replica, own, named):
            with torch.autocast("cpu", enabled=enabled):
                return replica(*own, **named)

        enabled = torch.is_autocast_enabled("cpu")
        with ThreadPoolExecutor(len(replicas)) as pool:
            return list(pool.map(run, replicas, inputs, kwargs))


class CpuDataParallel(CudaDataParallel, Threads):
    """The class for GPUs before those threads, on CPU tensors."""

    autocast_device = "cpu"


@pytest.mark.parametrize("on_gpus", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("enabled", [True, False])
def test_replicas_compute_in_the_callers_autocast_type(dtype, *, on_gpus, enabled):
    """Threads have their own, whatever the caller's is; on CPU tensors, whose default is bfloat16."""
    module = Recorded("cpu")
    with torch.autocast("cpu", dtype=dtype, enabled=enabled):
        if on_gpus:
            parallel = CpuDataParallel(module, device_ids=[])
            parallel.parallel_apply([module, module], [(torch.zeros(1),)] * 2, ({}, {}))
        else:
            parallel = DataParallelStandIn(module, (0, 0))
            parallel(torch.zeros(4, 1))
            parallel.close()
    assert module.found == [(enabled, dtype)] * 2

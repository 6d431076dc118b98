"""FSDP2, partition and pipeline over real ranks: what they compute is what one device would."""

from types import SimpleNamespace

import pytest
import torch

from ddp_bench.bench.modes.fsdp import find_blocks
from ddp_bench.bench.modes.pipeline import PipelineMode
from ddp_bench.models.registry import make_resnet_workload

COMMON = """
from ddp_bench.models.workload import make_loss_function
workload = make_resnet_workload("resnet20", 16)
prover = make_prover(workload, cluster.place, 0)
group = cluster.group(2, "gloo")
def case(mode, **settings):
    return case_of(mode=mode, image_size=16, backend="gloo", **settings)
def stages_of(case):
    return prover.splitter.make_stages(case, prover.make_subject(case).peers)
def error(case):
    try:
        return prover.prove(case, group, stages_of(case)).error
    except ProofError as error:
        return str(error)
"""


@pytest.fixture
def forms(ranks):
    return lambda script: ranks(COMMON + script)


def test_every_form_is_proven_to_rounding(forms):
    found = forms("""
cases = [case("fsdp"), case("fsdp", reshard_after_forward=False), case("replicate"),
         *(case(m, mp_policy="bf16", precision="bf16") for m in ("fsdp", "replicate")), case("partition"),
         case("pipeline"), case("pipeline", micro_batches=2),
         case("pipeline", pipeline_schedule="1f1b")]
with Collectives() as seen:
    errors = [error(c) for c in cases]
sent = set(zip(seen.names, seen.dtypes, strict=True))
report([*errors, sorted(name for name, dtype in sent if dtype == "torch.uint8")])
""")
    for rank in found:  # Python objects are gathered as bytes, and unpickled
        assert {"allgather_", "gather_", "broadcast_"}.isdisjoint(rank.pop())
    assert all(isinstance(e, float) and e < 1e-12 for e in found[0]), found[0]


def test_under_the_policy_blocks_compute_in_bf16_and_all_else_stays_in_float32(forms):
    """Parameters, gradients, statistics of batch norm, and what the loss is given."""
    found = forms("""
def types(mode):
    made = build_mode(case(mode, mp_policy="bf16", precision="bf16"), workload.module(), cluster.place, group)
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda part, _, out: seen.append(str(out.dtype)))
    out = made.wrapped(torch.randn(4, 3, 16, 16))
    hook.remove()
    out.sum().backward()
    kept = [*made.module.parameters(), *(p.grad for p in made.module.parameters()), *made.module.buffers()]
    kept = {str(one.dtype) for one in kept if one.is_floating_point()}
    return [str(out.dtype), sorted(set(seen)), sorted(kept)]
found = [types("fsdp"), types("replicate")]
report(found)
""")
    assert found == [[["torch.float32", ["torch.bfloat16"], ["torch.float32"]]] * 2] * 2


class Named(torch.nn.Module):
    """A transformer whose layers have names of their own, in a dictionary, between parts that come once."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
        layer = torch.nn.TransformerEncoderLayer
        self.strata = torch.nn.ModuleDict({f"s{i}": layer(8, 2, 8, batch_first=True) for i in range(3)})
        self.head = torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2)])


def test_blocks_are_what_comes_again_in_a_list_whatever_it_is_called():
    resnet = find_blocks(make_resnet_workload("resnet18", 32).module())
    assert [type(one).__name__ for one in resnet] == ["BasicBlock"] * 8
    named = Named()
    assert find_blocks(named) == [*named.strata.values()]
    assert find_blocks(torch.nn.Sequential(*resnet)) == resnet
    assert (
        find_blocks(torch.nn.Sequential(torch.nn.Sequential(*resnet[:4]), *resnet[4:]))
        == resnet[4:] + resnet[:4]
    )
    assert find_blocks(torch.nn.Linear(2, 2)) == []


def test_what_goes_wrong_in_a_form_is_caught(forms):
    """Gradients that are summed instead of averaged, batches counted twice, shards that are never reduced."""
    found = forms("""
from ddp_bench.bench.modes import pipeline
from torch.distributed.pipelining import ScheduleGPipe
summing = lambda stage, m, loss_fn: ScheduleGPipe(stage, m, loss_fn=loss_fn, scale_grads=False)
with patch.context() as within:
    within.setitem(pipeline.SCHEDULES, "gpipe", summing)
    summed = error(case("pipeline"))
class CountedTwice(ScheduleGPipe):
    def step(self, *arguments, **more):
        super().step(*arguments, **more)
        for name, buffer in self._stage.submod.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer += 1
with patch.context() as within:
    within.setitem(pipeline.SCHEDULES, "gpipe", CountedTwice)
    twice = error(case("pipeline"))
whole, stages = workload.module(), stages_of(case("pipeline"))
mode = build_mode(case("pipeline"), whole, cluster.place, group, stages=stages)
from ddp_bench.bench.modes import fsdp
shard = fsdp.fully_shard
def never_reduced(module, **more):
    shard(module, **more)
    for one in module if isinstance(module, list) else [module]:
        one.set_requires_gradient_sync(False)
patch.setattr(fsdp, "fully_shard", never_reduced)
fsdp_policy = error(case("fsdp", mp_policy="bf16", precision="bf16"))
report([summed, error(case("fsdp")), fsdp_policy, twice, len(mode.collect_buffers())])
""")
    *gradients, buffers, num_compared = map(str, found[0])
    assert all("gradients differ from those of single" in why for why in gradients), gradients
    # Torch before 2.14 changes buffers as it looks at a stage's shapes: there they are not compared.
    assert buffers.startswith("buffers") == (num_compared != "0"), buffers


@pytest.mark.campaign
def test_ranks_ask_nccl_in_processes_of_their_own_that_meet(forms):
    """Here by gloo, which says nothing of its own: what such a process writes is what its rank has."""
    found = forms("""
from ddp_bench.bench.worker import devices
from ddp_bench.bench.worker.messages import AskNccl
def job(name, *rest):
    say = "import sys; print('NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL', flush=True)"
    run = "from ddp_bench.bench.worker.devices import send_messages; send_messages(*sys.argv[1:])"
    return [sys.executable, "-c", f"{say}; {run}", *rest[1:]]
patch.setattr(devices, "make_package_command", job)
before = dict(os.environ)
def asked(name, *sizes):
    job = AskNccl(name=name, num_ranks=2, sizes=sizes, backend="gloo")
    return devices.read_nccl_log(job, cluster.place.device)
logs = [asked("asked", 8, 4096)]
patch.setattr(devices, "make_package_command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
logs.append(asked("failed", 8))
report([*logs, before == dict(os.environ)])
""")
    assert found == [["NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL\n", "", True]] * 2


def test_a_stage_holds_its_own_layers_alone_and_waits_its_turn(forms):
    """With the whole batch at once one of two stages computes at a time: half of their time is a bubble."""
    found = forms("""
from ddp_bench.bench.measure.anatomy import run_pipeline_anatomy
one = case("partition")
stages = stages_of(one)
trainer = trainer_of(one, workload, cluster.place, group, stages=stages)
trainer.step()
times = run_pipeline_anatomy(trainer, 2, cluster.place.device, group)
trainer.check_loss()
mode = trainer.mode
count = sum(p.numel() for p in mode.module.parameters())
parts = [count, len(mode.gather_state_dict()), sum(stages.by_device)]
report([*parts, times.detail["bubble_pct"]])
""")
    (first, names, layers, measured), (second, *_) = found
    assert first + second == 269_722  # ResNet-20 by He et al.
    assert names == 19 + 19 * 5 + 2  # convolutions, norms with their buffers, the linear layer
    assert layers == 13
    assert 50 <= measured < 100


def test_a_model_that_raises_in_a_stage_is_named_by_its_own_error():
    """PyTorch's schedule wraps it in `[Stage 1] failed to run forward`."""

    def failed(*_, **__):
        raise RuntimeError("[Stage 1] failed to run forward") from ValueError("no such luck")

    mode = object.__new__(PipelineMode)
    vars(mode).update(_is_first=True, _is_last=True, _schedule=SimpleNamespace(step=failed))
    with pytest.raises(ValueError, match="no such luck"):
        mode.train((torch.zeros(1), torch.zeros(1)), lambda *_: torch.zeros(()))

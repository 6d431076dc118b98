"""Compiled cases: each compiles under its own settings, and trains as the plain module does."""

from dataclasses import replace

import pytest
import torch
from made import case_of
from test_workloads import PROVEN

from ddp_bench.bench.modes import Unsupported, compiled, require_compiler
from ddp_bench.bench.modes.compiled import CompileWatch

CASE = """
from torch._dynamo.backends.debugging import aot_eager
from ddp_bench.models import step
# Graphs are made and split as ever; only the slow step from a graph to machine code is left out.
patch.setattr(step, "_compile_graph", lambda graph, inputs, **_: aot_eager(graph, inputs))
from ddp_bench.bench.modes.compiled import CompileWatch
from ddp_bench.models.step import move_and_compile
group = cluster.group(2, "gloo")
torch.manual_seed(0)
# 4 MiB of gradients: DDP's first bucket of 1 MiB, then one more.
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
plain = Model()
x = torch.randn(2, 4, 512)[cluster.rank]
def gradients(forward, module):
    module.zero_grad()
    forward(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()]).clone()
local = gradients(plain, plain)
averaged = local.clone()
torch.distributed.all_reduce(averaged, group=group)
averaged /= 2
plain.zero_grad()
def off(found, wanted):
    return float((found - wanted).norm() / wanted.norm())
def tried(**settings):
    case = case_of(**dict(compile="default", backend="gloo") | settings)
    module = move_and_compile(copy.deepcopy(plain), case, cluster.place.device)
    watch = CompileWatch()
    mode = build_mode(case, module, cluster.place, group)
    with mode.enter_steps():
        errors = [off(gradients(mode.wrapped, module), averaged) for _ in range(3)]
        found = watch.count_compiled()
        with mode.skip_communication():
            errors.append(off(gradients(mode.wrapped, module), local))
        errors.append(off(gradients(mode.wrapped, module), averaged))
    layout = mode.read_bucket_layout()
    return max(errors), found.num_graphs, found.graph_breaks, len(layout.num_bytes)
"""


@pytest.mark.campaign
def test_every_case_compiles_under_its_own_way_of_optimising_ddp(ranks):
    """Expected of torch's documentation: two graphs for two buckets, and one; the last is as the first."""
    ways = ["ddp_optimizer", "no_optimization", "ddp_optimizer"]
    found = ranks(
        CASE + f"report([tried(optimize_ddp=way) for way in {ways!r}] + [torch._dynamo.config.optimize_ddp])"
    )
    for tried in found:
        *cases, optimize_ddp = tried
        assert max(error for error, *_ in cases) < 1e-5, "gradients are the average, or under no_sync its own"
        assert [numbers for _, *numbers in cases] == [[2, 0, 2], [1, 0, 2], [2, 0, 2]]
        assert optimize_ddp is True


def test_eager_cases_need_no_compiler_and_compiled_ones_say_what_to_install(monkeypatch):
    """Found before anything is built, whatever the compiler left in its cache before."""
    monkeypatch.setattr(compiled, "has_triton", lambda: False)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    wanted = {
        "cuda": r"Triton.*pip install triton, or leave --compile off",
        "cpu": r"/nowhere/g\+\+ does not run; install g\+\+.*--compile off",
    }
    for device_type, said in wanted.items():
        eager = case_of(mode="single", num_devices=1, device_type=device_type)
        require_compiler(eager, torch.device(device_type))
        # CXX is read when torch's compiler is imported.
        within = torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")})
        with within, pytest.raises(Unsupported, match=said):
            require_compiler(replace(eager, compile="default"), torch.device(device_type))


def test_a_case_of_which_nothing_was_compiled_is_no_compiled_case():
    with pytest.raises(Unsupported, match="made no graph"):
        CompileWatch().count_compiled()


COUNTED = """
from torch._dynamo.backends.debugging import aot_eager
from ddp_bench.models import step
from ddp_bench.models.workload import Workload
made = []
def counted(graph, inputs, **_):
    made.append(any(isinstance(one, torch.SymInt) for one in inputs))
    return aot_eager(graph, inputs)
patch.setattr(step, "_compile_graph", counted)
class Net(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 32), nn.Dropout(share), nn.Linear(32, 4)
    def forward(self, x):
        hidden = self.first(x).relu()
        return self.last(self.drop(hidden) if self.drop.p else hidden)
def rows(number, generator):
    return torch.randn(number, 16, generator=generator), torch.randint(4, (number,), generator=generator)
def compiled(share, mode, **settings):
    made.clear()
    workload = Workload(name="net", module=lambda: Net(share), batch=rows)
    said = outcome(workload, mode, compile="default", optimize_ddp="no_optimization", **settings)
    return [said, len(made), any(made)]

"""


def test_a_case_is_compiled_once_and_twice_where_it_draws(ranks):
    """Gradients are proved eagerly; what draws is proved with eager numbers, and timed as it is."""
    cases = '[compiled(share, mode) for share in (0.0, 0.5) for mode in ("single", "ddp")]'
    first, second = ranks(f"{PROVEN}{COUNTED}report({cases})")
    for said, *_ in first:
        assert max(said) < 1e-3, said
    assert [number for _, number, _ in first] == [1, 1, 2, 2]
    assert [number for _, number, _ in second] == [0, 1, 0, 2], "a rank that takes no part compiles nothing"


def test_a_case_of_another_batch_size_has_graphs_of_its_own_size(ranks):
    """Dynamo would compile it for any size, as it has seen two of the same module."""
    sizes = '[compiled(0.0, "single", batch_per_device=size) for size in (8, 16, 24)]'
    found = ranks(f"{PROVEN}{COUNTED}report({sizes})")[0]
    assert [(number, is_dynamic) for _, number, is_dynamic in found] == [(1, False)] * 3

"""DDP's bucket rule: against lists read off PyTorch's reducer by hand, and against it itself, on one rank."""

import functools

import pytest
import torch
import torch.distributed as dist
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st
from made import case_of
from selection import in_campaign

from ddp_bench.bench.modes.ddp import DistributedMode, Place
from ddp_bench.bench.plan.buckets import compute_cap_limits, fill_buckets
from ddp_bench.models.profile import list_gradients
from ddp_bench.models.registry import make_resnet_workload

ARCHS = ("resnet20", "resnet18", "resnet50", "resnext50_32x4d")
CAPS = ("0", "25", "1.5")


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.set_num_threads(1)
    yield
    dist.destroy_process_group()


@functools.cache
def module_of(arch):
    return make_resnet_workload(arch, 32).module()


RESNET18_LAYOUTS = {
    "default": (2052000, 28852224, 15853824),
    "25": (30904224, 15853824),
    "5": (11493280, 9441280, 9969664, 7084032, 6037504, 2732288),
    "100": (46758048,),
}
"""Read off PyTorch's reducer by hand, without this suite (torch 2.15)."""


def reported(case, module, inputs):
    """The layout after three steps: buckets are rebuilt in ready order after the first."""
    mode = DistributedMode(case, module, Place(device=torch.device("cpu"), rank=0, cores=()), None)
    for _ in range(3):
        mode.ddp.zero_grad(set_to_none=True)
        mode.ddp(inputs).sum().backward()
    return mode, mode.read_bucket_layout()


def check(arch, caps, **settings):
    case = case_of(num_devices=1, arch=arch, backend="gloo", bucket_cap_mb=caps, **settings)
    _, layout = reported(case, module_of(arch), torch.randn(2, 3, 32, 32))
    assert layout.parameters
    order = [index for bucket in layout.parameters for index in bucket]
    sizes = [p.numel() * p.element_size() for p in module_of(arch).parameters()]
    in_order = [sizes[index] for index in order]
    found = fill_buckets(in_order, caps)
    assert found.num_bytes == layout.num_bytes
    assert tuple(tuple(order[i] for i in bucket) for bucket in found.parameters) == layout.parameters
    return layout


@pytest.mark.parametrize(
    ("arch", "cap"),
    [
        *((arch, "default") for arch in ARCHS),
        *(("resnet18", cap) for cap in CAPS),
        *in_campaign(*((arch, cap) for arch in ARCHS[2:] for cap in CAPS)),
    ],
)
def test_layouts_of_several_resnets(arch, cap):
    check(arch, cap)


@pytest.mark.parametrize("cap", RESNET18_LAYOUTS)
def test_recorded_layouts_are_the_reducers_of_a_static_graph_too(cap):
    layout = check("resnet18", cap, static_graph=True)
    predicted = [g.num_bytes for g in list_gradients(make_resnet_workload("resnet18", 64))]
    assert layout.num_bytes == fill_buckets(predicted, cap).num_bytes == RESNET18_LAYOUTS[cap]
    assert sorted(i for bucket in layout.parameters for i in bucket) == list(range(62))


class Mixed(torch.nn.Module):
    """Parameters of three types, one with sparse gradients, in an order in which they alternate."""

    def __init__(self):
        super().__init__()
        types = (torch.float64, torch.float32, torch.bfloat16)
        layers = [torch.nn.Linear(8, 8).to(types[i % 3]) for i in range(7)]
        self.words, self.layers = torch.nn.Embedding(11, 8, sparse=True), torch.nn.ModuleList(layers)

    def forward(self, x):
        x = x + self.words(torch.arange(len(x)))
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


@pytest.mark.parametrize("cap", ["default", "0.0003"])
@pytest.mark.parametrize("find_unused", [False, True])
def test_every_bucket_has_the_type_and_the_parameters_that_a_hook_of_pytorch_sees(cap, *, find_unused):
    """With `find_unused_parameters` buckets are never rebuilt, and the reducer tells sizes alone."""
    case = case_of(num_devices=1, backend="gloo", find_unused_parameters=find_unused, bucket_cap_mb=cap)
    mode, _ = reported(case, Mixed(), torch.randn(4, 8))
    trained, seen = [id(p) for p in mode.module.parameters()], {}

    def watch(_, bucket):
        own = frozenset(trained.index(id(p)) for p in bucket.parameters())
        seen[bucket.index()] = (own, str(bucket.buffer().dtype), bucket.buffer().numel())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    mode.ddp.register_comm_hook(None, watch)
    mode.ddp(torch.randn(4, 8)).sum().backward()
    layout = mode.read_bucket_layout()
    found = zip(layout.parameters, layout.dtypes, layout.num_bytes, strict=True)
    told = [
        (frozenset(own), f"torch.{name}", size // getattr(torch, name).itemsize) for own, name, size in found
    ]
    assert told == [seen[index] for index in range(len(seen))]
    assert len({kind for _, kind, _ in told}) == 3
    assert (0,) in layout.parameters, "what is sparse goes alone"


def caps_of(limits):
    """Caps of so many bytes."""
    return "/".join(str(limit / 2**20) for limit in limits)


@bounded(100)
@given(st.integers(1, 2**20))
def test_random_caps(cap_bytes):
    check("resnet20", caps_of([cap_bytes]))


@bounded(40)
@given(st.lists(st.integers(1, 600_000), min_size=2, max_size=6))
def test_random_lists_of_caps(caps):
    try:
        check("resnet20", caps_of(caps))
    except Exception as error:
        if "has no bucket_cap_mb_list" in str(error):
            pytest.skip(str(error))
        raise


PARAMETERS = st.lists(st.integers(1, 2**22), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("sizes", "limits", "kinds", "layout"),
    [
        ([4, 4, 4, 4, 4], [8], None, ((0, 1), (2, 3), (4,))),
        ([4, 5, 4, 4], [8], None, ((0, 1), (2, 3))),
        ([1] * 7, [1, 2], None, ((0,), (1, 2), (3, 4), (5, 6))),
        ([1, 1, 1, 1], [1, 9], ["a", "b", "a", "a"], ((0,), (1,), (2, 3))),
    ],
    ids=["closes once it reaches its cap", "or exceeds it", "the last cap serves all", "kinds apart"],
)
def test_the_rule_by_hand(sizes, limits, kinds, layout):
    assert fill_buckets(sizes, caps_of(limits), kinds=kinds).parameters == layout


@pytest.mark.parametrize(
    ("cap", "limits"),
    [
        ("default", (2**20, 25 * 2**20)),
        ("25", (25 * 2**20,)),
        ("0", (1,)),
        ("0.5/1", (2**19, 2**20)),
        ("0.000001", (1,)),
    ],
)
def test_caps_are_whole_bytes_and_at_least_one(cap, limits):
    assert compute_cap_limits(cap) == limits


@given(PARAMETERS, st.lists(st.integers(1, 2**23), min_size=1, max_size=4))
def test_every_parameter_is_in_one_bucket_in_order(sizes, limits):
    layout = fill_buckets(sizes, caps_of(limits))
    assert [i for bucket in layout.parameters for i in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(layout.parameters[:-1]):
        cap = limits[min(number, len(limits) - 1)]
        assert layout.num_bytes[number] >= cap > sum(sizes[i] for i in bucket[:-1])

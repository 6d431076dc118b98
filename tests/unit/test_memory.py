"""What a case takes of each device, and what is given back once it is gone: no GPU is needed."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from held import held, place_of, trainer_of
from made import case_of
from stand_ins import stand_in
from torch import nn

from ddp_bench.bench.measure import groups, memory
from ddp_bench.bench.measure.memory import MemoryWatch, release_memory
from ddp_bench.bench.results.block_times import BlockTimes, DeviceMemory
from ddp_bench.bench.worker import rank
from ddp_bench.bench.worker.facts import Prepared, make_case_facts
from ddp_bench.bench.worker.messages import Settle, Wait
from ddp_bench.bench.worker.rank import Rank
from ddp_bench.models.registry import make_resnet_workload

MIB = 2**20
GPUS = [torch.device("cuda", index) for index in range(3)]


class Allocator:
    """One GPU's caching allocator: freed memory stays reserved until the cache is emptied."""

    def __init__(self):
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def take(self, mib, gap=0):
        """Put a tensor into what is reserved, or reserve more, with a gap that nothing else fits in."""
        self.allocated += mib * MIB
        self.reserved = max(self.reserved, self.allocated + gap * MIB)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, mib):
        self.allocated -= mib * MIB

    def reset_peaks(self):
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved


@pytest.fixture
def allocators(monkeypatch):
    found = [Allocator() for _ in GPUS]

    def empty_cache():
        for one in found:
            one.reserved = one.allocated

    calls = {
        "empty_cache": empty_cache,
        "reset_peak_memory_stats": lambda gpu: found[gpu.index].reset_peaks(),
        "memory_allocated": lambda gpu: found[gpu.index].allocated,
        "memory_reserved": lambda gpu: found[gpu.index].reserved,
        "max_memory_allocated": lambda gpu: found[gpu.index].peak_allocated,
        "max_memory_reserved": lambda gpu: found[gpu.index].peak_reserved,
    }
    stand_in(monkeypatch, memory, {f"torch.cuda.{name}": call for name, call in calls.items()})
    return found


def test_a_case_takes_what_it_adds_to_what_others_hold(allocators):
    """An earlier case holds 100 MiB and left 900 MiB in the cache; this one takes 300, then frees 200."""
    first = allocators[0]
    first.take(1000)
    first.free(900)
    watch = MemoryWatch(GPUS[:1])
    first.take(300, gap=40)
    first.free(200)
    first.take(50)
    assert watch.measure_rise() == (DeviceMemory(300.0, 340.0),)


def test_a_batch_that_cases_share_counts_to_each(allocators):
    allocators[0].take(20)
    batch = SimpleNamespace(nbytes=20 * MIB, is_cuda=True)
    watch = MemoryWatch(GPUS[:2], [batch])
    allocators[0].take(300)
    assert watch.measure_rise() == (DeviceMemory(320.0, 320.0), DeviceMemory(0.0, 0.0))


def test_a_case_in_a_gap_of_another_reserves_what_its_tensors_need(allocators):
    watch = MemoryWatch(GPUS[:1])
    allocators[0].peak_allocated += 7 * MIB
    assert watch.measure_rise() == (DeviceMemory(7.0, 7.0),)


def test_cpu_cores_tell_nothing_and_leave_gpus_alone(allocators):
    allocators[0].take(5)
    allocators[0].free(5)
    assert MemoryWatch([torch.device("cpu")]).measure_rise() == ()
    assert allocators[0].reserved == 5 * MIB


def case(mode):
    return case_of(mode=mode, num_devices=3, batch_per_device=2, precision="bf16", device_type="cuda")


def facts(mode, *by_rank):
    ranks = [Prepared(times=BlockTimes(1.0, (1.0,)), memory=memory) for memory in by_rank]
    return make_case_facts(case(mode), ranks)


@pytest.mark.parametrize(
    ("mode", "by_rank", "columns"),
    [
        # 600 MiB beside 200 and 100 MiB are 4 times their mean; most is held by another than device 0.
        ("dp", [((600.0, 640.0), (200.0, 700.0), (100.0, 120.0))], (600.0, 700.0, "600.0/200.0/100.0", 4.0)),
        ("ddp", [((10.0, 20.0),), ((12.25, 16.0),), ((11.0, 16.0),)], (12.25, 20.0, "10.0/12.2/11.0")),
        ("ddp", [()], ()),
        ("ddp", [((10.0, 16.0),), ()], ()),
    ],
    ids=["dp", "ddp", "untold", "untold on a rank"],
)
def test_memory_of_a_case_by_device(mode, by_rank, columns):
    found = facts(mode, *(tuple(DeviceMemory(*one) for one in rank) for rank in by_rank))
    names = ("peak_mem_mib", "reserved_mem_mib", "mem_by_device_mib", "dp_device0_mem_ratio")
    wanted = dict(zip(names, columns, strict=False))
    assert {name: value for name, value in found.items() if "mem" in name} == pytest.approx(wanted)


class Knowing(nn.Module):
    """A model whose parts know each other, as users' models do: a cycle."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.whole = [self]


@pytest.fixture
def dropped():
    """A model that nothing but itself holds."""
    gc.disable()
    found = weakref.ref(Knowing())
    assert found() is not None, "or this test could not fail"
    yield found
    gc.enable()


def on_gpu():
    rank = Rank(0, 0)
    rank.place = place_of(device=GPUS[0])
    return rank


def test_a_dropped_case_leaves_no_memory(dropped, allocators, monkeypatch):
    alone = {"dist.barrier": lambda *_, **__: None, "torch.cuda.synchronize": lambda _: None}
    stand_in(monkeypatch, groups, alone)
    stand_in(monkeypatch, rank, {"dist.barrier": alone["dist.barrier"]})
    for one in allocators:
        one.reserved = MIB
    assert on_gpu().do(Settle(index=0, group=(0, ""))).fault is None
    assert dropped() is None
    assert [one.reserved for one in allocators] == [0] * 3, "DP's other GPUs too"


@pytest.mark.parametrize(("gives", "reserved"), [(True, 0), (False, MIB)])
def test_ranks_give_caches_back_where_dp_needs_the_memory_too(allocators, monkeypatch, *, gives, reserved):
    stand_in(monkeypatch, rank, {"dist.barrier": lambda *_: None})
    allocators[0].reserved = MIB
    assert on_gpu().do(Wait(gives_caches_back=gives)).fault is None
    assert allocators[0].reserved == reserved


def test_nothing_is_collected_for_a_run_on_cpu_cores(dropped):
    release_memory(torch.device("cpu"))
    assert dropped() is not None


def test_gradients_are_there_within_blocks_alone():
    """Of every live case they would take as much as its parameters."""
    one = case_of(mode="single", num_devices=1, batch_per_device=2)
    trainer = trainer_of(one, make_resnet_workload("resnet20", 8), place_of())
    live, parameters, seen = held(one, trainer, place_of()), [*trainer.mode.module.parameters()], []
    trainer.optimizer.register_step_post_hook(
        lambda *_: seen.append(all(p.grad is not None for p in parameters))
    )
    for _ in range(2):
        live.measure("timed", 2)
        assert not [p for p in parameters if p.grad is not None]
    assert seen == [True] * 4

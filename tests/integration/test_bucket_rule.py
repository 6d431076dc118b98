"""The bucket rule against PyTorch's reducer itself, on one rank over a file."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st
from made import case_of

from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.modes.ddp import DistributedMode, Place
from ddp_bench.bench.predict.buckets import assign_cap, bucket_bytes
from ddp_bench.models.registry import resnet_workload

SIZES = {"resnet20": 32, "resnet18": 32, "resnet50": 32, "resnext50_32x4d": 32}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.set_num_threads(1)
    yield
    dist.destroy_process_group()


@functools.cache
def module_of(arch):
    return resnet_workload(arch, SIZES[arch]).module()


def reported(module, arch, caps):
    case = replace(case_of(num_devices=1, arch=arch, backend="gloo"), bucket_cap_mb=caps)
    place = Place(device=torch.device("cpu"), rank=0, local_rank=0, cores=())
    mode = DistributedMode(case, module, place, None)
    for _ in range(3):  # buckets are rebuilt in ready order after the first
        mode.ddp.zero_grad(set_to_none=True)
        mode.ddp(torch.randn(2, 3, 32, 32)).sum().backward()
    return mode.bucket_layout()


def check(arch, caps):
    layout = reported(module_of(arch), arch, caps)
    assert layout.parameters
    order = [index for bucket in layout.parameters for index in bucket]
    sizes = [p.numel() * p.element_size() for p in module_of(arch).parameters()]
    in_order = [sizes[index] for index in order]
    found = assign_cap(in_order, caps)
    assert bucket_bytes(in_order, found) == layout.num_bytes
    assert tuple(tuple(order[i] for i in bucket) for bucket in found) == layout.parameters


@pytest.mark.parametrize("arch", SIZES)
@pytest.mark.parametrize("cap", ["default", "0", "25", "1.5"])
def test_layouts_of_several_resnets(arch, cap):
    check(arch, BucketCaps.parse(cap))


@bounded(100)
@given(st.integers(1, 2**20))
def test_random_caps(cap_bytes):
    check("resnet20", BucketCaps((cap_bytes / 2**20,)))


@bounded(40)
@given(st.lists(st.integers(1, 600_000), min_size=2, max_size=6))
def test_random_lists_of_caps(caps):
    try:
        check("resnet20", BucketCaps(tuple(cap / 2**20 for cap in caps)))
    except Exception as error:
        if "has no bucket_cap_mb_list" in str(error):
            pytest.skip(str(error))
        raise

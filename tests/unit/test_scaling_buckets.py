"""DDP's bucket rule against lists read off PyTorch's reducer by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import gradients_in_backward_order

from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.predict.buckets import assign, assign_cap, bucket_bytes, cap_limits
from ddp_bench.models.registry import resnet_workload

# torch 2.15, ResNet-18
LAYOUTS = {
    "default": (2052000, 28852224, 15853824),
    "25": (30904224, 15853824),
    "5": (11493280, 9441280, 9969664, 7084032, 6037504, 2732288),
    "100": (46758048,),
}

SIZES = st.lists(st.integers(1, 2**22), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def resnet18():
    return [g.num_bytes for g in gradients_in_backward_order(resnet_workload("resnet18", 64))]


@pytest.mark.parametrize("cap", LAYOUTS)
def test_resnet18(resnet18, cap):
    assert bucket_bytes(resnet18, assign_cap(resnet18, BucketCaps.parse(cap))) == LAYOUTS[cap]


def test_cap_zero_is_a_bucket_per_parameter(resnet18):
    assert assign_cap(resnet18, BucketCaps.parse("0")) == tuple((i,) for i in range(62))


def test_a_bucket_closes_once_it_reaches_its_cap():
    assert assign([4, 4, 4, 4, 4], [8]) == ((0, 1), (2, 3), (4,))
    assert assign([4, 5, 4, 4], [8]) == ((0, 1), (2, 3))


def test_the_last_cap_serves_what_follows():
    assert assign([1] * 7, [1, 2]) == ((0,), (1, 2), (3, 4), (5, 6))


def test_kinds_do_not_mix_and_count_their_own_caps():
    assert assign([1, 1, 1, 1], [1, 9], kinds=["a", "b", "a", "a"]) == ((0,), (1,), (2, 3))


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
    assert cap_limits(BucketCaps.parse(cap)) == limits


@given(SIZES, st.lists(st.integers(1, 2**23), min_size=1, max_size=4))
def test_every_parameter_is_in_one_bucket_in_order(sizes, limits):
    layout = assign(sizes, limits)
    assert [i for bucket in layout for i in bucket] == list(range(len(sizes)))
    for number, bucket in enumerate(layout[:-1]):
        cap = limits[min(number, len(limits) - 1)]
        assert sum(sizes[i] for i in bucket) >= cap > sum(sizes[i] for i in bucket[:-1])

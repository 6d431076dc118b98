"""Batches and outputs of any nesting, held against torch's own scatter and gather."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import scatter_gather

from ddp_bench.models.nested import chunk, describe, join, leaves_of, map_tensors, tensors_of, with_tensors


class Point(NamedTuple):
    x: Tensor
    y: Any


class Attributes(OrderedDict[str, Any]):
    """As the outputs of Hugging Face models are."""


def counting(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


NESTINGS = [
    counting(6, 2),
    (counting(6), counting(6, 3) > 4),
    [counting(6), {"a": counting(6, 1), "b": (counting(6), None, 3, "s")}],
    Attributes(x=counting(6), rest=[counting(6, 2)]),
    Point(counting(6), Point(counting(6, 2), 1.5)),
    {"nothing": (), "one": counting(6)},
    ((counting(6, 2),), {"mask": counting(6) > 2}),
]


@pytest.fixture
def on_one_device(monkeypatch):
    """Torch's scatter and gather are for GPUs: their two kernels are replaced by those of the CPU."""

    class Scatter:
        @staticmethod
        def apply(devices, _sizes, dim, tensor):
            return tensor.chunk(len(devices), dim)

    class Gather:
        @staticmethod
        def apply(_device, dim, *tensors):
            return torch.cat([one if one.ndim else one.view(1) for one in tensors], dim)

    monkeypatch.setattr(scatter_gather, "Scatter", Scatter)
    monkeypatch.setattr(scatter_gather, "Gather", Gather)


def same(one, other):
    """Equal, container by container, of equal types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize("value", NESTINGS)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_nesting_is_split_as_torch_scatters_it(value, number):
    wanted = list(scatter_gather.scatter(value, list(range(number))))
    found = chunk(value, number)
    # A tensor of 6 rows makes 3 chunks for 4 devices; without one beside them torch repeats the rest.
    assert len(found) == min(len(wanted), len(counting(6).chunk(number)))
    assert all(map(same, found, wanted))


@pytest.mark.usefixtures("on_one_device")
@pytest.mark.parametrize(
    "value", [n for n in NESTINGS if not any(isinstance(x, str | float) for x in leaves_of(n))]
)
def test_outputs_are_joined_as_torch_gathers_them(value):
    parts = chunk(value, 2)
    assert same(join(parts), scatter_gather.gather(parts, 0))
    assert same(join(parts), value)


@pytest.mark.usefixtures("on_one_device")
def test_scalars_become_a_vector():
    parts = [{"loss": torch.tensor(1.5)}, {"loss": torch.tensor(2.5)}]
    assert same(join(parts), scatter_gather.gather(parts, 0))
    assert join(parts)["loss"].tolist() == [1.5, 2.5]


def test_tensors_of_fewer_rows_than_the_others_decide_as_in_torch():
    assert len(chunk((counting(6), counting(1)), 2)) == 1


@pytest.mark.parametrize("value", NESTINGS)
def test_a_map_keeps_all_but_the_tensors(value):
    flipped = map_tensors(lambda tensor: tensor.flip(0), value)
    assert same(map_tensors(lambda tensor: tensor.flip(0), flipped), value)
    assert not same(flipped, value)
    assert same(with_tensors(flipped, tensors_of(value)), value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None"),
        (3, "an int"),
        ("x", "a str"),
        (torch.zeros(2, 3), "a tensor of shape (2, 3)"),
        ({"ids": torch.zeros(2), "n": 1}, "{'ids': a tensor of shape (2,), 'n': an int}"),
        ([0] * 9, "[an int, an int, an int, an int, …]"),
        ((), "()"),
        (Attributes(), "an Attributes"),
    ],
)
def test_a_value_is_described_in_words(value, said):
    assert describe(value) == said

"""Batches of every source and nesting, copied ahead on a stream of their own where it pays."""

from collections import OrderedDict
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from made import planned, resolved
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import scatter_gather

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.proof.making import Maker
from ddp_bench.bench.worker import held_case
from ddp_bench.models.data import Share, open_source
from ddp_bench.models.nested import (
    describe,
    join,
    list_leaves,
    split_rows,
    split_tensors,
)
from ddp_bench.models.registry import make_resnet_workload
from ddp_bench.models.workload import Workload

CPU = torch.device("cpu")
WORKLOAD = make_resnet_workload("resnet20", 8)


def opened(data, workload=WORKLOAD, **more):
    return open_source(workload, data, Share(**{"batch_size": 4} | more))


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


@pytest.mark.parametrize("data", ["device", "host"])
def test_a_ranks_batch_depends_on_its_seed_and_rank_only_and_leaves_the_random_state_alone(data):
    """Neighbouring seeds and ranks share none."""
    before = torch.get_rng_state()
    each = [{"rank": rank, "seed": seed} for rank in range(3) for seed in (-1, 0, 1)]
    assert len({opened(data, **given).get_batch()[0].sum().item() for given in each}) == 9
    two, eight = (opened(data, rank=1, world_size=number).get_batch() for number in (2, 8))
    assert same(two, eight)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_folder_needs_a_workload_with_an_image_size():
    rows = Workload(name="rows", module=lambda: nn.Linear(1, 1), batch=lambda n, _: (torch.zeros(n, 1),) * 2)
    with pytest.raises(UsageError, match="rows sets no image_size; set it, or use `device` or `host`"):
        opened(".", rows)


def shared_by(settings):
    """What cases share on rank 0."""
    place, prover = SimpleNamespace(rank=0, device=CPU), SimpleNamespace(maker=Maker(WORKLOAD, 0, CPU))
    return held_case.Shared(place=place, settings=settings, clock=None, prover=prover)


def named(size, generator):
    ids = torch.randint(9, (size, 4), generator=generator)
    return {"ids": ids, "more": [ids > 3, None], "scale": 2.0}


@pytest.mark.parametrize("data", ["device", "host"])
def test_cases_of_one_size_share_their_batches(data):
    """Those of eight GPUs held 4 GiB of equal ones on the first, with `host` 41 GiB of pinned memory."""
    settings = resolved(data=data, arch="resnet20", batch_size=2, gpus=(1, 2, 4))
    shared = shared_by(settings)
    cases = [one.case for one in planned(settings, image_size=8)]
    sources = [held_case.open_case_source(case, shared) for case in cases]
    assert (
        len(sources)
        > len(shared.drawn)
        == len({case.global_batch for case in cases if case.mode == "dp"} | {2})
    )
    ddp = [source for source, case in zip(sources, cases, strict=True) if case.mode == "ddp"]
    held = [{tensor.data_ptr() for tensor in source.held} for source in ddp]
    assert held == held[:1] * len(held)
    assert bool(held[0]) is (data == "device"), "of host memory nothing stays on the device"


def test_a_batch_on_the_device_that_a_loss_changes_is_a_new_one_in_every_step():
    made = Workload(name="own", module=torch.nn.Identity, batch=named, batch_loss=lambda model, _: model(0))
    source, seen = opened("device", made, batch_size=3), []
    for _ in range(4):
        batch = source.get_batch()
        seen.append(batch["ids"].clone())
        batch["ids"].add_(1)
        del batch["scale"]
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_lists_of_an_entry_a_row_are_cut_with_the_tensors():
    batch = {"x": torch.arange(5), "texts": list("abcde"), "pair": [1, 2], "more": ({"ids": list("vwxyz")},)}
    parts = split_rows(batch, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["texts"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [part["more"][0]["ids"] for part in parts] == [["v", "w", "x"], ["y", "z"]]
    assert all(part["pair"] == [1, 2] for part in parts)


def test_a_batch_of_any_nesting_comes_from_each_source():
    made = Workload(name="own", module=torch.nn.Identity, batch=named, batch_loss=lambda model, _: model(0))
    sources = {data: opened(data, made, batch_size=3) for data in ("device", "host")}
    first = {data: source.get_batch() for data, source in sources.items()}
    for batch in first.values():
        assert batch["ids"].shape == (3, 4)
        assert torch.equal(batch["more"][0], batch["ids"] > 3)
        assert (batch["more"][1], batch["scale"]) == (None, 2.0)
    assert torch.equal(first["device"]["ids"], first["host"]["ids"])
    again = [sources["device"].get_batch() for _ in range(2)]
    assert again[0]["ids"].data_ptr() == again[1]["ids"].data_ptr(), "it stays where it is"
    assert again[0] is not again[1], "in containers of its own"
    other, *_, copied = [sources["host"].get_batch() for _ in range(4)]
    assert not torch.equal(other["ids"], first["host"]["ids"])
    assert torch.equal(copied["ids"], first["host"]["ids"]), "the pool of four begins again"
    assert copied["more"][0].data_ptr() != first["host"]["more"][0].data_ptr(), "every tensor is a copy"
    sized = replace(made, image_size=8)
    with pytest.raises(UsageError, match=r"a folder gives \(images, classes\), two tensors, and `batch` of"):
        opened(".", sized)


@pytest.fixture
def folder(tmp_path):
    for red in range(12):
        Image.new("RGB", (9, 9), (20 * red, 0, 0)).save(tmp_path / f"{red:02}.png")
    return tmp_path


def test_a_corrupt_image_ends_the_step_that_would_train_on_it(folder):
    (folder / "05.png").write_text("no image")

    source, seen = opened(str(folder), batch_size=2), []
    with pytest.raises(UsageError, match=r"05\.png"):
        seen.extend(source.get_batch() for _ in range(7))
    assert 0 < len(seen) < 6


# Any nesting, held against torch's own scatter and gather.


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


class Scatter:
    @staticmethod
    def apply(devices, _sizes, dim, tensor):
        return tensor.chunk(len(devices), dim)


class Gather:
    @staticmethod
    def apply(_device, dim, *tensors):
        return torch.cat([one if one.ndim else one.view(1) for one in tensors], dim)


def on_cpu(function):
    """Copy torch's scatter or gather, which are for GPUs: the copy sees kernels of the CPU."""
    names = vars(scatter_gather) | {"Scatter": Scatter, "Gather": Gather}
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


@pytest.mark.parametrize("value", NESTINGS)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_nesting_is_split_as_torch_scatters_it(value, number):
    wanted = list(on_cpu(scatter_gather.scatter)(value, list(range(number))))
    found = split_tensors(value, number)
    # A tensor of 6 rows makes 3 chunks for 4 devices; without one beside them torch repeats the rest.
    assert len(found) == min(len(wanted), len(counting(6).chunk(number)))
    assert all(map(same, found, wanted))


@pytest.mark.parametrize(
    "value", [n for n in NESTINGS if not any(isinstance(x, str | float) for x in list_leaves(n))]
)
def test_outputs_are_joined_as_torch_gathers_them(value):
    parts = split_tensors(value, 2)
    assert same(join(parts), on_cpu(scatter_gather.gather)(parts, 0))
    assert same(join(parts), value)


def test_tensors_of_fewer_rows_than_the_others_decide_as_in_torch():
    assert len(split_tensors((counting(6), counting(1)), 2)) == 1


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

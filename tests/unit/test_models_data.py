from dataclasses import replace

import pytest
import torch
from torch import nn

from ddp_bench.bench.errors import UsageError
from ddp_bench.models.data import open_source
from ddp_bench.models.registry import resnet_workload
from ddp_bench.models.workload import Workload

CPU = torch.device("cpu")
WORKLOAD = resnet_workload("resnet20", 8)


def _open(data, *, rank=0, world_size=1, seed=0):
    return open_source(
        WORKLOAD, data=data, batch_size=4, rank=rank, world_size=world_size, device=CPU, seed=seed
    )


def _same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_device_data_is_one_batch_that_stays():
    source = _open("device")
    inputs, targets = source.next()
    assert inputs.shape == (4, 3, 8, 8)
    assert targets.shape == (4,)
    assert source.next()[0].data_ptr() == inputs.data_ptr()
    source.close()


def test_host_data_is_a_pool_copied_every_step():
    source = _open("host")
    batches = [source.next() for _ in range(40)]
    distinct = {batch[0].sum().item() for batch in batches}
    assert 1 < len(distinct) < 40
    assert len({batch[0].data_ptr() for batch in batches}) == 40
    source.close()


def test_spoiling_a_host_batch_does_not_spoil_the_pool():
    spoiled, clean = _open("host"), _open("host")
    for _ in range(12):
        inputs, targets = spoiled.next()
        assert _same((inputs, targets), clean.next())
        inputs.fill_(float("nan"))


@pytest.mark.parametrize("data", ["device", "host"])
def test_a_ranks_batch_depends_on_seed_and_rank_only(data):
    first = _open(data, rank=1, world_size=2).next()
    assert _same(first, _open(data, rank=1, world_size=8).next())
    assert not _same(first, _open(data, rank=0, world_size=2).next())
    assert not _same(first, _open(data, rank=1, world_size=2, seed=7).next())


def test_neighbouring_seeds_and_ranks_do_not_share_batches():
    sums = {
        _open("device", rank=rank, seed=seed).next()[0].sum().item()
        for rank in range(3)
        for seed in (-1, 0, 1)
    }
    assert len(sums) == 9


def test_opening_a_source_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    _open("device")
    _open("host")
    assert torch.equal(torch.rand(1), expected)


def test_a_folder_needs_a_workload_with_an_image_size():
    rows = Workload(name="rows", module=lambda: nn.Linear(1, 1), batch=lambda n, _: (torch.zeros(n, 1),) * 2)
    with pytest.raises(UsageError, match="rows sets no image_size; set it, or use `device` or `host`"):
        open_source(rows, data=".", batch_size=1, rank=0, world_size=1, device=CPU, seed=0)


def test_a_malformed_batch_is_refused_on_opening():
    bad = Workload(
        name="bad", module=lambda: nn.Linear(1, 1), batch=lambda n, _: (torch.zeros(n + 1, 1),) * 2
    )
    with pytest.raises(UsageError, match="`batch` of workload bad returned"):
        open_source(bad, data="device", batch_size=2, rank=0, world_size=1, device=CPU, seed=0)


def named(size, generator):
    ids = torch.randint(9, (size, 4), generator=generator)
    return {"ids": ids, "more": [ids > 3, None], "scale": 2.0}


def test_a_batch_of_any_nesting_comes_from_each_source():
    made = Workload(name="own", module=torch.nn.Identity, batch=named, batch_loss=lambda model, _: model(0))
    opened = {
        data: open_source(made, data=data, batch_size=3, rank=0, world_size=1, device=CPU, seed=0)
        for data in ("device", "host")
    }
    first = {data: source.next() for data, source in opened.items()}
    for batch in first.values():
        assert batch["ids"].shape == (3, 4)
        assert torch.equal(batch["more"][0], batch["ids"] > 3)
        assert (batch["more"][1], batch["scale"]) == (None, 2.0)
    assert torch.equal(first["device"]["ids"], first["host"]["ids"])
    assert opened["device"].next() is first["device"]
    copied = [opened["host"].next() for _ in range(4)][-1]
    assert torch.equal(copied["ids"], first["host"]["ids"]), "the pool of four begins again"
    assert copied["more"][0].data_ptr() != first["host"]["more"][0].data_ptr(), "every tensor is a copy"
    sized = replace(made, image_size=8)
    with pytest.raises(UsageError, match=r"a folder gives \(images, classes\), two tensors, and `batch` of"):
        open_source(sized, data=".", batch_size=3, rank=0, world_size=1, device=CPU, seed=0)

"""Fakes stand in the place of what our modules call, and no test changes torch."""

import json
import re

import pytest
import torch
import torchvision
from commands import ROOT
from stand_ins import FOREIGN, Patch, stand_in

from ddp_bench.bench.measure import memory


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch, "zeros"),
        (torch.cuda, "synchronize"),
        (torch.distributed.distributed_c10d.Backend, "_plugins"),
        (torch.nn.parallel.DistributedDataParallel, "forward"),
        (torchvision, "models"),
    ],
)
def test_a_test_cannot_change_torch(monkeypatch, target, name):
    before = getattr(target, name)
    with pytest.raises(TypeError, match="not ours to change"):
        monkeypatch.setattr(target, name, None)
    assert getattr(target, name) is before


def test_nor_by_a_dotted_name_nor_in_a_rank(monkeypatch, ranks):
    with pytest.raises(TypeError, match=r"torch\.distributed\.barrier is not ours"):
        monkeypatch.setattr("torch.distributed.barrier", None)
    refused = """
try:
    patch.setattr(dist, "all_reduce", None)
except TypeError as error:
    report(str(error))
"""
    assert all("torch.distributed is not ours" in said for said in ranks(refused))


def test_a_fake_is_seen_by_the_module_that_it_was_given_to_alone():
    real = torch.cuda.empty_cache
    with Patch.context() as patch:
        stand_in(patch, memory, {"torch.cuda.empty_cache": list, "torch.zeros": dict})
        assert (memory.torch.cuda.empty_cache, memory.torch.zeros) == (list, dict)
        assert memory.torch.cuda.memory_stats is torch.cuda.memory_stats
        assert torch.cuda.empty_cache is real
        patch.setattr(json, "loads", None)
    assert memory.torch is torch
    assert json.loads("1") == 1


def test_no_test_goes_round_it():
    """By another library, by pytest's own class, or by an assignment to a function of torch."""
    unguarded = re.compile(
        r"pytest\.MonkeyPatch(\(|\.context)|mock\.patch(\(|\.object)"
        rf"|^\s*setattr\(({'|'.join(FOREIGN)}|dist)\b|^\s*(torch|dist)\.[\w.]+ = (?!True|False|\d|[\"'])",
        re.MULTILINE,
    )
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "test_stand_ins.py"]
    assert [path.name for path in files if unguarded.search(path.read_text())] == []

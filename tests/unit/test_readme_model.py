"""README's own model runs as it stands: loaded by its command, proven, and trained."""

import re
import shlex
import sys

import pytest
import torch
from commands import ROOT

from ddp_bench.bench.case import Case
from ddp_bench.bench.measure.timed import Trainer
from ddp_bench.bench.modes import Place, build_mode
from ddp_bench.bench.run.main import parser
from ddp_bench.bench.worker.proof import Prover
from ddp_bench.models.data import open_source
from ddp_bench.models.profile import profile_workload
from ddp_bench.models.registry import load_workload
from ddp_bench.models.workload import make_module

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## Your own model")[1].split("\n## ")[0]
CPU = torch.device("cpu")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def workload(tmp_path, monkeypatch):
    (file,) = re.findall(r"in `(\w+)\.py`", SECTION)
    (source,) = blocks("python")
    (tmp_path / f"{file}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, file, raising=False)
    (commands,) = blocks("bash")
    run, gate = map(shlex.split, commands.splitlines())
    assert run[:2] == ["ddp-bench", "run"]
    assert gate[:5] == ["ddp-bench", "gate", "--interleave", "main", "--"]
    measured = [parser().parse_args(arguments).workload for arguments in (run[2:], gate[5:])]
    assert measured[0] == measured[1]
    return load_workload(measured[0], 32)


def test_its_model_is_proven_and_trains(workload):
    case = Case(
        mode="dp",
        num_devices=2,
        arch=workload.name,
        image_size=None,
        batch_per_device=4,
        scaling="weak",
        precision="fp32",
        data="device",
        device_type="cpu",
    )
    place = Place(rank=0, local_rank=0, device=CPU, cores=(0,))
    torch.manual_seed(0)
    assert Prover(workload, make_module(workload), place, 0).prove(case, None) < 1e-12
    source = open_source(workload, data="device", batch_size=8, rank=0, world_size=1, device=CPU, seed=0)
    trainer = Trainer(case, build_mode(case, make_module(workload), place, None), workload, source)
    losses = []
    for _ in range(20):
        trainer.step()
        assert trainer._last_loss is not None
        losses.append(float(trainer._last_loss))
    trainer.close()
    assert losses[-1] < 0.9 * losses[0]


def test_its_arithmetic_is_that_of_its_layers(workload):
    """By hand: products of queries, keys and values, of attention, of the two linear layers, and the head."""
    seq, width, vocab, hidden = 64, 128, 1000, 512
    layer = 2 * seq * width * 4 * width + 2 * 2 * seq * seq * width + 2 * 2 * seq * width * hidden
    profile = profile_workload(workload)
    assert profile.forward_flops_per_image == 2 * layer + 2 * seq * width * vocab


def test_its_unit_is_a_token(workload):
    batch = workload.batch(3, torch.Generator())
    assert (workload.unit, workload.units_per_sample) == ("tokens", batch["input_ids"].shape[1])


def test_every_function_of_a_workload_is_listed_with_its_arguments():
    listed = re.findall(r"^- `(\w+)\((.*?)\)`", SECTION, re.MULTILINE)
    assert dict(listed) == {
        "module": "",
        "batch": "batch_size, generator",
        "loss": "outputs, targets",
        "batch_loss": "model, batch",
        "optimizer": "parameters",
    }

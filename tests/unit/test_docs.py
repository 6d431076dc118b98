"""The model of docs/own-model.md and the recipes of docs/recipes.md, run as they stand."""

import json
import re
import shlex
import sys

import pandas as pd
import pytest
import torch
from commands import ROOT
from held import place_of, trainer_of
from made import case_of
from real_ranks import make_prover

from ddp_bench.bench.run.main import make_parser
from ddp_bench.models.profile import profile_workload
from ddp_bench.models.registry import load_workload
from ddp_bench.models.workload import make_module

SECTION = (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def workload(tmp_path, monkeypatch):
    files = re.findall(r"in `(\w+)\.py`", SECTION)
    for file, source in zip(files, blocks("python"), strict=True):
        (tmp_path / f"{file}.py").write_text(source)
        monkeypatch.delitem(sys.modules, file, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (commands,) = blocks("bash")
    run, gate = map(shlex.split, commands.splitlines())
    assert run[:2] == ["ddp-bench", "run"]
    assert gate[:5] == ["ddp-bench", "gate", "--interleave", "main", "--"]
    measured = [make_parser().parse_args(arguments).workload for arguments in (run[2:], gate[5:])]
    assert measured[0] == measured[1]
    return load_workload(measured[0], 32)


@pytest.mark.usefixtures("workload")
def test_a_function_that_returns_a_module_is_a_workload_of_images():
    (named,) = re.findall(r"`ddp-bench run --workload (\S+)`", SECTION)
    assert load_workload(named, 32).image_size == 32
    assert make_module(load_workload(named, 32))(torch.zeros(2, 3, 32, 32)).shape == (2, 1000)


def test_its_model_is_proven_and_trains(workload):
    case = case_of(mode="dp", arch=workload.name)
    torch.manual_seed(0)
    assert make_prover(workload, place_of(), 0).prove(case, None).error < 1e-12
    trainer = trainer_of(case, workload, place_of())
    losses = []
    for _ in range(20):
        trainer.step()
        assert trainer._last_loss is not None
        losses.append(float(trainer._last_loss))
    trainer.close()
    assert losses[-1] < 0.9 * losses[0]


def test_its_unit_is_a_token_and_its_arithmetic_that_of_its_layers(workload):
    """By hand: products of queries, keys and values, of attention, of the two linear layers, and the head."""
    seq, width, vocab, hidden = 64, 128, 1000, 512
    layer = 2 * seq * width * 4 * width + 2 * 2 * seq * seq * width + 2 * 2 * seq * width * hidden
    profile = profile_workload(workload)
    assert profile.forward_flops_per_image == 2 * layer + 2 * seq * width * vocab
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


SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"<!-- recipe: ([\w ]+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))

WANDB = """
import contextlib, json
from pathlib import Path

class Run:
    def __init__(self):
        self.summary = {}
    def log_artifact(self, path, *, type):
        self.files = sorted(one.name for one in Path(path).iterdir())

@contextlib.contextmanager
def init(*, project, config):
    run = Run()
    yield run
    done = {"project": project, "config": config, "summary": run.summary, "files": run.files}
    Path("sent.json").write_text(json.dumps(done))
"""
"""Writes down what a recipe sends: the real package is large, and starts a process of its own."""


def images_per_s():
    """By case, read without the suite."""
    cases = pd.read_csv(SAMPLE / "cases.csv").dropna(subset=["images_per_s"])
    return dict(zip(cases["case_id"], cases["images_per_s"], strict=True))


@pytest.fixture
def execute(tmp_path, monkeypatch, capsys):
    """Runs a recipe in a folder where `results` is the repository's and modules are found."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)

    def output(name):
        exec(compile(RECIPES[name], name, "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return output


def test_every_block_that_does_something_is_a_recipe():
    assert set(RECIPES) == {"compare", "plot", "several runs", "wandb", "mlflow"}
    assert PAGE.count("```python") == len(RECIPES) + 1, "but for the first, which the others begin with"


def test_two_runs_are_compared(execute):
    said = execute("compare")
    assert "speedup" in said
    assert said.splitlines()[-1].startswith(
        ("Regression: ", "Missing: ", "Undecided: ", "Pass, no regression: ")
    )


def test_a_plot_is_drawn(execute, tmp_path):
    execute("plot")
    assert (tmp_path / "caps.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_make_one_table(execute):
    head, *rows = execute("several runs").splitlines()
    assert head.split()[1:] == ["1gbit", "2gbit"]
    assert any(row.startswith("25 ") for row in rows)


def test_upload_to_weights_and_biases(execute, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    execute("wandb")
    sent = json.loads((tmp_path / "sent.json").read_text())
    assert sent["project"] == "ddp-bench"
    assert sent["config"]["arch"] == "resnet18"
    assert sent["summary"] == pytest.approx(images_per_s())
    assert "cases.csv" in sent["files"]


@pytest.mark.campaign
def test_upload_to_mlflow(execute, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    execute("mlflow")
    (run,) = (path.parent for path in (tmp_path / "mlruns" / "0").glob("*/meta.yaml"))
    # A metric's file holds a line per value: time, value, step.
    written = {path.name: float(path.read_text().split()[1]) for path in (run / "metrics").iterdir()}
    assert written == pytest.approx(images_per_s())
    assert (run / "params" / "arch").read_text() == "resnet18"
    assert (run / "artifacts" / "cases.csv").read_bytes() == (SAMPLE / "cases.csv").read_bytes()


NAMED = re.compile(r"(?<![-\w.])(?<!-m )bench\.(?:run|tune|gate|predict|doctor|watch|lab|export)\b")


def test_pages_name_commands_in_the_form_that_readers_type():
    pages = sorted((ROOT / "docs").glob("*.md"))
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *pages):
        assert not NAMED.findall(path.read_text(encoding="utf-8")), path.name

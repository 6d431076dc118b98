"""The recipes of docs/recipes.md, run as they stand on the page against the recorded samples."""

import json
import os
import re
import subprocess
import sys

import pandas as pd
import pytest
from commands import ROOT

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


def execute(name, folder, **env):
    """Run a recipe in `folder`, where `results` is the repository's; its output."""
    (folder / "results").symlink_to(ROOT / "results")
    known = {"MPLBACKEND": "agg", "PYTHONPATH": f"{folder}:{ROOT}", **env}
    done = subprocess.run(
        [sys.executable, "-c", RECIPES[name]],
        cwd=folder,
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_block_that_does_something_is_a_recipe():
    assert set(RECIPES) == {"compare", "plot", "several runs", "wandb", "mlflow"}
    assert PAGE.count("```python") == len(RECIPES) + 1, "but for the first, which the others begin with"


def test_two_runs_are_compared(tmp_path):
    said = execute("compare", tmp_path)
    assert "speedup" in said
    assert said.splitlines()[-1].startswith("regression: ") or "pass: " in said


def test_a_plot_is_drawn(tmp_path):
    execute("plot", tmp_path)
    assert (tmp_path / "caps.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_make_one_table(tmp_path):
    head, *rows = execute("several runs", tmp_path).splitlines()
    assert head.split()[1:] == ["1gbit", "200mbit", "2gbit", "4gbit"]
    assert any(row.startswith("25 ") for row in rows)


def test_upload_to_weights_and_biases(tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    execute("wandb", tmp_path)
    sent = json.loads((tmp_path / "sent.json").read_text())
    assert sent["project"] == "ddp-bench"
    assert sent["config"]["arch"] == "resnet18"
    assert sent["summary"] == pytest.approx(images_per_s())
    assert "cases.csv" in sent["files"]


@pytest.mark.campaign
def test_upload_to_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    store = {"MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    execute("mlflow", tmp_path, **store)
    (run,) = (path.parent for path in (tmp_path / "mlruns" / "0").glob("*/meta.yaml"))
    # A metric's file holds a line per value: time, value, step.
    written = {path.name: float(path.read_text().split()[1]) for path in (run / "metrics").iterdir()}
    assert written == pytest.approx(images_per_s())
    assert (run / "params" / "arch").read_text() == "resnet18"
    assert (run / "artifacts" / "cases.csv").read_bytes() == (SAMPLE / "cases.csv").read_bytes()

"""A team's own project, by the real command: packages with our names, a transformer, its unit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from commands import ROOT
from own_models import TRANSFORMER, are_proven
from own_names import OURS, project_with

from ddp_bench.bench.package import own_command
from ddp_bench.bench.results.store import load_run

OWN_PACKAGES = """
import dataclasses
import bench, models, report
from models.layers import activation
assert bench.OWN and models.OWN and report.OWN
"""

WITHIN_A_STEP = """
class Own(Transformer):
    def forward(self, *arguments, **named):
        import bench, models, report
        from models.layers import activation
        assert bench.OWN and models.OWN and report.OWN
        return super().forward(*arguments, **named)


own = dataclasses.replace(transformer, module=Own)
"""


class Done(NamedTuple):
    project: Path
    run: Path
    said: str
    cases: pd.DataFrame


def finished(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        own_command(*command), cwd=project, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("own")
    project = project_with(OURS, folder / "project")
    (project / "own.py").write_text(OWN_PACKAGES + TRANSFORMER + WITHIN_A_STEP)
    ended = finished(
        project,
        *("run", "--workload", "own:own", "--device", "cpu", "--gpus", "2", "--batch-size", "4"),
        *("--modes", "dp,ddp,fsdp,pipeline", "--data", "host", "--accumulate", "2", "--rounds", "1"),
        *("--steps", "1", "--bucket-cap-mb", "default", "--out", str(folder / "run")),
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return Done(project, folder / "run", ended.stdout, load_run(folder / "run").cases)


def test_a_batch_of_names_and_a_mask_is_proven_in_every_mode_and_pass(done: Done) -> None:
    split = done.cases[done.cases["mode"] == "pipeline"]
    assert split["reason"].str.contains("has batch_loss, which calls the whole model").all()
    cases = done.cases.drop(split.index)
    are_proven(cases, {"single", "dp", "ddp", "fsdp"})
    assert (cases.loc[cases["mode"] == "dp", ["dp_scatter_ms", "dp_gather_ms"]] > 0).all(axis=None)


def test_it_counts_what_its_workload_says(done: Done) -> None:
    assert "tokens/s (95%)" in done.said
    assert "4 samples of 12 tokens per device" in done.said
    assert "image" not in done.said
    cases = done.cases[done.cases["status"] == "ok"].set_index("mode")
    assert set(cases["unit"]) == {"tokens"}
    assert cases["global_batch"].to_dict() == {"single": 4, "dp": 8, "ddp": 16, "fsdp": 8}
    for _, row in cases.iterrows():
        assert row["images_per_s"] == pytest.approx(row["global_batch"] * 12 * 1000 / row["step_ms"])


def test_its_packages_are_trained_and_our_page_is_written(done: Done) -> None:
    assert "<html" in (done.run / "report.html").read_text()
    command = json.loads((done.run / "manifest.json").read_text())["command"]
    assert command.count("--out") == 1
    page = done.run.parent / "page.html"
    assert finished(done.project, "report", str(done.run), "--out", str(page)).returncode == 0
    assert page.exists()

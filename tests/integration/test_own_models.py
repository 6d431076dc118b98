"""A team's own model in every mode, by the real command, with both proofs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from commands import bench_run
from own_models import TRANSFORMER, are_proven

from ddp_bench.bench.results.store import load_run

OWN = """
import torch
from torch import nn
from torch.nn import functional

from ddp_bench import Workload

def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def rows(batch_size, generator):
    return torch.randn(batch_size, 6, generator=generator), torch.randn(batch_size, 2, generator=generator)


def adam(parameters):
    weights = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": weights, "name": "weights"}, {"params": others, "name": "others", "lr": 1e-3}]
    return torch.optim.Adam(groups, lr=1e-2)


mlp = Workload(
    name="mlp",
    module=lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)),
    batch=rows,
    loss=functional.mse_loss,
    optimizer=adam,
)
"""


def cases_of(folder: Path, name: str, *settings: str) -> pd.DataFrame:
    (folder / "own.py").write_text(OWN + TRANSFORMER)
    done = bench_run(
        *("--workload", f"own:{name}", "--device", "cpu", "--gpus", "2", "--batch-size", "4"),
        *(
            "--rounds",
            "1",
            "--steps",
            "1",
            "--bucket-cap-mb",
            "default",
            "--out",
            str(folder / "run"),
            *settings,
        ),
        env={"PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_run(folder / "run").cases


@pytest.mark.campaign
def test_a_cnn_of_a_callable(tmp_path: Path) -> None:
    cases = cases_of(tmp_path, "cnn", "--modes", "dp,ddp,fsdp", "--image-size", "8", "--passes", "none")
    are_proven(cases, {"single", "dp", "ddp", "fsdp"})


@pytest.mark.campaign
@pytest.mark.smoke
def test_an_mlp_with_named_groups_of_adam_in_every_form(tmp_path: Path) -> None:
    """Its second group would be empty if the parameters could be gone through but once."""
    modes = ("--modes", "dp,ddp,fsdp,pipeline,partition", "--zero-optimizer", "off,on")
    cases = cases_of(tmp_path, "mlp", *modes, "--fused-optimizer", "on")
    are_proven(cases, {"single", "dp", "ddp", "fsdp", "pipeline", "partition"})
    two = cases[cases["mode"] != "single"]
    assert set(two["global_batch"]) == {8}
    assert set(two.loc[two["layers_by_device"].notna(), "mode"]) == {"partition", "pipeline"}
    assert cases.set_index("mode").loc["partition", "bubble_of_stages_pct"] == pytest.approx(50)
    ranks = load_run(tmp_path / "run").blocks.groupby("case_id")["rank"].nunique()[two["case_id"]]
    assert [*ranks] == [1 if mode == "dp" else 2 for mode in two["mode"]]
    assert "Forms of parallel training" in (tmp_path / "run/report.html").read_text()


@pytest.mark.campaign
def test_a_transformer_compiled(tmp_path: Path) -> None:
    settings = ("--modes", "single", "--compile", "off,on", "--passes", "none")
    cases = cases_of(tmp_path, "transformer", *settings)
    assert cases["compile"].tolist() == ["off", "default"]
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert (cases["gradient_error"] < 1e-9).all()
    assert (cases["update_error"] < 1e-2).all(), "the compiler rounds in another order"

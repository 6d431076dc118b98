"""A team's own model in every mode, by the real command, with both proofs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from commands import bench_run

from bench.results.store import load_run

OWN = """
import torch
from torch import nn
from torch.nn import functional

from models import Workload

SIZE, VOCAB, SEQ, WIDTH = 8, 50, 12, 16


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


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask, scale=1.0):
        hidden = self.blocks(self.words(input_ids) * scale, src_key_padding_mask=~attention_mask)
        return {"logits": self.head(hidden), "hidden": [hidden, None]}


def sentences(batch_size, generator):
    ids = torch.randint(VOCAB, (batch_size, SEQ), generator=generator)
    lengths = torch.randint(SEQ // 2, SEQ + 1, (batch_size, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.arange(SEQ) < lengths, "labels": ids, "scale": 2.0}


def of_tokens(model, batch):
    named = {name: batch[name] for name in ("attention_mask", "scale")}
    logits = model(batch["input_ids"], **named)["logits"]
    losses = functional.cross_entropy(logits.mT, batch["labels"], reduction="none")
    mask = batch["attention_mask"]
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


transformer = Workload(
    name="transformer",
    module=Transformer,
    batch=sentences,
    batch_loss=of_tokens,
    optimizer=torch.optim.AdamW,
)
"""


def cases_of(folder: Path, name: str, *settings: str) -> pd.DataFrame:
    (folder / "own.py").write_text(OWN)
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


def are_proven(cases: pd.DataFrame, modes: set[str]) -> None:
    assert set(cases["mode"]) == modes
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert (cases["gradient_error"] < 1e-9).all()
    assert (cases["update_error"] < 1e-3).all()


@pytest.mark.campaign
def test_a_cnn_of_a_callable(tmp_path: Path) -> None:
    cases = cases_of(tmp_path, "cnn", "--modes", "dp,ddp,fsdp", "--image-size", "8", "--passes", "none")
    are_proven(cases, {"single", "dp", "ddp", "fsdp"})


def test_an_mlp_with_named_groups_of_adam_in_every_mode(tmp_path: Path) -> None:
    """Its second group would be empty if the parameters could be gone through but once."""
    modes = ("--modes", "dp,ddp,fsdp,pipeline,partition", "--zero-optimizer", "off,on")
    cases = cases_of(tmp_path, "mlp", *modes, "--fused-optimizer", "on", "--passes", "none")
    are_proven(cases, {"single", "dp", "ddp", "fsdp", "pipeline", "partition"})


def test_a_transformer_with_a_batch_of_names_and_a_mask_in_every_pass(tmp_path: Path) -> None:
    modes = ("--modes", "dp,ddp,fsdp,pipeline")
    cases = cases_of(tmp_path, "transformer", *modes, "--data", "host", "--accumulate", "2")
    split = cases[cases["mode"] == "pipeline"]
    assert split["reason"].str.contains("has batch_loss, which calls the whole model").all()
    are_proven(cases.drop(split.index), {"single", "dp", "ddp", "fsdp"})
    assert (cases.loc[cases["mode"] == "dp", ["dp_scatter_ms", "dp_gather_ms"]] > 0).all(axis=None)


@pytest.mark.campaign
def test_a_transformer_compiled(tmp_path: Path) -> None:
    settings = ("--modes", "single", "--compile", "off,on", "--passes", "none")
    cases = cases_of(tmp_path, "transformer", *settings)
    assert cases["compile"].tolist() == ["off", "default"]
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert (cases["gradient_error"] < 1e-9).all()
    assert (cases["update_error"] < 1e-2).all(), "the compiler rounds in another order"

"""A user's project: packages that are called as ours are, workloads that import them, a transformer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

OURS = ("bench", "models", "report")
"""Folders of ours whose names a project may have too."""

NET = """
import {names}
from models.net import Net
def model():
    return Net()
"""
MODELS = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from models import layers
        self.first, self.last = torch.nn.Linear(48, layers.WIDTH), torch.nn.Linear(layers.WIDTH, 4)
    def forward(self, images):
        import {names}
        from models.layers import activation
        assert {own}
        return self.last(activation(self.first(images.flatten(1))))
"""
LAYERS = """
import torch
WIDTH = 16
activation = torch.relu
"""
SMALL = (
    *("--workload", "net:model", "--image-size", "4", "--batch-size", "8", "--device", "cpu", "--steps", "1"),
)


def project_with(names: Sequence[str], folder: Path) -> Path:
    """Make the project; its packages `names` have the attribute OWN, and are imported in every forward."""
    fields = {"names": ", ".join(names), "own": " and ".join(f"{name}.OWN" for name in names)}
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("OWN = True\n")
    (folder / "models/net.py").write_text(MODELS.format(**fields))
    (folder / "models/layers.py").write_text(LAYERS)
    (folder / "net.py").write_text(NET.format(**fields))
    return folder


TRANSFORMER = """
import torch
from torch import nn
from torch.nn import functional

from ddp_bench import Workload

VOCAB, SEQ, WIDTH = 50, 12, 16


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
    unit="tokens",
    units_per_sample=SEQ,
)
"""


def are_proven(cases: pd.DataFrame, modes: set[str]) -> None:
    """Every mode was measured after both proofs."""
    assert set(cases["mode"]) == modes
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert (cases["gradient_error"] < 1e-9).all()
    assert (cases["update_error"] < 1e-3).all()

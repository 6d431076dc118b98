"""A language model that counts tokens, measured on two ranks: its unit in the files and on the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import bench_run

from bench.results.store import load_run

LANGUAGE_MODEL = """
import torch
from torch import nn
from models import Workload

def model():
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

def batch(batch_size, generator):
    rows = torch.randint(50, (batch_size, 33), generator=generator)
    return rows[:, :-1], rows[:, 1:]

def loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

workload = Workload(name="lm", module=model, batch=batch, loss=loss, unit="tokens", units_per_sample=32)
"""


def test_a_run_counts_what_its_workload_says(tmp_path: Path) -> None:
    (tmp_path / "own_lm.py").write_text(LANGUAGE_MODEL, encoding="utf-8")
    done = bench_run(
        *("--workload", "own_lm:workload", "--batch-size", "4", "--device", "cpu", "--modes", "ddp"),
        *("--gpus", "2", "--rounds", "1", "--passes", "none", "--bucket-cap-mb", "default"),
        *("--out", str(tmp_path / "run")),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s (95%)" in done.stdout
    assert "4 samples of 32 tokens per device" in done.stdout
    assert "image" not in done.stdout
    cases = load_run(tmp_path / "run").cases.set_index("mode")
    assert cases["unit"].tolist() == ["tokens", "tokens"]
    assert cases["global_batch"].to_dict() == {"single": 4, "ddp": 8}
    for mode, num_tokens in (("single", 4 * 32), ("ddp", 2 * 4 * 32)):
        row = cases.loc[mode]
        assert row["images_per_s"] == pytest.approx(num_tokens * 1000 / row["step_ms"])

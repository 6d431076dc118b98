"""Projects of users: a git repository whose second commit is slower; packages that have our names.

And sides of a gate that run something else.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ddp_bench.bench.gate.checkouts import Checkout

NET = """
import torch
PRODUCTS = {products}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3 * 8 * 8, 4)
        self.factor = torch.full((64, 64), 1 / 64)
    def forward(self, images):
        with torch.no_grad():
            for _ in range(PRODUCTS):
                self.factor = self.factor @ self.factor
        return self.linear(images.flatten(1))
def make(): return Net()
"""
"""Nearly all of its step is matrix products, so that twice as many take twice as long on any machine.

They are small: a step of a few milliseconds is often done before a busy machine gives the core to another.
"""

RUN = (
    *("--image-size", "8", "--batch-size", "2", "--device", "cpu", "--modes", "single", "--gpus", "1"),
    *("--passes", "none", "--steps", "1"),
)


def git(folder, *arguments):
    """Git, as nobody in particular and without anybody's settings."""
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.check_output(["git", *who, *arguments], cwd=folder, text=True).strip()


@functools.cache
def empty_repository():
    """A repository without a commit, to be copied: made once a process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    return folder


def commit(folder, files):
    """Write these files into a repository, made where there is none, and commit them; the commit."""
    if not (folder / ".git").exists():
        shutil.copytree(empty_repository(), folder, dirs_exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")
    head = (folder / ".git" / "HEAD").read_text().strip()
    return (folder / ".git" / head.removeprefix("ref: ")).read_text().strip() if "ref: " in head else head


OURS = ("bench", "models", "report")
"""Folders of ours whose names a project may have too."""

ITS_OWN = """
        import bench, models, report
        from models.layers import activation
        assert bench.OWN and models.OWN and report.OWN"""
OWN_NET = f"""
import bench, models, report
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from models import layers
        self.first, self.last = torch.nn.Linear(48, layers.WIDTH), torch.nn.Linear(layers.WIDTH, 4)
    def forward(self, images):{ITS_OWN}
        return self.last(activation(self.first(images.flatten(1))))
def model():
    return Net()
"""
TRANSFORMER = f"""
import torch
from torch import nn
from torch.nn import functional

from ddp_bench import Workload

print("what a user's module prints")
VOCAB, SEQ, WIDTH = 50, 12, 16


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask, scale=1.0):{ITS_OWN}
        print("what a user's model prints")
        hidden = self.blocks(self.words(input_ids) * scale, src_key_padding_mask=~attention_mask)
        return {{"logits": self.head(hidden), "hidden": [hidden, None]}}


def sentences(batch_size, generator):
    ids = torch.randint(VOCAB, (batch_size, SEQ), generator=generator)
    lengths = torch.randint(SEQ // 2, SEQ + 1, (batch_size, 1), generator=generator)
    return {{"input_ids": ids, "attention_mask": torch.arange(SEQ) < lengths, "labels": ids, "scale": 2.0}}


def of_tokens(model, batch):
    named = {{name: batch[name] for name in ("attention_mask", "scale")}}
    logits = model(batch["input_ids"], **named)["logits"]
    losses = functional.cross_entropy(logits.mT, batch["labels"], reduction="none")
    mask = batch["attention_mask"]
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def adam(parameters):
    weights = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]  # none, if they could be gone through but once
    groups = [{{"params": weights, "name": "weights"}}, {{"params": others, "name": "others", "lr": 1e-3}}]
    return torch.optim.AdamW(groups, lr=1e-2)


transformer = Workload(
    name="transformer",
    module=Transformer,
    batch=sentences,
    batch_loss=of_tokens,
    optimizer=adam,
    unit="tokens",
    units_per_sample=SEQ,
)
"""


def project_in(folder):
    """A project whose packages have our names and the attribute OWN, and are imported in every forward."""
    for name in OURS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("OWN = True\n")
    (folder / "models/layers.py").write_text("import torch\nWIDTH, activation = 16, torch.relu\n")
    (folder / "net.py").write_text(OWN_NET)
    (folder / "tokens.py").write_text(TRANSFORMER)
    return folder


def start_instead(monkeypatch, **code):
    """Have each side run this Python in place of its run; by side the arguments and variables it had."""
    started = {}

    def start(checkout, arguments, log, _environment, output=None):
        started[checkout.name] = arguments, checkout.environment
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr, Path(output or os.devnull).open("w") as stdout:
            words = [sys.executable, "-c", code[checkout.name]]
            return subprocess.Popen(words, stderr=stderr, stdout=stdout, text=True)

    monkeypatch.setattr(Checkout, "start", start)
    return started

"""A user's project with packages that are called as ours are, and a workload that imports them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    "--workload",
    "net:model",
    "--image-size",
    "4",
    "--batch-size",
    "8",
    "--device",
    "cpu",
    "--steps",
    "1",
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

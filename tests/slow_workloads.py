"""Workloads of which one thing is slow on purpose."""

import os
import time

import numpy as np
import torch
from PIL import Image
from torch import nn


class Small(nn.Module):
    """Images of 8 by 8 pixels to four classes."""

    def __init__(self):
        super().__init__()
        self.only = nn.Linear(3 * 8 * 8, 4)

    def forward(self, x):
        return self.only(x.flatten(1))


class Buffers(Small):
    """24 MB of them in 60 parts, which every forward of DDP broadcasts."""

    def __init__(self):
        super().__init__()
        for i in range(60):
            self.register_buffer(f"held{i}", torch.zeros(100_000))


class LateRank(Small):
    """The second rank takes 30 ms longer."""

    def forward(self, x):
        if os.environ.get("RANK") == "1":
            time.sleep(0.03)
        return super().forward(x)


class ManyParameters(Small):
    """3,000 more parameters of one number: DDP's host is at work on each of them."""

    def __init__(self):
        super().__init__()
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(3000))

    def forward(self, x):
        return super().forward(x) + torch.cat(list(self.more)).sum()


def pictures(folder):
    """Fill a folder of one class with large pictures, which take long to decode."""
    place = folder / "images" / "one"
    place.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 255, (1500, 1500, 3), dtype=np.uint8)
    for i in range(16):
        Image.fromarray(noise).save(place / f"{i}.jpg")
    return place.parent


def causes_of(run):
    """What a run says could be saved, the most first."""
    from ddp_bench.bench.findings.findings import conclude_run

    step = conclude_run(run).step
    return [saving.what for saving in step.savings] if step else []

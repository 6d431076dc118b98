"""A user's workload that does deeds while it trains."""

from __future__ import annotations

import time
from typing import Any

import deeds
import torch
from deeds import strike
from torch import Tensor

deeds.born_s = time.time()


class Model(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0
        if torch.is_grad_enabled() and x.dtype == torch.float32:
            factor = strike("forward") or 1.0
        return super().forward(x.flatten(1)) * factor


def model() -> Model:
    return Model(3 * 8 * 8, 4)


class StrikeInBackward(torch.autograd.Function):
    """Passes everything on; before the gradients of `layer` it strikes as `backward {layer}`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if gradient.dtype == torch.float32:
            strike(f"backward {ctx.layer}")
        return gradient, None


class Deep(torch.nn.Sequential):
    """Layers of 16 KiB and more."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(n, 64, bias=False) for n in (3 * 8 * 8, 64, 64, 64, 64)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i, layer in enumerate(self):
            x = StrikeInBackward.apply(layer(x), i)
        return x


def deep() -> Deep:
    return Deep()

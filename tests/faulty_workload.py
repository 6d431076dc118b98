"""A user's workload that does deeds while it trains."""

import time

import deeds
import torch
from deeds import strike

from ddp_bench.bench.proof.inputs import MIN_ROWS

deeds.born_s = time.time()


class Model(torch.nn.Linear):
    def forward(self, x):
        factor = 1.0
        # Of fewer rows is the batch on which the proof has a model settle: what it raises there is no fault.
        if torch.is_grad_enabled() and x.dtype == torch.float32 and len(x) > MIN_ROWS:
            factor = strike("forward") or 1.0
        return super().forward(x.flatten(1)) * factor


def model():
    return Model(3 * 8 * 8, 4)


class StrikeInBackward(torch.autograd.Function):
    """Passes everything on; before the gradients of `layer` it strikes as `backward {layer}`."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if gradient.dtype == torch.float32:
            strike(f"backward {ctx.layer}")
        return gradient, None


class Deep(torch.nn.Sequential):
    """Layers of 16 KiB and more."""

    def __init__(self):
        super().__init__(*(torch.nn.Linear(n, 64, bias=False) for n in (3 * 8 * 8, 64, 64, 64, 64)))

    def forward(self, x):
        x = x.flatten(1)
        for i, layer in enumerate(self):
            x = StrikeInBackward.apply(layer(x), i)
        return x


def deep():
    return Deep()

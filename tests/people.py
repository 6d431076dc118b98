"""Workloads of the kinds that people bring: each trains in plain PyTorch, and is a difficulty of its own."""

import os
import random
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from ddp_bench import Workload

WIDTH = 6


def rows(n, generator):
    return torch.randn(n, WIDTH, generator=generator), torch.randint(3, (n,), generator=generator)


def named(n, generator):
    return dict(zip(("x", "y"), rows(n, generator), strict=True))


def two_views(n, generator):
    return torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)


class Mlp(nn.Module):
    def __init__(self, out=3):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 12), nn.Linear(12, out)
        self.build()

    def build(self):
        """What else it has."""

    def hidden(self, x):
        return self.first(x).tanh()

    def forward(self, x):
        return self.last(self.hidden(x))


def classified(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def of(module, batch=rows, **more):
    return Workload(name="people", module=module, batch=batch, **more)


def noisy_loss(model, batch):
    x = batch["x"]
    return functional.mse_loss(model(x + torch.randn_like(x)), torch.rand(len(x), 3).to(x.dtype))


def mixed_up(model, batch):
    share, order = float(np.random.beta(0.4, 0.4)), torch.from_numpy(np.random.permutation(len(batch["x"])))
    out = model(share * batch["x"] + (1 - share) * batch["x"][order])
    loss, other = (functional.cross_entropy(out, y) for y in (batch["y"], batch["y"][order]))
    return share * loss + (1 - share) * other


class Skips(nn.Module):
    def forward(self, x):
        return x * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else x


class SkipsAndDrops(Mlp):
    def build(self):
        self.skips = Skips()

    def hidden(self, x):
        return functional.dropout(self.skips(super().hidden(x)), 0.2, self.training)


class LayerDrop(Mlp):
    def hidden(self, x):
        found = super().hidden(x)
        return found if random.random() < 0.5 else 2 * found


class LossInTraining(Mlp):
    def forward(self, x, y):
        out = super().forward(x)
        return {"loss": functional.cross_entropy(out, y)} if self.training else out.argmax(1)


def matched(outputs, others):
    return functional.cross_entropy(outputs @ others.mT, torch.arange(len(outputs)))


class Normed(Mlp):
    def build(self):
        self.norm = nn.BatchNorm1d(12)

    def hidden(self, x):
        return self.norm(self.first(x)).relu()


class InFloat32(Normed):
    def forward(self, x):
        return super().forward(x.float())


class Spectral(Mlp):
    def build(self):
        nn.utils.parametrizations.spectral_norm(self.first)


class Watched(Mlp):
    def build(self):
        self.first.register_forward_hook(lambda part, _, out: setattr(part, "seen", out))

    def forward(self, x):
        return super().forward(x) + self.first.seen.mean()


class HookedGradient(Mlp):
    calls = 0

    def build(self):
        self.first.weight.register_hook(self.shrunk)

    @staticmethod
    def shrunk(gradient):
        HookedGradient.calls += 1
        return gradient / 8


class Anneals(Mlp):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return super().forward(x) / self.steps


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class LosesImaginary(Waves):
    """On its second rank."""

    @staticmethod
    def lost(own):
        return torch.complex(own.real, own.imag.detach())

    def forward(self, x):
        is_second = dist.is_initialized() and dist.get_rank() == 1
        own = self.lost(self.filter) if is_second else self.filter
        return torch.fft.irfft(torch.fft.rfft(x) * own, n=WIDTH)


class LosesReal(LosesImaginary):
    @staticmethod
    def lost(own):
        return torch.complex(own.real.detach(), own.imag)


class Codebook(Mlp):
    def build(self):
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes.to(x.dtype)).argmin(1)
        found = self.codes[nearest].to(x.dtype)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, (0.1 * (x - found)).to(self.codes.dtype))
        return super().forward(x + found)


class Versioned(Mlp):
    _version = 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        assert local_metadata.get("version") == 3
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Grows(Mlp):
    def build(self):
        self.register_buffer("table", torch.empty(0))

    def forward(self, x):
        if not len(self.table):
            self.table = torch.linspace(0.5, 2.0, x.shape[1], dtype=x.dtype)
        return super().forward(x * self.table)


class WithoutBackbone(Mlp):
    def build(self):
        self.first.requires_grad_(requires_grad=False)

    def state_dict(self, *arguments, **options):
        found = super().state_dict(*arguments, **options)
        return {name: value for name, value in found.items() if not name.startswith("first")}


class Words(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.words, self.head = nn.Embedding(50, WIDTH, sparse=sparse), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


def tokens(n, generator):
    return torch.randint(50, (n, 4), generator=generator), torch.randint(3, (n,), generator=generator)


class Tied(Words):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.words.weight


class Checkpointed(Mlp):
    def hidden(self, x):
        return checkpoint(
            lambda y: functional.dropout(super(Checkpointed, self).hidden(y)), x, use_reentrant=False
        )


class Momentum(Mlp):
    """A frozen copy follows the trained layer within the forward."""

    def build(self):
        self.slow = nn.Linear(WIDTH, 12).requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.slow.weight.lerp_(self.first.weight.detach(), 0.5)
        return self.last(self.hidden(x) + self.slow(x))


class OwnGenerator(Mlp):
    def build(self):
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype))


class Entropy(Mlp):
    def forward(self, x):
        return super().forward(x * (1 + os.urandom(1)[0] / 256))


class Gathers(torch.autograd.Function):
    @staticmethod
    def forward(_, own):
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own.contiguous())
        return torch.cat(found)

    @staticmethod
    def backward(_, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def matched_over_ranks(outputs, others):
    every = Gathers.apply(others + 0 * outputs[:, :WIDTH])
    own = torch.arange(len(outputs)) + dist.get_rank() * len(outputs)
    return functional.cross_entropy(outputs @ every.mT, own)


def logged(model, batch):
    loss = classified(model, batch)
    dist.all_reduce(loss.detach().clone())
    return loss


def in_place(model, batch):
    return functional.cross_entropy(model(batch["x"].mul_(2).sub_(1)), batch.pop("y"))


def of_some_rows(model, batch):
    """A mean over rows that each rank has another number of."""
    return functional.cross_entropy(model(batch["x"]), batch["y"].masked_fill(batch["y"] == 0, -100))


class InBf16(Mlp):
    """Its weights have half the digits."""

    def build(self):
        self.to(torch.bfloat16)

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def penalised(model, batch):
    x = batch["x"].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return classified(model, batch) + slope.square().mean()


class Averages:
    """An optimizer's step hook that keeps an average of the parameters."""

    calls = 0

    def __new__(cls, parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: setattr(cls, "calls", cls.calls + 1))
        return optimizer


def clipped(parameters):
    held = [*parameters]
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(held, 0.01) and None)
    return optimizer


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(20, WIDTH, mode="sum"), nn.Linear(WIDTH, 3)

    def forward(self, flat, offsets):
        return self.head(self.bags(flat, offsets))


def in_bags(n, generator):
    lengths = torch.randint(1, 5, (n,), generator=generator)
    flat = torch.randint(20, (int(lengths.sum()),), generator=generator)
    return (flat, lengths.cumsum(0) - lengths), torch.randint(3, (n,), generator=generator)


class Graph:
    """Graphs as one, as PyTorch Geometric joins them."""

    def __init__(self, x, edge_index, batch, y):
        self.x, self.edge_index, self.batch, self.y, self.name = x, edge_index, batch, y, "a graph"


def graphs(n, generator):
    sizes = torch.randint(2, 6, (n,), generator=generator)
    nodes = int(sizes.sum())
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    owners = torch.repeat_interleave(torch.arange(n), sizes)
    return Graph(torch.randn(nodes, WIDTH, generator=generator), edges, owners, rows(n, generator)[1])


class OnGraphs(Mlp):
    def forward(self, graph):
        source, target = graph.edge_index
        nodes = self.hidden(graph.x)
        nodes = nodes.index_add(0, target, nodes[source])
        return self.last(nodes.new_zeros(len(graph.y), 12).index_add(0, graph.batch, nodes))


class Detector(Mlp):
    def forward(self, images, targets):
        found = torch.stack([super(Detector, self).forward(one.flatten()) for one in images])
        wanted = torch.stack([one["boxes"].mean(0) for one in targets]).to(found.dtype)
        return {"boxes": functional.l1_loss(found, wanted)}


def detection(n, generator):
    targets = [{"boxes": torch.rand(1 + i % 3, 3, generator=generator), "image_id": i} for i in range(n)]
    return [torch.rand(2, 3, 1, generator=generator) for _ in range(n)], targets


class Sequences(Mlp):
    def forward(self, flat, cu_seqlens):
        return super().forward(flat)[cu_seqlens[1:] - 1]


def packed(n, generator):
    ends = torch.randint(1, 5, (n,), generator=generator).cumsum(0)
    flat = torch.randn(int(ends[-1]), WIDTH, generator=generator)
    cu_seqlens = functional.pad(ends, (1, 0))
    return {"flat": flat, "cu_seqlens": cu_seqlens}, torch.randint(3, (n,), generator=generator)


def few_entries(n, generator):
    dense = torch.rand(n, WIDTH, generator=generator)
    return (dense * (dense > 0.5)).to_sparse(), torch.randint(3, (n,), generator=generator)


class OnSparse(Mlp):
    def forward(self, x):
        hidden = torch.sparse.mm(x, self.first.weight.t().to(x.dtype)) + self.first.bias
        return self.last(hidden.tanh())


def of_lengths(n, generator):
    lengths = torch.randint(1, 5, (n,), generator=generator).tolist()
    return [torch.randn(length, WIDTH, generator=generator) for length in lengths]


class OnJagged(Mlp):
    def forward(self, x):
        return super().forward(torch.stack([one.mean(0) for one in x.unbind()]))


class OnPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.GRU(WIDTH, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cells(x)[1][0])


def with_classes(make):
    return lambda n, generator: (make(of_lengths(n, generator)), torch.randint(3, (n,), generator=generator))


WITHOUT_ROWS = {
    "bags": of(Bags, in_bags),
    "graphs": of(OnGraphs, graphs, batch_loss=lambda model, g: functional.cross_entropy(model(g), g.y)),
    "images and their boxes": of(Detector, detection, batch_loss=lambda model, b: model(*b)["boxes"]),
    "packed sequences": of(Sequences, packed),
    "sparse rows": of(OnSparse, few_entries),
    "jagged rows": of(OnJagged, with_classes(partial(torch.nested.nested_tensor, layout=torch.jagged))),
    "a PackedSequence": of(OnPacked, with_classes(partial(pack_sequence, enforce_sorted=False))),
}
"""Trained by DDP, which splits nothing; of no use to `nn.DataParallel`, which scatters."""

PROVED = {
    "noise in the loss": of(Mlp, named, batch_loss=noisy_loss),
    "numpy in the loss": of(Mlp, named, batch_loss=mixed_up),
    "draws around what draws": of(SkipsAndDrops),
    "layers by Python's random": of(LayerDrop),
    "a loss in training alone": of(
        LossInTraining, named, batch_loss=lambda model, batch: model(**batch)["loss"].mean()
    ),
    "rows against each other": of(lambda: Mlp(WIDTH), two_views, loss=matched),
    "batch norm": of(Normed),
    "batch norm in float32": of(InFloat32),
    "spectral norm": of(Spectral),
    "a hook that keeps outputs": of(Watched),
    "a hook of a gradient": of(HookedGradient),
    "a hook after the step": of(Mlp, optimizer=Averages),
    "a hook before the step": of(Mlp, optimizer=clipped),
    "a counter in Python": of(Anneals),
    "complex weights": of(Waves, two_views, loss=functional.mse_loss),
    "a codebook": of(Codebook),
    "a version": of(Versioned),
    "a buffer that grows": of(Grows),
    "a partial state dict": of(WithoutBackbone),
    "sparse gradients": of(
        lambda: Words(sparse=True), tokens, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    ),
    "tied weights": of(Tied, tokens),
    "checkpoints with dropout": of(Checkpointed),
    "a follower": of(Momentum),
    "a generator of its own": of(OwnGenerator),
    "a batch changed in place": of(Mlp, named, batch_loss=in_place),
    "a collective for a log": of(Mlp, named, batch_loss=logged),
    "negatives of all ranks": of(lambda: Mlp(WIDTH), two_views, loss=matched_over_ranks),
    "rows that do not count": of(Mlp, named, batch_loss=of_some_rows),
    "a penalty on slopes": of(Mlp, named, batch_loss=penalised),
}
"""Trained by DDP as by one device."""

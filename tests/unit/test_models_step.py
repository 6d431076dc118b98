"""How a step is computed changes its speed and nothing of its result."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from ddp_bench.bench.axes import StepSettings
from ddp_bench.models.registry import resnet_workload
from ddp_bench.models.step import as_set, has_fused_optimizer, placed, takes_images
from ddp_bench.models.workload import Workload, make_batch, make_module

CPU = torch.device("cpu")
IMAGES = resnet_workload("resnet20", 32)


def trained(workload, settings, *, steps=3):
    """All weights after some steps from one start on one batch."""
    torch.manual_seed(0)
    made = as_set(workload, settings)
    module = placed(make_module(made), settings, CPU)
    inputs, targets = make_batch(made, batch_size=4, generator=torch.Generator().manual_seed(1))
    optimizer = made.optimizer(module.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        made.loss(module(inputs), targets).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


PLAIN = trained(IMAGES, StepSettings())


@pytest.mark.parametrize("settings", [{"channels_last": True}, {"fused_optimizer": True}])
def test_the_weights_are_those_of_plain_training(settings):
    found = trained(IMAGES, StepSettings(**settings))
    assert (found - PLAIN).norm() < 1e-4 * PLAIN.norm()


def test_channels_last_reaches_weights_and_images():
    made = as_set(IMAGES, StepSettings(channels_last=True))
    inputs, _ = make_batch(made, batch_size=2, generator=torch.Generator())
    convolution = next(
        m for m in make_module(made).modules() if isinstance(m, nn.Conv2d) and m.in_channels > 3
    )
    for tensor in (inputs, convolution.weight, copy.deepcopy(convolution).weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


def optimizer_of(make):
    return replace(IMAGES, optimizer=make)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: SGD(parameters, lr=0.3, momentum=0.7, weight_decay=1e-3, nesterov=True),
        lambda parameters: Adam(parameters, lr=0.3, amsgrad=True),
        lambda parameters: AdamW([{"params": list(parameters), "lr": 0.2}], lr=0.3, betas=(0.8, 0.9)),
    ],
)
def test_a_fused_optimizer_keeps_what_the_user_set(make):
    parameters = [nn.Parameter(torch.ones(3))]
    plain = make(parameters)
    fused = as_set(optimizer_of(make), StepSettings(fused_optimizer=True)).optimizer(parameters)
    assert type(fused) is type(plain)
    assert fused.param_groups == [g | {"fused": True, "foreach": False} for g in plain.param_groups]
    assert has_fused_optimizer(optimizer_of(make))


def test_an_optimizer_without_fused_kernels_is_seen():
    assert not has_fused_optimizer(optimizer_of(torch.optim.RMSprop))
    assert not has_fused_optimizer(optimizer_of(lambda _: SGD([])))


def test_images_have_four_dimensions():
    rows = replace(IMAGES, batch=lambda n, _: (torch.zeros(n, 7), torch.zeros(n, dtype=torch.long)))
    assert takes_images(IMAGES)
    assert not takes_images(rows)


def test_images_are_found_and_laid_out_wherever_a_batch_has_them():
    def named(n, _):
        return {"images": [torch.zeros(n, 3, 8, 8)], "mask": torch.ones(n, 1, 8, 8) > 0}

    made = Workload(name="own", module=nn.Identity, batch=named, batch_loss=lambda model, _: model(0))
    assert takes_images(made)
    batch = make_batch(replace(made, channels_last=True), batch_size=2, generator=torch.Generator())
    assert batch["images"][0].is_contiguous(memory_format=torch.channels_last)
    masks = replace(made, batch=lambda n, g: {"mask": named(n, g)["mask"]})
    assert not takes_images(masks)


@pytest.mark.campaign
def test_every_case_is_compiled_by_itself(monkeypatch):
    """Dynamo would run the graph of the first in all: DDP's would not be split at its buckets then."""
    graphs = []

    def backend(graph, _, *, config_patches):
        graphs.append(len(config_patches))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", backend)
    modes = ["default"] * 10 + ["reduce-overhead"]
    made = [placed(make_module(IMAGES), StepSettings(compile=mode), CPU) for mode in modes]
    for _ in range(2):
        for module in made:
            module(torch.zeros(2, 3, 32, 32)).sum().backward()
    assert len(graphs) == len(made), "each once, beyond dynamo's usual limit of 8"
    assert graphs[-1] > 0, "reduce-overhead changes the compiler's settings"

import pytest
import torch
from torch import nn

from ddp_bench.models.resnet import BasicBlock, resnet20


def test_resnet20_has_the_parameters_of_the_papers_table():
    # He et al. 2015, table 6: 20 layers, 0.27 M; option-A shortcuts have none, hence 269,722
    assert sum(param.numel() for param in resnet20().parameters()) == 269_722


def test_resnet20_has_twenty_weighted_layers():
    weighted = [module for module in resnet20().modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(weighted) == 20


@pytest.mark.parametrize("image_size", [8, 32, 33])
def test_resnet20_maps_images_of_any_size_to_ten_logits(image_size):
    assert resnet20()(torch.randn(2, 3, image_size, image_size)).shape == (2, 10)


def test_every_parameter_of_resnet20_gets_a_gradient():
    model = resnet20()
    model(torch.randn(4, 3, 32, 32)).logsumexp(dim=1).sum().backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in model.parameters())


def test_a_block_without_residual_is_its_shortcut():
    block = BasicBlock(16, 32, stride=2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 16, 5, 5)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, [0, 2, 4]][:, :, :, [0, 2, 4]])
    assert torch.equal(out[:, 16:], torch.zeros(1, 16, 3, 3))


def test_modules_follow_the_global_random_state():
    torch.manual_seed(3)
    first = resnet20().state_dict()
    torch.manual_seed(3)
    again = resnet20().state_dict()
    other = resnet20().state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["conv.weight"], other["conv.weight"])

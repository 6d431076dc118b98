import pytest
import torch
from torch import nn
from torchvision.models import get_model_weights

from ddp_bench.bench.errors import UserCodeError
from ddp_bench.models.profile import num_outputs, profile_workload
from ddp_bench.models.registry import ARCHS, UNUSED_HEAD, resnet_workload
from ddp_bench.models.workload import Workload


def _rows(batch_size, generator):
    return torch.randn(batch_size, 4, generator=generator), torch.zeros(batch_size, dtype=torch.long)


def _frozen_half():
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    module[0].requires_grad_(requires_grad=False)
    return module


def _broken():
    raise TypeError("no such layer")


class NeedsRealNumbers(nn.Module):
    """Branches on a value, which the meta device has not."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x) if x.sum().item() < float("inf") else x


class Refuses(NeedsRealNumbers):
    def forward(self, x):
        raise NotImplementedError


class Shift(nn.Module):
    """Has a parameter, and no operator that a FLOP counter knows."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in ("resnet20", UNUSED_HEAD)])
def test_sizes_and_flops_are_those_torchvision_publishes(arch):
    published = get_model_weights(arch).IMAGENET1K_V1.meta
    profile = profile_workload(resnet_workload(arch, 224))
    assert profile.num_params == published["num_params"]
    assert profile.gradient_bytes == 4 * published["num_params"]
    assert profile.forward_flops_per_image == pytest.approx(2e9 * published["_ops"], abs=1.1e6)


def test_resnet18_has_the_gradient_bytes_that_ddp_reduces():
    assert profile_workload(resnet_workload("resnet18", 64)).gradient_bytes == 46_758_048


def test_resnet20_flops_are_those_of_its_layers():
    stem = 3 * 3 * 3 * 16 * 32 * 32
    stage1 = 6 * (3 * 3 * 16 * 16 * 32 * 32)
    stage2 = 3 * 3 * 16 * 32 * 16 * 16 + 5 * (3 * 3 * 32 * 32 * 16 * 16)
    stage3 = 3 * 3 * 32 * 64 * 8 * 8 + 5 * (3 * 3 * 64 * 64 * 8 * 8)
    flops = profile_workload(resnet_workload("resnet20", 32)).forward_flops_per_image
    assert flops == 2 * (stem + stage1 + stage2 + stage3 + 64 * 10)


def test_frozen_parameters_have_no_gradient_bytes():
    profile = profile_workload(Workload(name="frozen", module=_frozen_half, batch=_rows))
    assert profile.num_params == 4 * 8 + 8 + 8 * 3 + 3
    assert profile.gradient_bytes == 4 * (8 * 3 + 3)
    assert profile.forward_flops_per_image == 2 * (4 * 8 + 8 * 3)


def test_a_model_that_refuses_the_meta_device_is_counted_on_the_cpu():
    workload = Workload(name="real", module=NeedsRealNumbers, batch=_rows)
    assert profile_workload(workload).forward_flops_per_image == 2 * 4 * 3
    assert num_outputs(workload) == 3


def test_flops_that_cannot_be_counted_are_none_and_the_sizes_stay():
    shift = profile_workload(Workload(name="shift", module=Shift, batch=_rows))
    assert (shift.num_params, shift.gradient_bytes, shift.forward_flops_per_image) == (4, 32, None)
    refuses = Workload(name="refuses", module=Refuses, batch=_rows)
    assert profile_workload(refuses).num_params == 15
    assert profile_workload(refuses).forward_flops_per_image is None
    assert num_outputs(refuses) is None


def test_num_outputs_is_known_for_classifiers_only():
    assert num_outputs(resnet_workload("resnet18", 32)) == 1000
    flat = Workload(name="flat", module=lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), batch=_rows)
    assert num_outputs(flat) is None


def test_counting_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    profile_workload(Workload(name="real", module=NeedsRealNumbers, batch=_rows))
    assert torch.equal(torch.rand(1), expected)


def test_a_module_that_cannot_be_made_is_the_users_error():
    with pytest.raises(UserCodeError, match="module of workload broken cannot be made: TypeError"):
        profile_workload(Workload(name="broken", module=_broken, batch=_rows))

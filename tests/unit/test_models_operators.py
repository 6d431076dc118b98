"""FLOPs and bytes of operators, against their closed forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import get_model_weights

from ddp_bench.models.operators import OperatorCost, forward_costs
from ddp_bench.models.registry import resnet_workload
from ddp_bench.models.workload import Workload

ROWS = 6


class Calls(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def costs(
    module: Callable[[], nn.Module], *shape: int, autocast: torch.dtype | None = None
) -> tuple[OperatorCost, ...]:
    """Of a forward of `ROWS` rows of the given shape, without a loss."""
    workload = Workload(
        name="by hand",
        module=module,
        batch=lambda n, generator: (torch.randn(n, *shape, generator=generator), torch.zeros(n)),
        loss=lambda outputs, _: outputs,
    )
    return forward_costs(workload, batch_size=ROWS, autocast=autocast)


def called(function: Callable[[Tensor], Tensor], *shape: int) -> tuple[OperatorCost, ...]:
    return costs(lambda: Calls(function), *shape)


def test_a_linear_layer_reads_inputs_weights_and_bias_and_writes_outputs() -> None:
    found = costs(lambda: nn.Linear(5, 7), 5)
    assert found == (OperatorCost(1, 2 * ROWS * 5 * 7, 4 * (ROWS * 5 + 5 * 7 + 7 + ROWS * 7)),)


def test_a_convolution_multiplies_its_window_at_every_place() -> None:
    found = costs(lambda: nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), 3, 10, 10)
    moved = 4 * (ROWS * 3 * 10 * 10 + 8 * 3 * 3 * 3 + ROWS * 8 * 5 * 5)
    assert found == (OperatorCost(1, 2 * ROWS * 8 * 5 * 5 * 3 * 3 * 3, moved),)


def test_a_depthwise_convolution_has_the_arithmetic_of_one_channel_each() -> None:
    (found,) = costs(lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), 4, 8, 8)
    assert found.flops == 2 * ROWS * 4 * 8 * 8 * 3 * 3


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (torch.relu, 2),
        (functional.relu_, 2),
        (lambda x: x.add_(x), 3),
        (lambda x: x + x, 3),
        (lambda x: torch.cat([x, x]), 4),
        (lambda x: x[:, ::2].contiguous(), 1),
    ],
)
def test_elementwise_operators_only_move_memory(function: Callable[[Tensor], Tensor], tensors: int) -> None:
    assert called(function, 10) == (OperatorCost(1, 0, tensors * 4 * ROWS * 10),)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t(),
        lambda x: x.view(-1),
        lambda x: x.detach(),
        torch.empty_like,
        lambda x: torch.ops.aten._unsafe_view(x, [-1]),
    ],
)
def test_what_starts_no_kernel_costs_nothing(function: Callable[[Tensor], Tensor]) -> None:
    assert called(function, 10) == ()


def test_an_expanded_tensor_is_in_memory_once() -> None:
    (found,) = called(lambda x: x[:, :1].expand(ROWS, 10).clone(), 1)
    assert found.num_bytes == 4 * (ROWS + ROWS * 10)


def test_operators_of_equal_cost_stand_together() -> None:
    found = costs(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()), 4)
    assert [one.count for one in found] == [2, 1]
    assert found[1] == OperatorCost(1, 0, 2 * 2 * 4 * ROWS * 4)


def test_autocast_halves_float32_and_nothing_else() -> None:
    whole, half = (costs(lambda: nn.Linear(5, 7), 5, autocast=dtype) for dtype in (None, torch.bfloat16))
    assert whole[0].num_bytes == 2 * half[0].num_bytes
    assert whole[0].flops == half[0].flops
    (double,) = costs(lambda: Calls(lambda x: x.to(torch.float64)), 5, autocast=torch.float16)
    assert double.num_bytes == (2 + 8) * ROWS * 5


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_a_forward_has_the_multiply_adds_that_torchvision_publishes(arch: str) -> None:
    """ResNet-50: 4.09 thousand million an image."""
    published = get_model_weights(arch).IMAGENET1K_V1.meta["_ops"]
    found = forward_costs(resnet_workload(arch, 224), batch_size=32, autocast=None)
    assert sum(one.count * one.flops for one in found) / 32 == pytest.approx(2e9 * published, abs=1.1e6)


def test_what_refuses_the_meta_device_has_no_costs() -> None:
    assert called(lambda x: x if x.sum().item() else -x, 3) == ()


def test_counting_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    costs(lambda: nn.Linear(5, 7), 5)
    assert torch.equal(torch.rand(1), expected)

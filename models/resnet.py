"""ResNet-20 for CIFAR-size images: He et al. 2015, "Deep residual learning", section 4.2.

A network small enough to look at scaling on a laptop: 269,722 parameters, 41 million multiply-adds at 32x32.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional

RESNET20_CLASSES = 10
"""Classes of CIFAR-10."""


def _make_conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A of the paper).

    Maps (N, in_channels, H, W) to (N, out_channels, ceil(H / stride), ceil(W / stride)).
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = out_channels - in_channels
        self.conv1 = _make_conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _make_conv3x3(out_channels, out_channels, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Residual plus shortcut; channels that the shortcut lacks are zero."""
        residual = functional.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return functional.relu(residual + shortcut)


class ResNet20(nn.Module):
    """Three stages of 16, 32 and 64 channels, three blocks each: images (N, 3, H, W) to logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _make_conv3x3(3, 16, 1)
        self.bn = nn.BatchNorm2d(16)
        channels = [16, *(width for width in (16, 32, 64) for _ in range(3))]
        pairs = itertools.pairwise(channels)
        self.blocks = nn.Sequential(*(BasicBlock(a, b, stride=1 if a == b else 2) for a, b in pairs))
        self.fc = nn.Linear(64, RESNET20_CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(functional.relu(self.bn(self.conv(images))))
        logits: Tensor = self.fc(features.mean(dim=(2, 3)))
        return logits


def list_resnet_layers(module: nn.Module) -> list[nn.Module]:
    """Give the layers of ResNet-20 or of one of torchvision's ResNets, its blocks unbroken."""
    if isinstance(module, ResNet20):
        stem = nn.Sequential(module.conv, module.bn, nn.ReLU())
        return [stem, *module.blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), module.fc]
    parts = dict(module.named_children())
    stem = nn.Sequential(*(parts[name] for name in ("conv1", "bn1", "relu", "maxpool")))
    stages = [parts[f"layer{number}"] for number in (1, 2, 3, 4)]
    blocks = [block for stage in stages for block in stage.children()]
    return [stem, *blocks, parts["avgpool"], nn.Flatten(), parts["fc"]]

"""Models of the tests of accelerators: a small one, and those that go wrong while they load."""

from __future__ import annotations

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from layertap.models.spec import InputSpec, ModelSpec
from tests.gpu.accelerator import HOW, IS_SIMULATED, KIND, SIDE

BEYOND = 99


class Small(nn.Module):
    """A ResNet with few layers and channels, which have the names of others'."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8))
        half = nn.Sequential(nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2, half))
        self.layer3 = nn.Sequential(BasicBlock(16, 16))
        self.layer4 = nn.Sequential(BasicBlock(16, 16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def make_net(arch: str = "resnet18") -> nn.Module:
    """The module that ``net_spec`` names: a simulated device is too slow for larger ones, and shows no more by them."""
    return Small() if IS_SIMULATED else torchvision.models.get_model(arch, weights=None)


def net_spec(name: str = "net", arch: str = "resnet18", **fields: object) -> ModelSpec:
    """The entry of a small model on the simulated device, of one of torchvision on others; it takes pictures."""
    chosen: dict[str, object] = {"weights": "random:0", "device": KIND, "preprocess": HOW, **fields}
    if IS_SIMULATED:
        chosen = {"inputs": (InputSpec("x", (3, SIDE, SIDE)),), **chosen}
    return ModelSpec(name, "python:tests.gpu.nets:Small" if IS_SIMULATED else f"torchvision:{arch}", **chosen)  # type: ignore[arg-type]


class Breaks(nn.Module):
    """Looks up what is beyond a table: on an accelerator only the kernel sees that, and the device is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(torch.full_like(x, BEYOND, dtype=torch.int64)))
        return out


class Complains(nn.Module):
    """Raises the error of a device that is in order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise torch.AcceleratorError("no kernel can be started for this")


class Counts(nn.Module):
    """Counts its calls in memory of the device, which is put back after every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.ones(2**16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        out: Tensor = self.head(x) * self.calls[:3]
        return out


class Deep(nn.Sequential):
    """Layer after layer, each with weights that a replica copies."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
        super().__init__(nn.Linear(4, 64), *layers, nn.Linear(64, 3))


def spec(factory: str, **fields: object) -> ModelSpec:
    """The entry of one of them, loaded on demand if nothing else is said."""
    chosen: dict[str, object] = {"weights": "random:0", "device": KIND, "load": "lazy", **fields}
    return ModelSpec(factory.lower(), f"python:tests.gpu.nets:{factory}", inputs=(InputSpec("x", (4,)),), **chosen)  # type: ignore[arg-type]

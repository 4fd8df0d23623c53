"""The networks of the guide: what ``models.yaml`` beside this file serves."""

from __future__ import annotations

from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from layertap.models.digits import WEIGHTS
from layertap.models.digits.architecture import digits as untrained_digits

CLASSES = 10


def digits() -> nn.Module:
    """The embedded model with its weights; its convolutions and the mean behind them take pictures of any size."""
    network = untrained_digits()
    network.load_state_dict(load_file(WEIGHTS))
    return network


class Plain(nn.Module):
    """Three convolutions with ReLUs and nothing that keeps channels alive: (N, 3, 32, 32) to scores (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(24, 32, 3, stride=2, padding=1)
        self.relu3 = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(32, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of pictures."""
        image = self.relu1(self.conv1(image))
        image = self.relu2(self.conv2(image))
        image = self.relu3(self.conv3(image))
        scores: Tensor = self.head(self.flatten(self.pool(image)))
        return scores


def plain() -> nn.Module:
    """The network in which channels die, 12 thousand parameters."""
    return Plain()


def patches() -> nn.Module:
    """A vision transformer of 64 patches, two layers and four heads, 21 thousand parameters."""
    network = VisionTransformer(
        image_size=32, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
    )
    network.num_prefix_tokens = 1  # type: ignore[assignment]  # the class token: layertap reads it
    return network

"""A small convolutional network for 32 x 32 pictures of digits."""

from __future__ import annotations

from torch import Tensor, nn

CLASSES = 10


class Residual(nn.Module):
    """Two convolutions and a shortcut that is added in place; halves height and width."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(channels, out_channels, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, out_channels, H / 2, W / 2)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        activated: Tensor = self.relu(out)
        return activated


class Digits(nn.Module):
    """Scores for the ten digits, from float32 pictures (N, 3, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.block1 = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        )
        self.block2 = Residual(16, 32)
        self.block3 = Residual(32, 64)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(64, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, 32, 32) to scores (N, 10)."""
        features = self.block3(self.block2(self.block1(image)))
        scores: Tensor = self.head(self.flatten(self.pool(features)))
        return scores


def digits() -> Digits:
    """The untrained network, 73 thousand parameters."""
    return Digits()

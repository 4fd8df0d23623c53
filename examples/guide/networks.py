"""The networks of the guide: what ``models.yaml`` beside this file serves."""

from __future__ import annotations

from safetensors.torch import load_file
from torch import nn
from torchvision.models import VisionTransformer

from layertap.models.digits import WEIGHTS
from layertap.models.digits.architecture import digits as untrained_digits

CLASSES = 10


def digits() -> nn.Module:
    """The embedded model with its weights; its convolutions and the mean behind them take pictures of any size."""
    network = untrained_digits()
    network.load_state_dict(load_file(WEIGHTS))
    return network


def patches() -> nn.Module:
    """A vision transformer of 64 patches, two layers and four heads, 21 thousand parameters."""
    network = VisionTransformer(
        image_size=32, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
    )
    network.num_prefix_tokens = 1  # type: ignore[assignment]  # the class token: layertap reads it
    return network

"""The embedded default model: a small network for handwritten digits; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec

if TYPE_CHECKING:
    from torch import nn

PREPROCESS = PreprocessSpec(resize=32, crop=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
INPUTS = (InputSpec("image", (3, 32, 32)),)
WEIGHTS = Path(__file__).with_name("digits.safetensors")


def digits() -> nn.Module:
    """The untrained network."""
    from layertap.models.digits import architecture

    return architecture.digits()


def spec() -> ModelSpec:
    """The configuration entry of the trained network."""
    return ModelSpec(
        name="digits",
        source="python:layertap.models.digits:digits",
        weights=str(WEIGHTS),
        embedding="pool",
        preprocess=PREPROCESS,
        inputs=INPUTS,
    )

"""What a model is configured to be and what it takes; plain data, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

Device = str
DType = Literal["float32", "bfloat16", "float16"]
InputDType = Literal["float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
Interpolation = Literal["nearest", "nearest-exact", "bilinear", "bicubic", "lanczos", "box", "hamming"]


@dataclass(frozen=True)
class PreprocessSpec:
    """How an RGB image becomes a row: resize, centre crop, scale to 0…1, normalise.

    ``resize``: the short side in pixels, or (height, width); ``crop``: a square's side, or (height, width);
    None leaves the step out. ``mean`` and ``std`` are per channel, on the 0…1 scale.
    """

    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        """ValueError where there is nothing to divide by, or not as many figures as channels."""
        if len(self.mean) != 3 or len(self.std) != 3:
            raise ValueError("mean and std have a figure for each of three channels")
        if not all(isfinite(value) for value in self.mean) or not all(isfinite(value) and value for value in self.std):
            raise ValueError("mean and std are finite, and no std is 0")


@dataclass(frozen=True)
class InputSpec:
    """One input of a model: its argument's name, the shape of one item (no batch axis) and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: InputDType = "float32"


@dataclass(frozen=True)
class ModelSpec:
    """One entry of the configuration.

    ``source`` is ``KIND:IDENT`` (torchvision:resnet50, timm:vit_small_patch16_224, python:package.module:factory);
    ``weights`` is DEFAULT, a weights enum's name, a path ending in .safetensors or .pth, or random:SEED;
    ``inputs`` is needed where the source can't tell (python:).
    """

    name: str
    source: str
    weights: str = "DEFAULT"
    device: Device = "auto"
    dtype: DType = "float32"
    load: Literal["startup", "lazy"] = "startup"
    embedding: str | None = None
    preprocess: Literal["preset", "none"] | PreprocessSpec = "preset"
    inputs: tuple[InputSpec, ...] | None = None

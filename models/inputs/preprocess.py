"""An image into a model's input tensor, and other libraries' presets into a PreprocessSpec.

Every step on a PIL image is the same arithmetic as torchvision's, so that a preset's numbers come out bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from layertap.models.inputs.geometry import compute_resized_size, find_crop_start, list_sides
from layertap.models.spec import Box, Interpolation, PreprocessSpec

# The sides of a reduced picture are at least so many times what it is resized to. With once, deviations would be three
# times as large (docs/explanation/fidelity.md).
MIN_SCALE = 2


def preprocess(
    image: Image.Image, spec: PreprocessSpec, size: tuple[int, int] | None = None, box: Box | None = None
) -> Tensor:
    """One row for the model: resize, centre crop, scale to 0…1, normalise.

    ``image`` is upright and RGB; the result is float32, (3, height, width), contiguous, on the CPU.
    An image smaller than the crop is padded with black, as torchvision does. Of a picture that was decoded smaller,
    ``size`` is the width and height it has in full, and ``box`` the part of ``image`` that is the picture.
    """
    return normalize(fit_image(image, spec, size, box), spec)


def fit_image(
    image: Image.Image, spec: PreprocessSpec, size: tuple[int, int] | None = None, box: Box | None = None
) -> Tensor:
    """The pixels of a row before they are normalised, a quarter of its bytes: uint8, (3, height, width), contiguous.

    The arguments are those of ``preprocess``.
    """
    if spec.resize is not None:
        image = image.resize(compute_resized_size(spec, *(size or image.size)), PILLOWS[spec.interpolation], box)
    if spec.crop is not None:
        image = _crop_center(image, spec.crop)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    # Contiguous while still bytes: a channels-last row among others could choose another kernel for the whole batch.
    return pixels.contiguous()


def preprocess_pixels(pixels: Tensor, spec: PreprocessSpec) -> Tensor:
    """The same row from a picture's pixels, uint8, (3, height, width), on any device, where it stays.

    For a ``placeable`` spec. Resized in float32 and rounded once, where Pillow rounds between the two directions too.
    """
    # Here: it takes longer to import than torch, and only a GPU's decoder needs it, whose making tries this out.
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tvf

    if spec.resize is not None:
        width, height = compute_resized_size(spec, pixels.shape[2], pixels.shape[1])
        pixels = tvf.resize(pixels, [height, width], InterpolationMode(spec.interpolation), antialias=True)
    if spec.crop is not None:
        pixels = tvf.center_crop(pixels, list_sides(spec.crop))
    return normalize(pixels.contiguous(), spec)


def _crop_center(image: Image.Image, size: int | tuple[int, int]) -> Image.Image:
    """The middle of an image, black around it where it is smaller."""
    height, *rest = list_sides(size)
    sides = rest[0] if rest else height, height
    left, top = (find_crop_start(own, side) for own, side in zip(image.size, sides, strict=True))
    return image.crop((left, top, left + sides[0], top + sides[1]))  # what lies beyond an image is black


def normalize(pixels: Tensor, spec: PreprocessSpec) -> Tensor:
    """Pixels of one row, or of several on a first axis, scaled to 0…1 and normalised: float32, on their device."""
    mean, std = _make_constants(spec.mean, spec.std, pixels.device)
    normalised: Tensor = pixels.to(torch.float32).div_(255).sub_(mean).div_(std)
    return normalised


@lru_cache(maxsize=256)
def _make_constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """What is subtracted and divided by, (3, 1, 1); torchvision makes and checks them anew for each image."""
    # Normal tensors whoever asks first: inference ones could not be used outside of inference mode.
    with torch.inference_mode(False):
        first, second = (
            torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1) for values in (mean, std)
        )
    return first, second


def compute_least_size(spec: PreprocessSpec, width: int, height: int) -> tuple[int, int] | None:
    """The least width and height at which a ``width`` x ``height`` picture may be decoded to be resized then.

    None where it is to be decoded in full: nothing is resized, or not smoothly.
    """
    if not spec.reducible:
        return None
    wide, high = compute_resized_size(spec, width, height)
    return MIN_SCALE * wide, MIN_SCALE * high


def compute_output_size(spec: PreprocessSpec) -> tuple[int, int] | None:
    """Height and width of every result, or None where they depend on the image."""
    if spec.crop is not None:
        height, *rest = list_sides(spec.crop)
        return height, rest[0] if rest else height
    return spec.resize if isinstance(spec.resize, tuple) else None


def from_torchvision(preset: object) -> PreprocessSpec | None:
    """The spec of what a torchvision weights' ``transforms()`` gives; None where it is not for single images."""
    convert = PRESETS.get(type(preset).__name__)
    return convert(preset) if convert else None


def from_timm(config: Mapping[str, Any]) -> PreprocessSpec | None:
    """The spec of timm's evaluation transform for a ``resolve_data_config`` result.

    None where resize and centre crop can't say it: borders, crops that keep a non-square image's ratio, other channels.
    """
    channels, height, width = config["input_size"]
    scaled = tuple(math.floor(side / (config["crop_pct"] or 0.875)) for side in (height, width))
    resize = scaled if config["crop_mode"] == "squash" else scaled[0]
    if channels != 3 or config["interpolation"] not in get_args(Interpolation):
        return None
    if config["crop_mode"] not in ("squash", "center") or (config["crop_mode"] == "center" and height != width):
        return None
    return PreprocessSpec(
        resize=cast("int | tuple[int, int]", resize),
        crop=(height, width) if height != width else height,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
    )


def from_transformers(processor: Any) -> PreprocessSpec | None:
    """The spec of a transformers image processor.

    None where resize and centre crop can't say it: borders, crops by ratio, a scale other than 0…1, other resamplings.
    """
    scaled = processor.do_rescale and math.isclose(processor.rescale_factor, 1 / 255)
    resize = _parse_transformers_size(processor.size) if processor.do_resize else None
    cropped = bool(getattr(processor, "do_center_crop", False))
    crop = _parse_transformers_size(processor.crop_size) if cropped else None
    mode = RESAMPLINGS.get(int(processor.resample)) if processor.do_resize else "bilinear"
    odd = any(getattr(processor, name, None) for name in ("do_pad", "crop_pct", "do_flip_channel_order"))
    if not scaled or odd or mode is None or (processor.do_resize and resize is None) or (cropped and crop is None):
        return None
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
    return PreprocessSpec(resize, crop, tuple(mean), tuple(std), mode)


def _parse_transformers_size(size: Any) -> int | tuple[int, int] | None:
    """A short side or height and width, as transformers writes them; None for any other rule."""
    sides = {name: size.get(name) for name in ("height", "width", "shortest_edge", "longest_edge")}
    known = {name: int(side) for name, side in sides.items() if side is not None}
    if known.keys() == {"shortest_edge"}:
        return known["shortest_edge"]
    return (known["height"], known["width"]) if known.keys() == {"height", "width"} else None


def _from_classification(preset: Any) -> PreprocessSpec:
    return PreprocessSpec(
        resize=_parse_size(preset.resize_size),
        crop=_parse_size(preset.crop_size),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=preset.interpolation.value,
    )


def _from_segmentation(preset: Any) -> PreprocessSpec:
    return PreprocessSpec(
        resize=None if preset.resize_size is None else _parse_size(preset.resize_size),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=preset.interpolation.value,
    )


def _parse_size(sides: list[int]) -> int | tuple[int, int]:
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


PILLOWS: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "nearest-exact": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
RESAMPLINGS = {int(mode): name for name, mode in PILLOWS.items() if name != "nearest-exact"}  # by PIL's numbers
PRESETS: dict[str, Callable[[Any], PreprocessSpec]] = {
    "ImageClassification": _from_classification,
    "SemanticSegmentation": _from_segmentation,
}

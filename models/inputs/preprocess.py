"""An image into a model's input tensor, and other libraries' presets into a PreprocessSpec.

Every step on a PIL image is the same arithmetic as torchvision's, so that a preset's numbers come out bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from layertap.models.inputs.geometry import compute_resized_size, find_window, list_sides
from layertap.models.inputs.library_processor import LibraryProcessor, Preprocessing
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
    """The pixels of a row before they are normalised, a quarter of its bytes: uint8, (channels, height, width).

    Contiguous. The arguments are those of ``preprocess``.
    """
    if spec.channels == "gray":
        image = image.convert("L")
    if spec.resize is not None:
        image = image.resize(compute_resized_size(spec, *(size or image.size)), PILLOWS[spec.interpolation], box)
    image = _cut_window(image, spec)
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
    # Contiguous while still bytes: a channels-last row among others could choose another kernel for the whole batch.
    return pixels.flip(0) if spec.channels == "bgr" else pixels.contiguous()


def make_row(
    image: Image.Image, how: Preprocessing, size: tuple[int, int] | None = None, box: Box | None = None
) -> Tensor:
    """A picture's row as it waits: pixels still to be normalised, or what its library's processor makes of it.

    The arguments are those of ``preprocess``. InputError where the library refuses the picture.
    """
    return how.make_row(image) if isinstance(how, LibraryProcessor) else fit_image(image, how, size, box)


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
    left, top, width, height = find_window(spec, pixels.shape[2], pixels.shape[1])
    return normalize(tvf.crop(pixels, top, left, height, width).contiguous(), spec)


def _cut_window(image: Image.Image, spec: PreprocessSpec) -> Image.Image:
    """What a row holds of a resized image; around an image that is smaller is black, or the letterbox's colour."""
    left, top, width, height = find_window(spec, *image.size)
    if (width, height) == image.size:
        return image
    if spec.letterbox is None:
        return image.crop((left, top, left + width, top + height))  # what lies beyond an image is black
    canvas = Image.new("RGB", (width, height), spec.letterbox).convert(image.mode)
    canvas.paste(image, (-left, -top))
    return canvas


def normalize(pixels: Tensor, spec: PreprocessSpec) -> Tensor:
    """Pixels of one row, or of several on a first axis, scaled and normalised: float32, on their device."""
    mean, std = _make_constants(spec.mean, spec.std, pixels.device)
    low, high = spec.scale or (0, 1)
    scaled = pixels.to(torch.float32)
    scaled = scaled.div_(255) if spec.scale is None else scaled.mul_((high - low) / 255).add_(low)
    normalised: Tensor = scaled.sub_(mean).div_(std)
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


def compute_least_size(spec: Preprocessing, width: int, height: int) -> tuple[int, int] | None:
    """The least width and height at which a ``width`` x ``height`` picture may be decoded to be resized then.

    None where it is to be decoded in full: nothing is resized, or not smoothly.
    """
    if isinstance(spec, LibraryProcessor) or not spec.reducible:
        return None
    wide, high = compute_resized_size(spec, width, height)
    return MIN_SCALE * wide, MIN_SCALE * high


def compute_output_size(spec: Preprocessing) -> tuple[int, int] | None:
    """Height and width of every result, or None where they depend on the image."""
    if isinstance(spec, LibraryProcessor):
        return spec.size
    size = spec.crop or (spec.resize if spec.letterbox or isinstance(spec.resize, tuple) else None)
    return None if size is None else list_sides(size)


def from_torchvision(preset: object) -> PreprocessSpec | None:
    """The spec of what a torchvision weights' ``transforms()`` gives; None where it is not for single images."""
    convert = PRESETS.get(type(preset).__name__)
    return convert(preset) if convert else None


def from_timm(config: Mapping[str, Any]) -> PreprocessSpec | None:
    """The spec that is nearest to timm's evaluation transform for a ``resolve_data_config`` result; to be proven."""
    _, height, width = config["input_size"]
    scaled = tuple(math.floor(side / (config["crop_pct"] or 0.875)) for side in (height, width))
    if config["interpolation"] not in get_args(Interpolation):
        return None
    return PreprocessSpec(
        resize=cast("tuple[int, int]", scaled) if config["crop_mode"] == "squash" else scaled[0],
        crop=(height, width) if height != width else height,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
    )


def from_transformers(processor: Any) -> PreprocessSpec | None:
    """The spec that is nearest to a transformers image processor's settings, which do not tell all; to be proven.

    None where pictures are resized neither to a short side nor to height and width.
    """
    settings: Callable[..., Any] = partial(getattr, processor)
    resize, crop = (
        _parse_transformers_size(settings(name, None)) if settings(wanted, False) else None
        for name, wanted in (("size", "do_resize"), ("crop_size", "do_center_crop"))
    )
    share = settings("crop_pct", None)
    if share and isinstance(resize, int):
        resize, crop = int(resize / share), crop or resize
    mode = RESAMPLINGS.get(settings("resample", None)) if settings("do_resize", False) else "bilinear"
    if mode is None or (resize is None and settings("do_resize", False)):
        return None
    # The largest pixel's value, by which our mean and std are smaller than the library's: theirs follow its factor.
    full = 255 * settings("rescale_factor") if settings("do_rescale", False) else 255
    normalised = settings("do_normalize", False)
    mean, std = (settings("image_mean"), settings("image_std")) if normalised else ([0.0] * 3, [1.0] * 3)
    return PreprocessSpec(
        resize,
        crop,
        tuple(value / full for value in mean),
        tuple(value / full for value in std),
        mode,
        channels="bgr" if settings("do_flip_channel_order", False) else None,
        crop_rounding=None if crop is None else "floor",
    )


def _parse_transformers_size(size: Any) -> int | tuple[int, int] | None:
    """A short side or height and width, as transformers writes them; None for any other rule."""
    size = size or {}
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

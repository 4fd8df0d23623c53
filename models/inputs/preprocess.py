"""Turn an image into a model's input tensor: with our own steps, or with the image processor of the model's library.

Every step on a PIL image uses the same arithmetic as torchvision, so that a preset's results match bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from layertap.models.errors import InputError
from layertap.models.spec import FOR_TENSORS, Box, Color, Interpolation, PreprocessSpec, Window

# The sides of a picture that is decoded smaller are at least this many times those it is resized to. With 1, deviations
# would be three times as large (docs/explanation/fidelity.md).
MIN_SCALE = 2
MAX_SUPPORT = 3  # the largest filter support, Lanczos's, in output pixels
MAX_COPIED_PIXELS = 2**22  # of an image that is copied for a faster resize
PILLOWS: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "nearest-exact": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


@dataclass(frozen=True)
class LibraryProcessor:
    """A library's image processor."""

    name: str
    settings: str  # a digest of them
    # RGB image → float32 (channels, height, width); thread-safe, can be pickled.
    run: Callable[[Image.Image], Tensor] = field(compare=False, repr=False)
    output_size: tuple[int, int] | None = None  # height and width of every row; None if they depend on the picture
    background: Color | None = None  # put behind transparent pictures
    nearest: PreprocessSpec | None = None  # our steps that come closest: they bound how far it enlarges

    def make_row(self, image: Image.Image) -> Tensor:
        """A picture's row; InputError if the library refuses the picture, or makes a row of another size."""
        try:
            row = self.run(image)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # a third party's code raises anything
            detail = f"{self.name} can't take a picture of {image.width} by {image.height} ({type(error).__name__})"
            raise InputError(detail, hint="send one of another size, or a tensor") from error
        if row.ndim != 3 or self.output_size not in (None, tuple(row.shape[1:])):
            raise InputError(f"{self.name} made a row of {list(row.shape)} of this picture", hint="send a tensor")
        return row.contiguous()

    def describe(self) -> dict[str, Any]:
        """Everything that affects its rows, as plain data."""
        return {"processor": self.name, "settings": self.settings, "background": self.background}


Preprocessing = PreprocessSpec | LibraryProcessor


def preprocess(
    image: Image.Image,
    spec: PreprocessSpec,
    size: tuple[int, int] | None = None,
    box: Box | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """A row for the model, float32, (channels, height, width): what ``make_row`` makes, normalised."""
    return normalize(make_row(image, spec, size, box, fast=fast), spec)


def make_row(
    image: Image.Image,
    how: Preprocessing,
    size: tuple[int, int] | None = None,
    box: Box | None = None,
    *,
    fast: bool = False,
) -> Tensor:
    """A picture's row before normalisation, uint8, (channels, height, width), or a library processor's own row.

    ``image`` is upright and RGB; the row is contiguous, on the CPU. An image smaller than the crop is padded with
    black, as in torchvision. For a picture that was decoded smaller, ``size`` is its full width and height, and ``box``
    the part of ``image`` that is the picture. ``fast``: pixels may differ from Pillow's by one 8-bit step.
    InputError if the library refuses the picture.
    """
    if isinstance(how, LibraryProcessor):
        return how.make_row(image)
    if how.channels == "gray":
        image = image.convert("L")
    pixels = np.asarray(_fit(image, how, size or image.size, box, fast=fast))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    # Made contiguous while still bytes: one channels-last row could change the kernel for the whole batch.
    return torch.from_numpy(np.array(pixels[::-1] if how.channels == "bgr" else pixels, order="C"))


def _fit(
    image: Image.Image, spec: PreprocessSpec, size: tuple[int, int], box: Box | None, *, fast: bool
) -> Image.Image | NDArray[np.uint8]:
    """Resize and crop an image."""
    if spec.resize is None:
        return _cut_window(image, spec)
    mode, resized = PILLOWS[spec.interpolation], spec.compute_resized_size(*size)
    wide, high = resized
    window = spec.find_window(wide, high)
    is_beyond = window[2] > wide or window[3] > high
    is_part = box not in (None, (0, 0, *image.size))
    # Pillow rounds between its two passes, and in this case starts with the other pass.
    rows_first = image.height - high > max(2 * (image.width - wide), 0)
    if is_part or is_beyond or rows_first or image.width * image.height > MAX_COPIED_PIXELS:
        return _cut_window(image.resize(resized, mode, box), spec)
    if fast and spec.interpolation in FOR_TENSORS:
        return _resize_by_torch(image, spec, resized, window)
    return image.resize(resized, mode) if window[2:] == resized else _resize_window(image, mode, resized, window)


def _resize_window(image: Image.Image, mode: Image.Resampling, resized: tuple[int, int], window: Window) -> Image.Image:
    """A window of a resized image, bit-identical to the same window of the whole resized image.

    Pillow runs a horizontal pass, rounds, runs a vertical pass, and computes each pixel from its position. So both
    passes run here only for what the window needs, at the original positions.
    """
    (wide, high), (left, top, width, height) = resized, window
    scale = image.height / high
    reach = MAX_SUPPORT * max(scale, 1) + 1
    first, end = max(int(top * scale - reach), 0), min(int((top + height) * scale + reach) + 1, image.height)
    columns = image.crop((0, first, image.width, end)).resize((wide, end - first), mode)
    columns = columns.crop((left, -first, left + width, image.height - first))  # rows that are not needed are black
    return columns.resize((width, high), mode).crop((0, top, width, top + height))


def _resize_by_torch(
    image: Image.Image, spec: PreprocessSpec, resized: tuple[int, int], window: Window
) -> NDArray[np.uint8]:
    """A window of a resized image, (height, width) or (height, width, 3); torch's weights have 16 bits, Pillow's 22."""
    (wide, high), (left, top, width, height) = resized, window
    layout = "RGBX" if image.mode == "RGB" else image.mode  # four bytes a pixel is Pillow's own layout: a plain copy
    data = torch.frombuffer(bytearray(image.tobytes("raw", layout)), dtype=torch.uint8)
    pixels = data.view(1, image.height, image.width, -1).permute(0, 3, 1, 2)
    found = functional.interpolate(pixels, (high, wide), mode=spec.interpolation, antialias=True)[0]
    seen: NDArray[np.uint8] = found[:3, top : top + height, left : left + width].numpy()
    return seen[0] if len(seen) == 1 else seen.transpose(1, 2, 0)


def preprocess_pixels(pixels: Tensor, spec: PreprocessSpec) -> Tensor:
    """A normalised row from a picture's pixels, uint8, (3, height, width), on their device.

    For a ``placeable`` spec. The resize is in float32 and rounds once; Pillow also rounds between its two passes.
    """
    # Imported here: it takes longer to import than torch, and only a GPU's decoder needs it.
    import torchvision  # noqa: F401  (the whole first, as ``build_model`` does)
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tvf

    if spec.resize is not None:
        width, height = spec.compute_resized_size(pixels.shape[2], pixels.shape[1])
        pixels = tvf.resize(pixels, [height, width], InterpolationMode(spec.interpolation), antialias=True)
    left, top, width, height = spec.find_window(pixels.shape[2], pixels.shape[1])
    return normalize(tvf.crop(pixels, top, left, height, width).contiguous(), spec)


def _cut_window(image: Image.Image, spec: PreprocessSpec) -> Image.Image:
    """Crop a resized image; a smaller one is padded with black, or with the letterbox's colour."""
    left, top, width, height = spec.find_window(*image.size)
    if (width, height) == image.size:
        return image
    if spec.letterbox is None:
        return image.crop((left, top, left + width, top + height))  # Pillow pads with black
    canvas = Image.new("RGB", (width, height), spec.letterbox).convert(image.mode)
    canvas.paste(image, (-left, -top))
    return canvas


def normalize(pixels: Tensor, spec: PreprocessSpec, out: Tensor | None = None) -> Tensor:
    """Scale and normalise the pixels of one row, or of several on a first axis: float32, on their device.

    ``out``: a float32 tensor of that shape to write to.
    """
    mean, std = _make_constants(spec.mean, spec.std, pixels.device)
    low, high = spec.scale or (0, 1)
    scaled = pixels.to(torch.float32) if out is None else out.copy_(pixels)
    scaled = scaled.div_(255) if spec.scale is None else scaled.mul_((high - low) / 255).add_(low)
    normalised: Tensor = scaled.sub_(mean).div_(std)
    return normalised


def find_pixel_range(spec: PreprocessSpec) -> tuple[Tensor, Tensor]:
    """What pixels of 0 and 255 become, (channels, 1, 1) each, float32."""
    low, high = normalize(torch.tensor([0.0, 255.0]).repeat_interleave(spec.channel_count).view(2, -1, 1, 1), spec)
    return low, high


def restore_pixels(row: Tensor, spec: PreprocessSpec) -> Tensor:
    """The pixels that ``normalize`` makes a row (C, H, W) of, clipped: uint8 (H, W, 3), or (H, W) of gray."""
    low, high = find_pixel_range(spec)
    pixels = ((row - low) / (high - low)).nan_to_num().clamp(0, 1).mul(255).round().byte()
    return (pixels.flip(0) if spec.channels == "bgr" else pixels).movedim(0, -1).squeeze(-1)


def normalize_batch(parts: Sequence[Tensor], spec: PreprocessSpec, padding: int = 0) -> Tensor:
    """Rows of pixels on the CPU as one float32 batch, whose first row is repeated ``padding`` times at its end."""
    count = sum(map(len, parts))
    batch = torch.empty((count + padding, *parts[0].shape[1:]), dtype=torch.float32)
    # Row by row: each stays in the processor's cache until it is done.
    for pixels, row in zip(chain.from_iterable(parts), batch, strict=False):
        normalize(pixels, spec, row)
    if padding:
        batch[count:] = batch[:1]
    return batch


@lru_cache(maxsize=256)
def _make_constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std as tensors, (3, 1, 1); cached, while torchvision creates and checks them for each image."""
    # Never inference tensors, even if the first caller is in inference mode: these can't be used outside of it.
    with torch.inference_mode(False):
        first, second = (
            torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1) for values in (mean, std)
        )
    return first, second


def compute_least_size(spec: Preprocessing, width: int, height: int) -> tuple[int, int] | None:
    """The smallest width and height to decode a ``width`` x ``height`` picture at before it is resized.

    None if it must be decoded in full: nothing is resized, or without a smooth filter.
    """
    if isinstance(spec, LibraryProcessor) or not spec.reducible:
        return None
    wide, high = spec.compute_resized_size(width, height)
    return MIN_SCALE * wide, MIN_SCALE * high

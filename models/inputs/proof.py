"""Whether our own steps make the rows that a library's image processor makes: odd pictures go through both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from layertap.models.errors import escape
from layertap.models.inputs.geometry import list_sides
from layertap.models.inputs.library_processor import LibraryProcessor, Preprocessing
from layertap.models.inputs.preprocess import preprocess
from layertap.models.spec import Color, PreprocessSpec

TOLERANCE = 0.02  # of an 8-bit step: the rounding of float32, and no other pixel
SIDE = 224  # of pictures for a processor that resizes to no side that is known
CHANNELS = (1, 3)  # gray levels or colours
WHITE: Color = (255, 255, 255)


@lru_cache(maxsize=64)
def choose_preprocessing(processor: LibraryProcessor) -> Preprocessing | str:
    """The ``nearest`` steps of a processor where they are proven, else the processor, with all that is known of it.

    A text where it can't be applied to plain pictures: what it did with one.
    """
    pictures = list(_draw_pictures(_find_side(processor.nearest)))
    try:
        row = processor.run(pictures[0])  # the plainest
    except Exception as error:  # a third party's code raises anything
        return f"raises {type(error).__name__} for a plain picture: {escape(str(error))}"
    if row.ndim != 3 or len(row) not in CHANNELS or row.dtype != torch.float32:
        return f"makes {row.dtype} of shape {list(row.shape)} of a picture, not float32 (channels, height, width)"
    processor = replace(processor, background=_find_background(processor))
    spec = processor.nearest and replace(processor.nearest, background=processor.background)
    rows = [_try(processor, each) for each in pictures]
    if spec is not None and all(
        _is_equal(preprocess(image, spec), row, spec) for image, row in zip(pictures, rows, strict=True)
    ):
        return spec
    again = [_try(processor, each) for each in pictures]
    if not all(_is_same(*each) for each in zip(rows, again, strict=True)):
        return "makes other rows of the same picture each time"
    sizes = {(row.shape[1], row.shape[2]) for row in rows if row is not None}
    return replace(processor, size=sizes.pop() if len(sizes) == 1 else None)


def _is_same(row: Tensor | None, other: Tensor | None) -> bool:
    return row is other if row is None or other is None else torch.equal(row, other)


def _is_equal(row: Tensor, wanted: Tensor | None, spec: PreprocessSpec) -> bool:
    if wanted is None or row.shape != wanted.shape:
        return False
    step = 255 * torch.tensor(spec.std).abs().view(-1, 1, 1)
    return bool((((row - wanted) * step).abs() < TOLERANCE).all())


def _try(processor: LibraryProcessor, image: Image.Image) -> Tensor | None:
    try:
        return processor.run(image)
    except Exception:  # what is odd may be too odd for a library: served pictures like it are refused
        return None


def _find_background(processor: LibraryProcessor) -> Color | None:
    """White where a processor lays transparent pictures onto it, as transformers' do; None where it takes none."""
    colours = _draw_noise(SIDE // 4, SIDE // 4)
    colours.putalpha(Image.linear_gradient("L").resize(colours.size))
    found = _try(processor, colours)
    canvas = Image.new("RGBA", colours.size, WHITE)
    wanted = _try(processor, Image.alpha_composite(canvas, colours).convert("RGB"))
    return WHITE if found is not None and _is_same(found, wanted) else None


def _find_side(spec: PreprocessSpec | None) -> int:
    """The short side that pictures get on the way, by which odd ones are chosen."""
    size = spec and (spec.resize or spec.crop)
    return min(list_sides(size)) if size else SIDE


def _draw_pictures(side: int) -> Iterator[Image.Image]:
    """Panorama and portrait, made larger and smaller, smaller than a crop; all ways in which a crop may be off centre.

    Noise in colours shows each pixel; a ramp has all levels of gray. The first one's long side becomes a whole number
    and two thirds: it shows who cuts there, and who rounds.
    """
    yield _draw_noise(side * 3 // 2 + 1, side * 3 // 2)
    yield _draw_noise(side * 3 + 1, side // 4)
    yield _draw_noise(side // 4, side * 3 - 1)
    yield _draw_noise(side * 4 // 3 + 3, side * 5 // 4)
    yield _draw_noise(side // 2 - 1, side // 3 + 1)
    for more in range(1, 4):
        yield _draw_noise(side + more, side)
        yield _draw_noise(side, side + more)
    yield Image.linear_gradient("L").resize((side + side // 4, side)).convert("RGB")


def _draw_noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (max(height, 1), max(width, 1), 3), np.uint8)
    return Image.fromarray(pixels)

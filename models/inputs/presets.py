"""Replace a library's image processor by our own steps, if they are verified to return the same rows.

The processor's settings do not tell everything, so both run on odd pictures.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from layertap.models.errors import escape
from layertap.models.inputs.preprocess import PILLOWS, LibraryProcessor, Preprocessing, preprocess
from layertap.models.spec import Color, Interpolation, PreprocessSpec, list_sides

TOLERANCE = 0.02  # of an 8-bit step: allows float32 rounding, but no different pixel
SIDE = 224  # of pictures for a processor whose target size is unknown
CHANNELS = (1, 3)  # gray levels or colours
WHITE: Color = (255, 255, 255)
RESAMPLINGS = {int(mode): name for name, mode in PILLOWS.items() if name != "nearest-exact"}  # by PIL's numbers


def from_torchvision(preset: Any) -> PreprocessSpec | None:
    """The spec of a preset from torchvision weights' ``transforms()``; None if it is not for single images."""
    if type(preset).__name__ not in ("ImageClassification", "SemanticSegmentation"):
        return None
    resize, crop = (
        None if sides is None else sides[0] if len(sides) == 1 else (sides[0], sides[1])
        for sides in (preset.resize_size, getattr(preset, "crop_size", None))
    )
    return PreprocessSpec(resize, crop, tuple(preset.mean), tuple(preset.std), preset.interpolation.value)


def from_timm(config: Mapping[str, Any]) -> PreprocessSpec | None:
    """The spec nearest to timm's evaluation transform for a ``resolve_data_config`` result; not yet verified."""
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
    """The spec nearest to a transformers image processor's settings; not yet verified.

    None if pictures are resized neither to a short side nor to height and width.
    """
    settings: Callable[..., Any] = partial(getattr, processor)
    does_resize = settings("do_resize", False)
    resize = _parse_size(settings("size", None)) if does_resize else None
    crop = _parse_size(settings("crop_size", None)) if settings("do_center_crop", False) else None
    share = settings("crop_pct", None)
    if share and isinstance(resize, int):
        resize, crop = int(resize / share), crop or resize
    mode = RESAMPLINGS.get(settings("resample", None)) if does_resize else "bilinear"
    if mode is None or (resize is None and does_resize):
        return None
    # The rescaled value of a white pixel: we scale to 0…1, so the library's mean and std are divided by it.
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


def _parse_size(size: Any) -> int | tuple[int, int] | None:
    """A short side or height and width, as transformers writes them; None for any other rule."""
    sides = ((name, (size or {}).get(name)) for name in ("height", "width", "shortest_edge", "longest_edge"))
    match {name: int(side) for name, side in sides if side is not None}:
        case {"shortest_edge": side, **others} if not others:
            return side
        case {"height": height, "width": width, **others} if not others:
            return height, width
    return None


def choose_preprocessing(
    name: str, settings: str, run: Callable[[Image.Image], Tensor], nearest: PreprocessSpec | None, shown: str
) -> Preprocessing | str:
    """The ``nearest`` steps if they are verified to return a library processor's rows, else the processor.

    ``run`` is its function, ``settings`` everything that affects its rows. If it fails on plain pictures the result is
    a text with the reason, which begins with ``shown``.
    """
    digest = hashlib.sha256(settings.encode()).hexdigest()[:32]
    found = _choose(LibraryProcessor(name, digest, run, nearest=nearest))
    return f"{shown} {found}" if isinstance(found, str) else found


@lru_cache(maxsize=64)
def _choose(processor: LibraryProcessor) -> Preprocessing | str:
    """A processor's ``nearest`` steps if they are verified, else the processor with its size and background.

    A text if it fails on plain pictures: what it did with one.
    """
    size = processor.nearest and (processor.nearest.resize or processor.nearest.crop)
    pictures = list(_draw_pictures(min(list_sides(size)) if size else SIDE))
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
    return replace(processor, output_size=sizes.pop() if len(sizes) == 1 else None)


def _is_same(row: Tensor | None, other: Tensor | None) -> bool:
    return row is other if row is None or other is None else torch.equal(row, other)


def _is_equal(row: Tensor, wanted: Tensor | None, spec: PreprocessSpec) -> bool:
    step = 255 * torch.tensor(spec.std).abs().view(-1, 1, 1)
    return wanted is not None and row.shape == wanted.shape and bool((((row - wanted) * step).abs() < TOLERANCE).all())


def _try(processor: LibraryProcessor, image: Image.Image) -> Tensor | None:
    try:
        return processor.run(image)
    except Exception:  # a library may refuse an odd picture: then requests with such pictures fail too
        return None


def _find_background(processor: LibraryProcessor) -> Color | None:
    """White if a processor puts it behind transparent pictures, as transformers' do; None if it does not."""
    colours = _draw_noise(SIDE // 4, SIDE // 4)
    colours.putalpha(Image.linear_gradient("L").resize(colours.size))
    found = _try(processor, colours)
    canvas = Image.new("RGBA", colours.size, WHITE)
    wanted = _try(processor, Image.alpha_composite(canvas, colours).convert("RGB"))
    return WHITE if found is not None and _is_same(found, wanted) else None


def _draw_pictures(side: int) -> Iterator[Image.Image]:
    """Test pictures, for a short side that they are resized to.

    Wide and tall, enlarged and reduced, smaller than a crop, with every rounding of a crop's offset. Colour noise makes
    each pixel count; a ramp has all gray levels. The first picture's long side is resized to an integer plus two
    thirds: this tells truncation from rounding.
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

"""What sheets are drawn of: words, tiles, bars, a scale of colours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from layertap.service.pictures.colormaps import NOT_FINITE, STEPS, Scale

Array = NDArray[Any]
Color = tuple[int, int, int]
Place = tuple[int, int]

PAPER: Color = (255, 255, 255)
INK: Color = (24, 24, 27)
GREY: Color = (113, 113, 122)
LINE: Color = (212, 212, 216)
BAR: Color = (70, 124, 184)
TITLE, TEXT, SMALL = 18, 13, 11  # sizes of letters
TILE = 96  # pixels that the longer side of a tile has about, where a number is more than one
BARS = (560, 140)
SCALE = (180, 10)
BINS = "histogram["  # how the names of a histogram's columns begin
MAX_NUMBERED = 32  # bars, of which each has its name below it


@cache
def get_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own letters."""
    return ImageFont.load_default(size)


def write(
    draw: ImageDraw.ImageDraw, place: Place, text: str, size: int, color: Color = INK, anchor: str = "la"
) -> None:
    """Write a line of text; ``anchor`` says which part of it is at the place, as in Pillow."""
    draw.text(place, text, color, get_font(size), anchor)


def measure_text(text: str, size: int) -> int:
    """How many pixels wide a line is."""
    return int(get_font(size).getlength(text)) + 1


def cut_text(text: str, size: int, width: int) -> str:
    """A line that is no wider than so many pixels: what is too long ends in dots."""
    text = "".join(each if each.isprintable() else "?" for each in text[:512])
    if measure_text(text, size) <= width:
        return text
    while text and measure_text(text + "...", size) > width:
        text = text[: max(len(text) - max(1, len(text) // 16), 0)]
    return text + "..."


def format_number(value: float) -> str:
    """Four digits of a number."""
    return f"{value:.4g}"


def choose_zoom(height: int, width: int, side: int = TILE) -> int:
    """How many pixels a side a number has in a tile."""
    return max(1, round(side / max(height, width, 1)))


def draw_tile(values: Array, scale: Scale, zoom: int) -> Image.Image:
    """Numbers, (H, W), each a square of ``zoom`` pixels in its colour."""
    colors = scale.to_colors(values)
    return Image.fromarray(np.ascontiguousarray(colors.repeat(zoom, 0).repeat(zoom, 1)))


def draw_scale(draw: ImageDraw.ImageDraw, scale: Scale, place: Place) -> None:
    """The colours of a scale from left to right, and what its ends and its middle stand for."""
    (left, top), (width, height) = place, SCALE
    for column in range(width):
        color = scale.table[round(column / (width - 1) * (STEPS - 1))]
        draw.line([(left + column, top), (left + column, top + height - 1)], tuple(map(int, color)))
    draw.rectangle([left - 1, top - 1, left + width, top + height], outline=LINE)
    middle = (scale.low + scale.high) / 2
    for value, column, anchor in ((scale.low, 0, "la"), (middle, width // 2, "ma"), (scale.high, width, "ra")):
        write(draw, (left + column, top + height + 4), format_number(value), SMALL, GREY, anchor)


def draw_bars(values: Array, names: Sequence[str] = ()) -> Image.Image:
    """Numbers as bars from a line at zero; where they are more than pixels, of neighbours the farthest from 0.

    The bar of a number that is not finite goes over the whole height, in a colour of its own.
    """
    image = Image.new("RGB", BARS, PAPER)
    _draw_bars(ImageDraw.Draw(image), values, names or _number(values), 0)
    return image


def draw_statistics(values: Array, names: Sequence[str]) -> Image.Image:
    """The bins of a histogram as bars, and above them the other statistics in words."""
    image = Image.new("RGB", BARS, PAPER)
    draw = ImageDraw.Draw(image)
    figures = [
        f"{name} {format_number(value)}" for name, value in zip(names, values, strict=True) if not name.startswith(BINS)
    ]
    top = 0
    for line in _break_lines(figures, BARS[0]):
        write(draw, (0, top), line, TEXT)
        top += TEXT + 6
    bins = np.asarray(values)[[name.startswith(BINS) for name in names]]
    if bins.size:
        _draw_bars(draw, bins, _number(bins), top)
    return image


def _number(values: Array) -> list[str]:
    """The numbers of bars; none where they are too many to stand below these."""
    return [str(number) for number in range(np.size(values))] if np.size(values) <= MAX_NUMBERED else []


def _break_lines(words: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]}    {word}" if lines else word
        if lines and measure_text(longer, TEXT) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _draw_bars(draw: ImageDraw.ImageDraw, values: Array, names: Sequence[str], top: int) -> None:
    """Bars from some height down to the foot of a chart."""
    width, height = BARS
    foot = height - TEXT - 6
    shown = _pick_extremes(np.asarray(values, np.float64).reshape(-1), width)
    finite = np.append(shown[np.isfinite(shown)], 0.0)
    low, high = float(finite.min()), float(finite.max())
    per_unit = (foot - top - 2) / (high - low) if high > low else 0.0
    zero = top + 1 + per_unit * high
    step = width / max(len(shown), 1)
    for place, value in enumerate(shown):
        left = round(place * step)
        right = max(round((place + 1) * step) - 1 - (1 if step >= 4 else 0), left)
        end = zero - per_unit * value if np.isfinite(value) else foot
        upper, lower = (min(end, zero), max(end, zero)) if np.isfinite(value) else (top, foot)
        draw.rectangle([left, upper, right, lower], BAR if np.isfinite(value) else NOT_FINITE)
    draw.line([(0, zero), (width, zero)], GREY)
    if names:
        for place, name in enumerate(names):
            middle = round((place + 0.5) * step)
            write(draw, (middle, foot + 6), cut_text(name, SMALL, int(step) - 2), SMALL, GREY, "ma")
    else:
        write(draw, (0, foot + 6), "0", SMALL, GREY)
        write(draw, (width, foot + 6), str(max(np.size(values) - 1, 0)), SMALL, GREY, "ra")


def _pick_extremes(values: Array, most: int) -> Array:
    if len(values) <= most:
        return values
    strength = np.where(np.isfinite(values), np.abs(values), np.inf)
    parts = np.array_split(np.arange(len(values)), most)
    picked: Array = values[[part[strength[part].argmax()] for part in parts]]
    return picked

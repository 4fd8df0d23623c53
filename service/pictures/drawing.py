"""What sheets are drawn of: words, tiles, a scale of colours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from layertap.service.pictures.colormaps import STEPS, Scale

Array = NDArray[Any]
Color = tuple[int, int, int]
Place = tuple[int, int]
Size = tuple[int, int]

PAPER: Color = (255, 255, 255)
INK: Color = (24, 24, 27)
GREY: Color = (113, 113, 122)
LINE: Color = (212, 212, 216)
TITLE, TEXT, SMALL = 18, 14, 12  # sizes of letters
GAP, CAPTION = 6, 16
TILE = 96  # pixels that the longer side of a tile has about, where a number is more than one
SCALE = (220, 10)
SCALE_HEIGHT = SCALE[1] + 4 + SMALL + 3  # with the numbers below it
SEPARATOR = "   \N{MIDDLE DOT}   "


@dataclass(frozen=True)
class Canvas:
    """A picture, and what draws on it."""

    image: Image.Image
    draw: ImageDraw.ImageDraw

    @classmethod
    def of_size(cls, size: Size) -> Canvas:
        """An empty one."""
        image = Image.new("RGB", size, PAPER)
        return cls(image, ImageDraw.Draw(image))

    def write(self, place: Place, text: str, size: int, color: Color = INK, anchor: str = "la") -> None:
        """Write a line of text; ``anchor`` says which part of it is at the place, as in Pillow."""
        self.draw.text(place, text, color, get_font(size), anchor)


@cache
def get_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own letters."""
    return ImageFont.load_default(size)


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


def break_lines(words: list[str], size: int, width: int) -> list[str]:
    """Words in lines that are no wider than so many pixels, where a word alone is not."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]}    {word}" if lines else word
        if lines and measure_text(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def format_number(value: float) -> str:
    """Four digits of a number; of one that has five or six before the point all of these."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def format_range(values: Array) -> str:
    """The least and the greatest of some numbers, and what else is to be said of them."""
    finite = values[np.isfinite(values)]
    parts = [f"{format_number(finite.min())} to {format_number(finite.max())}" if finite.size else "no finite number"]
    if finite.size < values.size:
        parts.append(f"{values.size - finite.size} not finite")
    if finite.size and not finite.any():
        parts.append("all zeros: there is nothing to see")
    return SEPARATOR.join(parts)


def choose_zoom(height: int, width: int, side: int = TILE) -> int:
    """How many pixels a side a number has in a tile."""
    return max(1, round(side / max(height, width, 1)))


def draw_tile(values: Array, scale: Scale, zoom: int) -> Image.Image:
    """Numbers, (H, W), each a square of ``zoom`` pixels in its colour."""
    colors = scale.to_colors(values)
    return Image.fromarray(np.ascontiguousarray(colors.repeat(zoom, 0).repeat(zoom, 1)))


def draw_scale(canvas: Canvas, scale: Scale, place: Place, width: int = SCALE[0]) -> None:
    """The colours of a scale from left to right, and what its ends and its middle stand for."""
    (left, top), height = place, SCALE[1]
    for column in range(width):
        color = scale.table[round(column / (width - 1) * (STEPS - 1))]
        canvas.draw.line([(left + column, top), (left + column, top + height - 1)], tuple(map(int, color)))
    canvas.draw.rectangle([left - 1, top - 1, left + width, top + height], outline=LINE)
    middle = (scale.low + scale.high) / 2
    for value, column, anchor in ((scale.low, 0, "la"), (middle, width // 2, "ma"), (scale.high, width, "ra")):
        canvas.write((left + column, top + height + 4), format_number(value), SMALL, GREY, anchor)

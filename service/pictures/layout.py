"""The layout and text of a sheet: cells form blocks, and blocks of one size a section below its head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from layertap.service.pictures.colormaps import STEPS, Scale

Place = tuple[int, int]
Size = tuple[int, int]

PAPER, INK, GREY, LINE = "#ffffff", "#18181b", "#71717a", "#d4d4d8"
TITLE, TEXT, SMALL = 18, 14, 12  # font sizes
MARGIN, GAP = 28, 6
WIDTH = 900  # of a sheet; more if a single input needs it
HEAD = TITLE + TEXT + 22  # above the blocks of a section: its title and description
WORDS = SMALL + 4  # a line of text above a cell or a block
SCALE = (220, 10)
SCALE_HEIGHT = SCALE[1] + 4 + SMALL + 3  # with the numbers below it
SEPARATOR = "   \N{MIDDLE DOT}   "


@dataclass(frozen=True)
class Cell:
    """An image, with lines of text above it and a scale below it if the layout has room for them."""

    image: Image.Image
    words: Sequence[str] = ()
    scale: Scale | None = None


@dataclass(frozen=True)
class Content:
    """The content of a section: its title, description, a colour scale if all cells share one, and ``blocks``.

    A block is a caption and cells; if the layout ``leads``, the first cell may be None.
    """

    title: str
    parts: Sequence[str]
    scale: Scale | None
    blocks: Iterator[tuple[str, Sequence[Cell | None]]]


@dataclass(frozen=True)
class Layout:
    """A head, and below it ``rows`` blocks of ``cells`` in ``columns``, with images of at most ``size``.

    ``leads``: one more cell comes before the others, in a column of its own. ``captioned``: blocks have captions.
    ``lines`` of text above each image; ``scaled``: a scale below it.
    """

    rows: int
    cells: int
    columns: int
    size: Size
    leads: bool = False
    captioned: bool = False
    lines: int = 0
    scaled: bool = False

    @property
    def whole(self) -> Size:
        """Width and height of the whole section."""
        (width, height), across = self._block, self._across
        return across * (width + MARGIN) - MARGIN, HEAD + ceil(self.rows / across) * height

    @property
    def _cell(self) -> Size:
        """Width and height of a cell, including the gaps after it."""
        below = (GAP + SCALE_HEIGHT) * self.scaled + GAP
        return self.size[0] + GAP, WORDS * self.lines + self.size[1] + below

    @property
    def _block(self) -> Size:
        """Width of a block, and its height with its caption and the gap after it."""
        width, height = self._cell
        down = ceil(self.cells / self.columns)
        return (self.columns + self.leads) * width - GAP, WORDS * self.captioned + down * height + GAP

    @property
    def _across(self) -> int:
        """The number of blocks side by side."""
        return max(1, min(self.rows, (2 * WIDTH) // (self._block[0] + MARGIN)))

    def draw(self, image: Image.Image, top: int, content: Content) -> None:
        """Draw the section from ``top`` downwards."""
        room, scale = image.width - 2 * MARGIN, content.scale
        if scale is not None:
            room -= SCALE[0] + MARGIN
            draw_scale(image, scale, (image.width - MARGIN - SCALE[0], top + 4), SCALE[0])
        write(image, (MARGIN, top), content.title, TITLE, INK, room)
        write(image, (MARGIN, top + TITLE + 6), join_words(content.parts), TEXT, GREY, room)
        width, height = self._block
        for row, (caption, cells) in enumerate(content.blocks):
            down, across = divmod(row, self._across)
            place = MARGIN + across * (width + MARGIN), top + HEAD + down * height
            self._draw_block(image, place, caption, cells)

    def _draw_block(self, image: Image.Image, place: Place, caption: str, cells: Sequence[Cell | None]) -> None:
        (left, top), (width, height) = place, self._cell
        if self.captioned:
            write(image, place, caption, SMALL, GREY, self._block[0])
            top += WORDS
        for number, cell in enumerate(cells, -self.leads):
            down, across = divmod(number, self.columns) if number >= 0 else (0, -1)
            if cell is not None:
                self._draw_cell(image, (left + (across + self.leads) * width, top + down * height), cell)

    def _draw_cell(self, image: Image.Image, place: Place, cell: Cell) -> None:
        left, top = place
        for line, words in enumerate(cell.words[: self.lines]):
            write(image, (left, top + WORDS * line), words, SMALL, GREY if line else INK, self.size[0])
        top += WORDS * self.lines
        image.paste(cell.image, (left, top))
        if self.scaled and cell.scale is not None:
            draw_scale(image, cell.scale, (left + 1, top + cell.image.height + GAP), cell.image.width - 2)


def split_evenly(count: int, most: int) -> int:
    """The number of columns, at most ``most``, that fills all lines about evenly."""
    return ceil(count / ceil(count / most)) if count else 1


def draw_tile(values: NDArray[Any], scale: Scale, zoom: int) -> Image.Image:
    """Draw numbers, (H, W), each as a square of ``zoom`` pixels in its colour."""
    colors = scale.to_colors(values)
    return Image.fromarray(np.ascontiguousarray(colors.repeat(zoom, 0).repeat(zoom, 1)))


def draw_scale(image: Image.Image, scale: Scale, place: Place, width: int) -> None:
    """Draw a colour scale from left to right, with the numbers at its ends and its middle."""
    (left, top), height = place, SCALE[1]
    colors = scale.table[np.rint(np.linspace(0, STEPS - 1, width)).astype(int)]
    ImageDraw.Draw(image).rectangle([left - 1, top - 1, left + width, top + height], outline=LINE)
    image.paste(Image.fromarray(colors[None].repeat(height, 0)), place)
    middle = (scale.low + scale.high) / 2
    for value, column, anchor in ((scale.low, 0, "la"), (middle, width // 2, "ma"), (scale.high, width, "ra")):
        below = (left + column, top + height + 4)
        ImageDraw.Draw(image).text(below, format_number(value), GREY, _get_font(SMALL), anchor)


def write(image: Image.Image, place: Place, text: str, size: int, color: str, width: int) -> None:
    """Write a line of text of at most ``width`` pixels: longer text ends in dots."""
    font = _get_font(size)
    text = "".join(each if each.isprintable() else "?" for each in text[:512])
    if font.getlength(text) > width:
        while text and font.getlength(text + "...") > width:
            text = text[: max(len(text) - max(1, len(text) // 16), 0)]
        text += "..."
    ImageDraw.Draw(image).text(place, text, color, font)


@cache
def _get_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font."""
    return ImageFont.load_default(size)


def join_words(words: Sequence[str]) -> str:
    """Join words in a line, without the empty ones."""
    return SEPARATOR.join(filter(None, words))


def format_number(value: float) -> str:
    """A number with four digits, or with all five or six digits before the point."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def format_range(values: NDArray[Any]) -> str:
    """The least and the greatest of some numbers, and remarks such as NaN."""
    finite = values[np.isfinite(values)]
    parts = [f"{format_number(finite.min())} to {format_number(finite.max())}" if finite.size else "no finite number"]
    if finite.size < values.size:
        parts.append(f"{values.size - finite.size} not finite")
    if finite.size and not finite.any():
        parts.append("all zeros: there is nothing to see")
    return SEPARATOR.join(parts)

"""How a sheet is laid out and written: cells make blocks, blocks of one size a section beneath its head."""

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
TITLE, TEXT, SMALL = 18, 14, 12  # sizes of letters
MARGIN, GAP = 28, 6
WIDTH = 900  # of a sheet, where an input alone does not need more
HEAD = TITLE + TEXT + 22  # above the blocks of a section: its title, and what it is
WORDS = SMALL + 4  # a line above a cell or a block
SCALE = (220, 10)
SCALE_HEIGHT = SCALE[1] + 4 + SMALL + 3  # with the numbers below it
SEPARATOR = "   \N{MIDDLE DOT}   "


@dataclass(frozen=True)
class Cell:
    """An image, with lines of words above it and a scale below it where the layout has room for them."""

    image: Image.Image
    words: Sequence[str] = ()
    scale: Scale | None = None


@dataclass(frozen=True)
class Content:
    """What a section shows: its title, what that is, a scale of colours where all of it has one, and ``blocks``.

    A block is a caption and cells; of a layout that ``leads`` the first one may be missing.
    """

    title: str
    parts: Sequence[str]
    scale: Scale | None
    blocks: Iterator[tuple[str, Sequence[Cell | None]]]


@dataclass(frozen=True)
class Layout:
    """A head, and below it ``rows`` blocks of ``cells`` in ``columns``, whose images have at most a ``size``.

    ``leads``: one cell more stands before the others, in a column of its own. ``captioned``: blocks have captions.
    ``lines`` of words stand above each image, and where it is ``scaled`` a scale below it.
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
        """Width and height of all."""
        (width, height), across = self._block, self._across
        return across * (width + MARGIN) - MARGIN, HEAD + ceil(self.rows / across) * height

    @property
    def _cell(self) -> Size:
        """Width and height of a cell, and of the gaps after it."""
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
        """How many blocks stand beside each other."""
        return max(1, min(self.rows, (2 * WIDTH) // (self._block[0] + MARGIN)))

    def draw(self, image: Image.Image, top: int, content: Content) -> None:
        """Draw it from some height down."""
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
    """How many columns make about even lines of so many cells, and are at most so many."""
    return ceil(count / ceil(count / most)) if count else 1


def draw_tile(values: NDArray[Any], scale: Scale, zoom: int) -> Image.Image:
    """Numbers, (H, W), each a square of ``zoom`` pixels in its colour."""
    colors = scale.to_colors(values)
    return Image.fromarray(np.ascontiguousarray(colors.repeat(zoom, 0).repeat(zoom, 1)))


def draw_scale(image: Image.Image, scale: Scale, place: Place, width: int) -> None:
    """The colours of a scale from left to right, and what its ends and its middle stand for."""
    (left, top), height = place, SCALE[1]
    colors = scale.table[np.rint(np.linspace(0, STEPS - 1, width)).astype(int)]
    ImageDraw.Draw(image).rectangle([left - 1, top - 1, left + width, top + height], outline=LINE)
    image.paste(Image.fromarray(colors[None].repeat(height, 0)), place)
    middle = (scale.low + scale.high) / 2
    for value, column, anchor in ((scale.low, 0, "la"), (middle, width // 2, "ma"), (scale.high, width, "ra")):
        below = (left + column, top + height + 4)
        ImageDraw.Draw(image).text(below, format_number(value), GREY, _get_font(SMALL), anchor)


def write(image: Image.Image, place: Place, text: str, size: int, color: str, width: int) -> None:
    """Write a line of text that is no wider than so many pixels: what is too long ends in dots."""
    font = _get_font(size)
    text = "".join(each if each.isprintable() else "?" for each in text[:512])
    if font.getlength(text) > width:
        while text and font.getlength(text + "...") > width:
            text = text[: max(len(text) - max(1, len(text) // 16), 0)]
        text += "..."
    ImageDraw.Draw(image).text(place, text, color, font)


@cache
def _get_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own letters."""
    return ImageFont.load_default(size)


def join_words(words: Sequence[str]) -> str:
    """Words in a line, without those that are empty."""
    return SEPARATOR.join(filter(None, words))


def format_number(value: float) -> str:
    """Four digits of a number; of one that has five or six before the point all of these."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def format_range(values: NDArray[Any]) -> str:
    """The least and the greatest of some numbers, and what else is to be said of them."""
    finite = values[np.isfinite(values)]
    parts = [f"{format_number(finite.min())} to {format_number(finite.max())}" if finite.size else "no finite number"]
    if finite.size < values.size:
        parts.append(f"{values.size - finite.size} not finite")
    if finite.size and not finite.any():
        parts.append("all zeros: there is nothing to see")
    return SEPARATOR.join(parts)

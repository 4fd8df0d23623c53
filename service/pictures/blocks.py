"""Blocks: what inputs have of a result, beside and below each other beneath its head."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from layertap.service.pictures.colormaps import Scale
from layertap.service.pictures.drawing import (
    CAPTION,
    GAP,
    GREY,
    SCALE,
    SEPARATOR,
    SMALL,
    TEXT,
    TITLE,
    Canvas,
    Place,
    Size,
    cut_text,
    draw_scale,
)
from layertap.service.pictures.panels import ResultInfo

MARGIN = 28
WIDTH = 900  # of a sheet, where an input alone does not need more
HEAD = TITLE + TEXT + 22  # above the blocks of a result: its title, and what it is


@dataclass(frozen=True)
class Blocks:
    """Blocks of one size, one for each of some rows, with a caption above each where ``captioned``."""

    rows: int
    block: Size
    captioned: bool

    @property
    def _across(self) -> int:
        """How many stand beside each other."""
        return max(1, min(self.rows, (2 * WIDTH) // (self.block[0] + MARGIN)))

    @property
    def _caption(self) -> int:
        return CAPTION if self.captioned else 0

    @property
    def size(self) -> Size:
        """Width and height of all of them, and of the head."""
        down = ceil(self.rows / self._across) if self.rows else 0
        width = self._across * (self.block[0] + MARGIN) - MARGIN
        return width, HEAD + down * (self.block[1] + self._caption + GAP)

    def locate(self, row: int, top: int) -> Place:
        """Where the block of a row begins, below its caption, if the head begins at ``top``."""
        down, across = divmod(row, self._across)
        left = MARGIN + across * (self.block[0] + MARGIN)
        return left, top + HEAD + down * (self.block[1] + self._caption + GAP) + self._caption

    def write_caption(self, canvas: Canvas, row: int, top: int, words: list[str]) -> None:
        """Write what a row is of above its block."""
        left, upper = self.locate(row, top)
        if self.captioned:
            text = SEPARATOR.join(filter(None, words))
            canvas.write((left, upper - CAPTION), cut_text(text, SMALL, self.block[0]), SMALL, GREY)


def draw_head(canvas: Canvas, title: str, parts: list[str], scale: Scale | None, top: int) -> None:
    """The title of a result, what it is in words, and its scale of colours where all of it has one."""
    width = canvas.image.width
    room = width - 2 * MARGIN - (SCALE[0] + MARGIN if scale is not None else 0)
    canvas.write((MARGIN, top), cut_text(title, TITLE, room), TITLE)
    canvas.write((MARGIN, top + TITLE + 6), cut_text(SEPARATOR.join(filter(None, parts)), TEXT, room), TEXT, GREY)
    if scale is not None:
        draw_scale(canvas, scale, (width - MARGIN - SCALE[0], top + 4))


def list_parts(info: ResultInfo) -> list[str]:
    """What a result is: its module, its site, its shape."""
    is_told = bool(info.method) or info.name.endswith(f":{info.site}")
    return [info.module, "" if is_told else info.site, " x ".join(map(str, info.shape))]


def describe_row(info: ResultInfo, row: int) -> list[str]:
    """What a row is of: its input, and a class where one is told."""
    return [info.name_row(row), *info.captions[row : row + 1]]

"""Maps of explanations: all methods and classes beside the picture that they are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.service.pictures.blocks import Blocks, describe_row, draw_head, list_parts
from layertap.service.pictures.colormaps import Scale
from layertap.service.pictures.drawing import (
    CAPTION,
    GAP,
    GREY,
    INK,
    SCALE_HEIGHT,
    SEPARATOR,
    SMALL,
    TEXT,
    Canvas,
    Place,
    Size,
    cut_text,
    draw_scale,
    draw_tile,
    format_range,
)
from layertap.service.pictures.overlay import OVERLAY, Original, find_map_scale, lay_over, stretch
from layertap.service.pictures.panels import ResultInfo, find_kind

Array = NDArray[Any]

MAX_COLUMNS = 4  # of maps beside a picture
TITLES = TEXT + 7 + CAPTION  # above a map of several: its name, and what it is of


@dataclass(frozen=True)
class MapSection:
    """Maps of the same inputs; ``height``: that of the highest picture, ``shown``: whether pictures are known.

    Each input has a block: its picture, once, and beside it the maps over it. One map has its scale in the head,
    several have their own below them; a map has one scale for all inputs.
    """

    infos: tuple[ResultInfo, ...]
    height: int
    shown: bool

    @property
    def size(self) -> Size:
        """Width and height."""
        return self._blocks.size

    @property
    def _several(self) -> bool:
        return len(self.infos) > 1

    @cached_property
    def _columns(self) -> int:
        """How many maps stand beside each other: the classes of a method, or as many as make even lines."""
        counts = set(Counter(info.method for info in self.infos).values())
        if len(counts) == 1 and 1 < max(counts) <= MAX_COLUMNS:
            return max(counts)
        return ceil(len(self.infos) / ceil(len(self.infos) / MAX_COLUMNS))

    @cached_property
    def _cell(self) -> Size:
        around = TITLES + SCALE_HEIGHT + 3 * GAP if self._several else 0
        return OVERLAY + GAP, self.height + around

    @cached_property
    def _blocks(self) -> Blocks:
        first = self.infos[0]
        down = ceil(len(self.infos) / self._columns)
        size = ((self._columns + self.shown) * self._cell[0] - GAP, down * self._cell[1])
        return Blocks(first.rows, size, first.rows > 1 or (not self._several and bool(first.captions)))

    def paint(self, canvas: Canvas, top: int, arrays: Mapping[str, Array], originals: Mapping[int, Original]) -> None:
        """Draw it from some height down."""
        first = self.infos[0]
        rows = {
            info.name: [find_kind(info).cut(info, row)[0] for row in info.split(arrays[info.name])]
            for info in self.infos
        }
        scales = {info.name: find_map_scale(_join(rows[info.name]), info.is_share) for info in self.infos}
        if self._several:
            methods = ", ".join(dict.fromkeys(info.method for info in self.infos))
            draw_head(canvas, methods, [f"{len(self.infos)} maps, each with a scale of its own"], None, top)
        else:
            parts = [*list_parts(first), format_range(_join(first.split(arrays[first.name])))]
            draw_head(canvas, first.name, parts, scales[first.name], top)
        for row in range(first.rows):
            words = [first.name_row(row)] if self._several else describe_row(first, row)
            self._blocks.write_caption(canvas, row, top, words)
            place = self._blocks.locate(row, top)
            original = originals.get(first.find_place(row))
            if original is not None:
                self._draw_original(canvas, original, place)
            for position, info in enumerate(self.infos):
                down, across = divmod(position, self._columns)
                left = place[0] + (across + self.shown) * self._cell[0]
                corner = (left, place[1] + down * self._cell[1])
                self._draw_map(canvas, info, row, rows[info.name][row], scales[info.name], corner, original)

    def _draw_original(self, canvas: Canvas, original: Original, place: Place) -> None:
        """The picture, once."""
        left, top = place
        if self._several:
            canvas.write((left, top), "picture", TEXT, INK)
            if not original.is_seen_whole:
                canvas.write((left, top + TEXT + 6), "the model sees what is not dark", SMALL, GREY)
            top += TITLES
        canvas.image.paste(original.image, (left, top))

    def _draw_map(
        self,
        canvas: Canvas,
        info: ResultInfo,
        row: int,
        values: Array,
        scale: Scale,
        place: Place,
        original: Original | None,
    ) -> None:
        """A map of one input, with its name and its scale where it is one of several."""
        left, top = place
        if self._several:
            canvas.write((left, top), cut_text(info.name, TEXT, OVERLAY), TEXT, INK)
            words = SEPARATOR.join([*info.captions[row : row + 1], format_range(values)])
            canvas.write((left, top + TEXT + 6), cut_text(words, SMALL, OVERLAY), SMALL, GREY)
            top += TITLES
        image = lay_over(original, values, scale) if original is not None else draw_map(values, scale)
        canvas.image.paste(image, (left, top))
        if self._several:
            draw_scale(canvas, scale, (left + 1, top + image.height + GAP), image.width - 2)


def draw_map(values: Array, scale: Scale) -> Any:
    """A map alone, of about ``OVERLAY`` pixels a side, and of no more."""
    height, width = values.shape
    if max(height, width) > OVERLAY:
        shrink = OVERLAY / max(height, width)
        values = stretch(values, (max(1, round(width * shrink)), max(1, round(height * shrink))))
    return draw_tile(values, scale, max(1, OVERLAY // max(values.shape)))


def _join(maps: Sequence[Array]) -> Array:
    return np.concatenate([each.reshape(-1) for each in maps]) if maps else np.zeros(0)

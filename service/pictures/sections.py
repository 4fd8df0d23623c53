"""Sections of a sheet: a result as tiles or as a chart, with its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layertap.service.pictures.blocks import WIDTH, Blocks, describe_row, draw_head, list_parts
from layertap.service.pictures.charts import HEIGHT, draw_bars, draw_channels, draw_statistics, measure_channels
from layertap.service.pictures.colormaps import Scale, find_scale
from layertap.service.pictures.drawing import (
    CAPTION,
    GAP,
    GREY,
    SMALL,
    TILE,
    Canvas,
    Place,
    Size,
    choose_zoom,
    draw_tile,
    format_range,
)
from layertap.service.pictures.options import PictureOptions
from layertap.service.pictures.overlay import Original, crop_seen, find_map_scale, lay_grid_over
from layertap.service.pictures.panels import ResultInfo, choose_tiles, count_tiles, find_kind, is_over_pictures

Array = NDArray[Any]
Originals = Mapping[int, Original]  # by the places of inputs in the request

COLUMNS, COLUMNS_OF_SEVERAL = 8, 4
GRID_TILE, GRID_COLUMNS, GRID_COLUMNS_OF_SEVERAL = (
    140,
    7,
    5,
)  # of heads over pictures: a patch is to be seen, and what is in it
NARROW = 436  # charts of several inputs


class Section(Protocol):
    """A part of a sheet."""

    @property
    def size(self) -> Size:
        """Width and height."""

    def paint(self, canvas: Canvas, top: int, arrays: Mapping[str, Array], originals: Originals) -> None:
        """Draw it from some height down."""


@dataclass(frozen=True)
class TileSection:
    """A result as tiles; heads of attention over the pictures whose patches they are of, where these are ``shown``."""

    info: ResultInfo
    options: PictureOptions
    shown: bool

    @property
    def size(self) -> Size:
        """Width and height."""
        return self._blocks.size

    @cached_property
    def _over(self) -> bool:
        return self.shown and is_over_pictures(self.info)

    @cached_property
    def _zoom(self) -> int:
        _, height, width = find_kind(self.info).measure(self.info)
        return choose_zoom(height, width, GRID_TILE if is_over_pictures(self.info) else TILE)

    @cached_property
    def _tiles(self) -> int:
        return count_tiles(self.info, self.options)

    @cached_property
    def _columns(self) -> int:
        cells, alone = max(self._tiles + self._over, 1), self.info.rows == 1
        if not is_over_pictures(self.info):
            return min(cells, COLUMNS if alone else COLUMNS_OF_SEVERAL)
        lines = ceil(cells / (GRID_COLUMNS if alone else GRID_COLUMNS_OF_SEVERAL))
        return ceil(cells / lines)

    @cached_property
    def _cell(self) -> Size:
        kind = find_kind(self.info)
        _, height, width = kind.measure(self.info)
        return width * self._zoom + GAP, height * self._zoom + (CAPTION if kind.noun else 0) + GAP

    @cached_property
    def _blocks(self) -> Blocks:
        down = ceil((self._tiles + self._over) / self._columns)
        size = (self._columns * self._cell[0] - GAP, down * self._cell[1])
        return Blocks(self.info.rows, size, self.info.rows > 1 or bool(self.info.captions))

    def paint(self, canvas: Canvas, top: int, arrays: Mapping[str, Array], originals: Originals) -> None:
        """Draw it from some height down."""
        info, kind = self.info, find_kind(self.info)
        rows = [kind.cut(info, row) for row in info.split(arrays[info.name])]
        chosen = [choose_tiles(tiles, self.options) for tiles in rows]
        drawn = [tiles[numbers] for tiles, numbers in zip(rows, chosen, strict=True)]
        shown = _join(drawn)
        find = partial(find_map_scale, is_share=info.is_share) if self._over else find_scale
        scale = find(shown, signed=info.is_signed)
        draw_head(
            canvas, info.name, [*list_parts(info), format_range(_join(rows)), self._describe_choice()], scale, top
        )
        for row, (tiles, numbers) in enumerate(zip(drawn, chosen, strict=True)):
            self._blocks.write_caption(canvas, row, top, describe_row(info, row))
            original = originals.get(info.find_place(row)) if self._over else None
            self._draw_block(canvas, tiles, numbers, scale, self._blocks.locate(row, top), original)

    def _describe_choice(self) -> str:
        kind = find_kind(self.info)
        total = kind.measure(self.info)[0]
        which = "the strongest" if self.options.order == "strongest" else "the first"
        return f"{which} {self._tiles} of {total} {kind.noun}" if self._tiles < total else ""

    def _draw_block(
        self, canvas: Canvas, tiles: Array, numbers: list[int], scale: Scale, place: Place, original: Original | None
    ) -> None:
        """What one input has of it, after the part of its picture that the model sees, where tiles are over this."""
        info, kind = self.info, find_kind(self.info)
        _, height, width = kind.measure(info)
        seen = crop_seen(original, (width * self._zoom, height * self._zoom)) if original is not None else None
        names = info.channels if info.channels is not None and kind.noun == "channels" else None
        cells: list[tuple[Image.Image, str]] = [(seen, "seen")] if seen is not None else []
        for values, number in zip(tiles, numbers, strict=True):
            tile = draw_tile(values, scale, self._zoom) if seen is None else lay_grid_over(seen, values, scale)
            cells.append((tile, str(names[number] if names else number)))
        for position, (image, name) in enumerate(cells):
            down, across = divmod(position, self._columns)
            corner = (place[0] + across * self._cell[0], place[1] + down * self._cell[1])
            canvas.image.paste(image, corner)
            if kind.noun:
                canvas.write((corner[0], corner[1] + image.height + 3), name, SMALL, GREY)


@dataclass(frozen=True)
class ChartSection:
    """A result as a chart."""

    info: ResultInfo

    @property
    def size(self) -> Size:
        """Width and height."""
        return self._blocks.size

    @cached_property
    def _blocks(self) -> Blocks:
        info = self.info
        height = measure_channels(info.columns or ()) if find_kind(info).drawing == "channels" else HEIGHT
        return Blocks(info.rows, (WIDTH if info.rows == 1 else NARROW, height), info.rows > 1 or bool(info.captions))

    def paint(self, canvas: Canvas, top: int, arrays: Mapping[str, Array], originals: Originals) -> None:
        """Draw it from some height down."""
        info, kind = self.info, find_kind(self.info)
        rows = info.split(arrays[info.name])
        values = format_range(_join(rows)) if kind.drawing == "bars" else ""  # statistics are each of another kind
        draw_head(canvas, info.name, [*list_parts(info), values], None, top)
        for row, array in enumerate(rows):
            self._blocks.write_caption(canvas, row, top, describe_row(info, row))
            canvas.image.paste(self._draw_chart(array), self._blocks.locate(row, top))

    def _draw_chart(self, array: Array) -> Image.Image:
        info, width, drawing = self.info, self._blocks.block[0], find_kind(self.info).drawing
        if drawing == "channels":
            return draw_channels(array, info.columns or (), width, info.channels)
        if drawing == "statistics":
            return draw_statistics(array, info.columns or (), width)
        return draw_bars(array, width)


def _join(rows: list[Array]) -> Array:
    return np.concatenate([each.reshape(-1) for each in rows]) if rows else np.zeros(0)

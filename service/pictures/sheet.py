"""A sheet: results below each other, each with a title and a scale of colours, inputs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from layertap.models.errors import TooLargeError
from layertap.service.pictures.colormaps import Scale, find_scale
from layertap.service.pictures.drawing import (
    BARS,
    GREY,
    LINE,
    PAPER,
    SCALE,
    SMALL,
    TEXT,
    TITLE,
    choose_zoom,
    cut_text,
    draw_bars,
    draw_scale,
    draw_statistics,
    draw_tile,
    format_number,
    write,
)
from layertap.service.pictures.options import PictureOptions
from layertap.service.pictures.overlay import Original, lay_over, stretch
from layertap.service.pictures.panels import ResultInfo, choose_tiles, count_tiles, find_kind

Array = NDArray[Any]
Size = tuple[int, int]

MAX_PIXELS = 16 * 10**6
MAX_SIDE = 16_383  # of WebP; none of PNG, but who would look at it
MARGIN, GAP, CAPTION = 28, 6, 16
HEAD = TITLE + TEXT + 22  # above the tiles of a result: its title, and what it is
COLUMNS, COLUMNS_OF_SEVERAL = 8, 4
SEPARATOR = "   \N{MIDDLE DOT}   "
WIDTH = 900  # of a sheet, where an input alone does not need more
CHARTS = ("bars", "statistics")
COMMON = 0.99  # the share of a map's numbers that its scale is made for
OVERLAY = 288  # pixels a side of a picture with a map over it, and of the picture beside it
_HINT = "ask for fewer layers, tiles or inputs, or use application/x-npz (format=npz)"


@dataclass(frozen=True)
class _Section:
    """Where a result is drawn: the size of what one input has, and how many inputs stand beside each other."""

    info: ResultInfo
    block: Size
    columns: int  # of tiles
    zoom: int
    tiles: int
    across: int

    @property
    def head(self) -> int:
        """The height of an input's number above its tiles."""
        return CAPTION if self.info.rows > 1 or self.info.captions else 0

    @property
    def size(self) -> Size:
        """Width and height of all of it."""
        down = ceil(self.info.rows / self.across) if self.info.rows else 0
        width = self.across * (self.block[0] + MARGIN) - MARGIN
        return width, HEAD + down * (self.block[1] + self.head + GAP)


def check_size(infos: Sequence[ResultInfo], options: PictureOptions) -> None:
    """TooLargeError where the sheet of some results would have more pixels than it may; nothing is drawn."""
    width, height = _measure(_arrange(infos, options))
    if width * height > MAX_PIXELS:
        detail = f"the picture would have {width * height} pixels ({width} by {height}), the limit is {MAX_PIXELS}"
        raise TooLargeError(detail, hint=_HINT)
    if max(width, height) > MAX_SIDE:
        detail = f"the picture would have a side of {max(width, height)} pixels, the limit is {MAX_SIDE}"
        raise TooLargeError(detail, hint=_HINT)


def draw_sheet(
    infos: Sequence[ResultInfo],
    arrays: Mapping[str, Array],
    options: PictureOptions,
    originals: Sequence[Original | None] = (),
) -> Image.Image:
    """The sheet of some results, RGB, of at most ``MAX_PIXELS`` pixels; TooLargeError.

    ``originals`` are the pictures of the inputs, row by row, where they are known, in a square of ``OVERLAY`` a side.
    """
    check_size(infos, options)
    sections = _arrange(infos, options, originals)
    sheet = Image.new("RGB", _measure(sections), PAPER)
    draw = ImageDraw.Draw(sheet)
    top = MARGIN
    for number, section in enumerate(sections):
        if number:
            draw.line([(MARGIN, top - MARGIN // 2), (sheet.width - MARGIN, top - MARGIN // 2)], LINE)
        _draw_section(sheet, draw, section, arrays[section.info.name], top, options, originals)
        top += section.size[1] + MARGIN
    return sheet


def _arrange(
    infos: Sequence[ResultInfo], options: PictureOptions, originals: Sequence[Original | None] = ()
) -> list[_Section]:
    """Where each result is drawn; where the originals are not known yet, with room for any."""
    heights = [OVERLAY if each is None else each.image.height for each in originals]
    return [_make_section(info, options, max(heights, default=OVERLAY)) for info in infos]


def _make_section(info: ResultInfo, options: PictureOptions, overlay_height: int) -> _Section:
    kind, tiles = find_kind(info), count_tiles(info, options)
    _, height, width = kind.measure(info)
    if kind.drawing in CHARTS:
        block, zoom, columns = BARS, 1, 1
    elif kind.drawing == "overlay":
        block, zoom, columns = (2 * OVERLAY + GAP, overlay_height), 1, 1
    else:
        zoom = choose_zoom(height, width)
        columns = max(1, min(tiles, COLUMNS if info.rows == 1 else COLUMNS_OF_SEVERAL))
        down = ceil(tiles / columns)
        label = CAPTION if kind.noun else 0
        block = (columns * (width * zoom + GAP) - GAP, down * (height * zoom + label + GAP))
    across = max(1, min(info.rows, (2 * WIDTH) // (block[0] + MARGIN)))
    return _Section(info, block, columns, zoom, tiles, across)


def _measure(sections: Sequence[_Section]) -> Size:
    widths, heights = zip(*(section.size for section in sections), strict=True)
    return max(WIDTH, *widths) + 2 * MARGIN, sum(heights) + (len(heights) + 1) * MARGIN


def _draw_section(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    section: _Section,
    array: Array,
    top: int,
    options: PictureOptions,
    originals: Sequence[Original | None],
) -> None:
    info, kind = section.info, find_kind(section.info)
    rows = [kind.cut(info, row) for row in info.split(array)]
    chosen = [choose_tiles(tiles, options) for tiles in rows]
    drawn = [tiles[numbers] for tiles, numbers in zip(rows, chosen, strict=True)]
    shown = np.concatenate([each.reshape(-1) for each in drawn]) if drawn else np.zeros(0)
    if kind.drawing == "overlay":
        shown = _clip_extremes(shown)
    scale = find_scale(shown, info.is_signed)
    whole = np.concatenate([each.reshape(-1) for each in rows]) if rows else np.zeros(0)
    _draw_head(draw, section, whole, scale, sheet.width, top, options)
    for place, (tiles, numbers) in enumerate(zip(drawn, chosen, strict=True)):
        down, across = divmod(place, section.across)
        left = MARGIN + across * (section.block[0] + MARGIN)
        upper = top + HEAD + down * (section.block[1] + section.head + GAP)
        if section.head:
            words = [info.name_row(place), *info.captions[place : place + 1]]
            text = SEPARATOR.join(filter(None, words))
            write(draw, (left, upper), cut_text(text, SMALL, section.block[0]), SMALL, GREY)
        original = originals[place] if len(originals) == info.rows else None
        _draw_block(sheet, draw, section, tiles, numbers, scale, (left, upper + section.head), original)


def _clip_extremes(values: Array) -> Array:
    """Numbers of a map, and zero, which stands for nothing; a few far from all others do not set the scale."""
    finite = values[np.isfinite(values)].astype(np.float64)
    bound = np.quantile(np.abs(finite), COMMON) if finite.size else 0.0
    clipped: Array = np.append(finite.clip(-bound, bound) if bound > 0 else finite, 0.0)
    return clipped


def _draw_head(
    draw: ImageDraw.ImageDraw,
    section: _Section,
    array: Array,
    scale: Scale,
    width: int,
    top: int,
    options: PictureOptions,
) -> None:
    info, kind = section.info, find_kind(section.info)
    room = width - 2 * MARGIN - SCALE[0] - MARGIN
    write(draw, (MARGIN, top), cut_text(info.name, TITLE, room), TITLE)
    finite = array[np.isfinite(array)]
    values = f"{format_number(finite.min())} to {format_number(finite.max())}" if finite.size else "no finite number"
    values = "" if kind.drawing == "statistics" else values  # each is of another kind
    total = kind.measure(info)[0]
    parts = [info.module, info.site, " x ".join(map(str, info.shape)), values]
    if finite.size < array.size:
        parts.append(f"{array.size - finite.size} not finite")
    if section.tiles < total:
        which = "the strongest" if options.order == "strongest" else "the first"
        parts.append(f"{which} {section.tiles} of {total} {kind.noun}")
    if finite.size and not finite.any():
        parts.append("all zeros: there is nothing to see")
    text = SEPARATOR.join(filter(None, parts))
    write(draw, (MARGIN, top + TITLE + 6), cut_text(text, TEXT, room), TEXT, GREY)
    if kind.drawing not in CHARTS:
        draw_scale(draw, scale, (width - MARGIN - SCALE[0], top + 4))


def _draw_block(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    section: _Section,
    tiles: Array,
    numbers: Sequence[int],
    scale: Scale,
    place: tuple[int, int],
    original: Original | None,
) -> None:
    """What one input has of a result."""
    info, kind = section.info, find_kind(section.info)
    left, top = place
    if kind.drawing in CHARTS:
        draw_chart = draw_statistics if kind.drawing == "statistics" else draw_bars
        sheet.paste(draw_chart(tiles.reshape(-1), info.columns or ()), place)
        return
    if kind.drawing == "overlay":
        _draw_overlay(sheet, tiles[0], scale, place, original)
        return
    names = info.channels if info.channels is not None and kind.noun == "channels" else None
    for position, (values, number) in enumerate(zip(tiles, numbers, strict=True)):
        down, across = divmod(position, section.columns)
        tile = draw_tile(values, scale, section.zoom)
        label = CAPTION if kind.noun else 0
        corner = (left + across * (tile.width + GAP), top + down * (tile.height + label + GAP))
        sheet.paste(tile, corner)
        if label:
            name = str(names[number] if names else number)
            write(draw, (corner[0], corner[1] + tile.height + 3), name, SMALL, GREY)


def _draw_overlay(
    sheet: Image.Image, values: Array, scale: Scale, place: tuple[int, int], original: Original | None
) -> None:
    """A picture, and beside it the map over it; the map alone where the picture is not known."""
    if original is None:
        height, width = values.shape
        if max(height, width) > OVERLAY:
            shrink = OVERLAY / max(height, width)
            values = stretch(values, (max(1, round(width * shrink)), max(1, round(height * shrink))))
        zoom = max(1, OVERLAY // max(values.shape))
        sheet.paste(draw_tile(values, scale, zoom), place)
        return
    sheet.paste(original.image, place)
    sheet.paste(lay_over(original, values, scale), (place[0] + original.image.width + GAP, place[1]))

"""Sections of a sheet: a result as tiles or as charts, explanations as maps beside the picture that they are of.

A way to draw is a row of ``WAYS``: how its cells are laid out, which follows from what is known of results without any
number, and what is in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layertap.service.pictures.charts import draw_chart, measure_chart
from layertap.service.pictures.colormaps import Scale, find_scale
from layertap.service.pictures.layout import (
    WIDTH,
    Cell,
    Content,
    Layout,
    draw_tile,
    format_range,
    join_words,
    split_evenly,
)
from layertap.service.pictures.options import PictureOptions
from layertap.service.pictures.overlay import (
    OVERLAY,
    Original,
    crop_seen,
    find_map_scale,
    lay_grid_over,
    lay_over,
    stretch,
)
from layertap.service.pictures.panels import Drawing, ResultInfo, choose_tiles, count_tiles, find_kind, is_over_pictures

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Infos = Sequence[ResultInfo]
Originals = Mapping[int, Original]  # by the places of inputs in the request

TILE, COLUMNS = 96, (8, 4)  # pixels of a tile's longer side, about; how many of one input, of several
HEAD_TILE, HEAD_COLUMNS = 140, (6, 4)  # of heads over pictures: a patch is to be seen, and what is in it
MAP_COLUMNS = 4
NARROW = 436  # charts of several inputs


@dataclass(frozen=True)
class Way:
    """A way to draw results beneath one head; without ``originals`` it is not known which inputs have pictures."""

    arrange: Callable[[Infos, PictureOptions, Originals | None], Layout]
    fill: Callable[[Infos, PictureOptions, Layout, Arrays, Originals], Content]


def _arrange_tiles(infos: Infos, options: PictureOptions, originals: Originals | None) -> Layout:
    """A cell for each tile; where heads are over pictures, what the model sees of these leads."""
    [info] = infos
    over, kind = is_over_pictures(info), find_kind(info)
    _, height, width = kind.measure(info)
    side, columns = (HEAD_TILE, HEAD_COLUMNS) if over else (TILE, COLUMNS)
    zoom = max(1, round(side / max(height, width, 1)))
    tiles = count_tiles(info, options)
    return Layout(
        info.rows,
        tiles,
        split_evenly(tiles, columns[info.rows > 1]),
        (width * zoom, height * zoom),
        leads=over and _has_pictures(info, originals),
        captioned=info.rows > 1 or bool(info.captions),
        lines=1 if kind.noun else 0,
    )


def _fill_tiles(infos: Infos, options: PictureOptions, layout: Layout, arrays: Arrays, originals: Originals) -> Content:
    """Tiles of one scale, over pictures where the layout has them."""
    [info] = infos
    kind = find_kind(info)
    rows = [kind.cut(info, row) for row in info.split(arrays[info.name])]
    chosen = [choose_tiles(tiles, options) for tiles in rows]
    drawn = _join([tiles[numbers] for tiles, numbers in zip(rows, chosen, strict=True)])
    scale = find_map_scale(drawn, info.is_share, info.is_signed) if layout.leads else find_scale(drawn, info.is_signed)
    total, zoom = kind.measure(info)[0], layout.size[0] // max(kind.measure(info)[2], 1)
    which = "the strongest" if options.order == "strongest" else "the first"
    choice = f"{which} {layout.cells} of {total} {kind.noun}" if layout.cells < total else ""
    names = info.channels if info.channels is not None and kind.noun == "channels" else range(total)

    def draw_block(row: int) -> tuple[str, list[Cell | None]]:
        original = originals.get(info.find_place(row)) if layout.leads else None
        seen = crop_seen(original, layout.size) if original is not None else None
        cells: list[Cell | None] = [Cell(seen, ["seen"]) if seen is not None else None] if layout.leads else []
        for number in chosen[row]:
            values = rows[row][number]
            image = draw_tile(values, scale, zoom) if seen is None else lay_grid_over(seen, values, scale)
            cells.append(Cell(image, [str(names[number])]))
        return _caption(info, row), cells

    parts = [*_describe(info), format_range(_join(rows)), choice]
    return Content(info.name, parts, scale, map(draw_block, range(len(rows))))


def _arrange_charts(infos: Infos, options: PictureOptions, originals: Originals | None) -> Layout:
    """A cell for each input."""
    [info] = infos
    size = (NARROW if info.rows > 1 else WIDTH, measure_chart(info))
    return Layout(info.rows, 1, 1, size, captioned=info.rows > 1 or bool(info.captions))


def _fill_charts(
    infos: Infos, options: PictureOptions, layout: Layout, arrays: Arrays, originals: Originals
) -> Content:
    """Charts, each with axes of its own."""
    [info] = infos
    rows = info.split(arrays[info.name])
    values = format_range(_join(rows)) if info.columns is None else ""  # statistics are each of another kind

    def draw_block(row: int) -> tuple[str, list[Cell | None]]:
        return _caption(info, row), [Cell(draw_chart(info, rows[row], layout.size))]

    return Content(info.name, [*_describe(info), values], None, map(draw_block, range(len(rows))))


def _arrange_maps(infos: Infos, options: PictureOptions, originals: Originals | None) -> Layout:
    """A cell for each map of the same inputs, after their pictures: a line for each method of a few classes."""
    first = infos[0]
    [count, *others] = set(Counter(info.method for info in infos).values())
    by_class = not others and 1 < count <= MAP_COLUMNS
    columns = count if by_class else split_evenly(len(infos), MAP_COLUMNS)
    known = [(originals or {}).get(first.find_place(row)) for row in range(first.rows)]
    height = max((each.image.height if each is not None else OVERLAY for each in known), default=OVERLAY)
    leads = _has_pictures(first, originals)
    return Layout(
        first.rows, len(infos), columns, (OVERLAY, height), leads, captioned=first.rows > 1, lines=2, scaled=True
    )


def _fill_maps(infos: Infos, options: PictureOptions, layout: Layout, arrays: Arrays, originals: Originals) -> Content:
    """Maps over pictures, or alone where there is none; each has one scale for all inputs."""
    first = infos[0]
    maps = [[find_kind(info).cut(info, row)[0] for row in info.split(arrays[info.name])] for info in infos]
    scales = [find_map_scale(_join(rows), info.is_share) for info, rows in zip(infos, maps, strict=True)]

    def draw_block(row: int) -> tuple[str, list[Cell | None]]:
        original = originals.get(first.find_place(row))
        cells = [_show(original)] if layout.leads else []
        for info, rows, scale in zip(infos, maps, scales, strict=True):
            image = lay_over(original, rows[row], scale) if original is not None else _draw_map(rows[row], scale)
            note = join_words([*info.captions[row : row + 1], format_range(rows[row])])
            cells.append(Cell(image, [info.name, note], scale))
        return first.name_row(row), cells

    methods = ", ".join(dict.fromkeys(info.method for info in infos))
    return Content(methods, _describe(first), None, map(draw_block, range(first.rows)))


def _show(original: Original | None) -> Cell | None:
    if original is None:
        return None
    return Cell(original.image, ["picture", "" if original.is_seen_whole else "the model sees what is not dark"])


def _draw_map(values: Array, scale: Scale) -> Image.Image:
    """A map alone, of about ``OVERLAY`` pixels a side, and of no more."""
    height, width = values.shape
    if max(height, width) > OVERLAY:
        shrink = OVERLAY / max(height, width)
        values = stretch(values, (max(1, round(width * shrink)), max(1, round(height * shrink))))
    return draw_tile(values, scale, max(1, OVERLAY // max(values.shape)))


def _has_pictures(info: ResultInfo, originals: Originals | None) -> bool:
    return originals is None or any(info.find_place(row) in originals for row in range(info.rows))


def _describe(info: ResultInfo) -> list[str]:
    """What a result is: its module, its site, its shape."""
    is_told = bool(info.method) or info.name.endswith(f":{info.site}")
    return [info.module, "" if is_told else info.site, " x ".join(map(str, info.shape))]


def _caption(info: ResultInfo, row: int) -> str:
    """What a row is of: its input, and a class where one is told."""
    return join_words([info.name_row(row), *info.captions[row : row + 1]])


def _join(rows: Sequence[Array]) -> Array:
    return np.concatenate([each.reshape(-1) for each in rows]) if rows else np.zeros(0)


WAYS: dict[Drawing, Way] = {
    "tiles": Way(_arrange_tiles, _fill_tiles),
    "charts": Way(_arrange_charts, _fill_charts),
    "maps": Way(_arrange_maps, _fill_maps),
}

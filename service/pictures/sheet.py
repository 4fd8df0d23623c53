"""A sheet: results one below the other, each with a title and a colour scale; inputs side by side.

A section is a result as tiles or as charts, or explanations as maps beside their picture. The layout of cells depends
on the properties of results only, not on their numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from layertap.models.errors import TooLargeError
from layertap.service.pictures.charts import check_installed, draw_chart, measure_chart
from layertap.service.pictures.colormaps import Scale, find_scale
from layertap.service.pictures.layout import (
    LINE,
    MARGIN,
    PAPER,
    WIDTH,
    Cell,
    Content,
    Layout,
    draw_tile,
    format_range,
    join_words,
    split_evenly,
)
from layertap.service.pictures.overlay import (
    OVERLAY,
    Original,
    crop_seen,
    find_map_scale,
    lay_grid_over,
    lay_over,
    stretch,
)
from layertap.service.pictures.panels import Drawing, ResultInfo, find_kind, is_over_pictures
from layertap.service.types import TILES

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Infos = Sequence[ResultInfo]
Originals = Mapping[int, Original]  # by the inputs' indexes in the request

MAX_PIXELS = 16 * 10**6
TILE, COLUMNS = 96, (8, 4)  # approximate pixels of a tile's longer side; columns for one input, for several
HEAD_TILE, HEAD_COLUMNS = 140, (6, 4)  # for heads over pictures, where patches must be recognisable
MAP_COLUMNS = 4
NARROW = 436  # charts of several inputs
_HINT = "ask for fewer layers, tiles, inputs, methods or classes, or use application/x-npz (format=npz)"


def check_sheet(infos: Infos, tiles: int = TILES) -> None:
    """Refuse a sheet with so many tiles of each result if it can't be drawn.

    The inputs' pictures are unknown here, so all sizes of these must fit.

    TooLargeError: too many pixels. NotInstalledError: charts without matplotlib.
    """
    width, height = _measure(_make_sections(infos, tiles, None))
    if width * height > MAX_PIXELS:
        detail = f"the picture would have {width * height} pixels ({width} by {height}), the limit is {MAX_PIXELS}"
        raise TooLargeError(detail, hint=_HINT)
    if any(find_kind(info).drawing == "charts" for info in infos):
        check_installed()


def shows_originals(infos: Infos) -> bool:
    """Whether a sheet of some results also shows the inputs' pictures, if known."""
    return any(find_kind(info).drawing == "maps" or is_over_pictures(info) for info in infos)


def draw_sheet(infos: Infos, arrays: Arrays, tiles: int = TILES, originals: Originals | None = None) -> Image.Image:
    """The sheet of some results, RGB; refused as by ``check_sheet``.

    ``originals``: the known pictures of the inputs by their indexes in the request, each in a square of ``OVERLAY`` a
    side.
    """
    check_sheet(infos, tiles)
    sections = _make_sections(infos, tiles, originals or {})
    image = Image.new("RGB", _measure(sections), PAPER)
    top = MARGIN
    for section in sections:
        if top > MARGIN:
            line = top - MARGIN // 2
            ImageDraw.Draw(image).line([(MARGIN, line), (image.width - MARGIN, line)], LINE)
        section.layout.draw(image, top, section.fill(arrays))
        top += section.layout.whole[1] + MARGIN
    return image


def _make_sections(infos: Infos, tiles: int, originals: Originals | None) -> list[Section]:
    """The sections from top to bottom: each result, or all maps of the same inputs.

    Without ``originals``, any input may have a picture.
    """
    groups: dict[object, list[ResultInfo]] = {}
    for info in infos:
        key = (info.rows, info.input_indexes) if find_kind(info).drawing == "maps" else info.name
        groups.setdefault(key, []).append(info)
    return [SECTIONS[find_kind(group[0]).drawing](group, tiles, originals) for group in groups.values()]


def _measure(sections: Sequence[Section]) -> tuple[int, int]:
    widths, heights = zip(*(section.layout.whole for section in sections), strict=True)
    return max(WIDTH, *widths) + 2 * MARGIN, sum(heights) + (len(heights) + 1) * MARGIN


class _Tiles:
    """A cell for each tile, all with one scale; heads over pictures have a leading cell with what the model sees."""

    def __init__(self, infos: Infos, tiles: int, originals: Originals | None) -> None:
        [self.info] = infos
        self.originals, self.kind = originals or {}, find_kind(self.info)
        self.total, height, width = self.kind.measure(self.info)
        over, several = is_over_pictures(self.info), self.info.rows > 1
        side, columns = (HEAD_TILE, HEAD_COLUMNS) if over else (TILE, COLUMNS)
        self.zoom = max(1, round(side / max(height, width, 1)))
        count = min(self.total, tiles)
        self.layout = Layout(
            self.info.rows,
            count,
            split_evenly(count, columns[several]),
            (width * self.zoom, height * self.zoom),
            leads=over and _has_pictures(self.info, originals),
            captioned=several or bool(self.info.captions),
            lines=1 if self.kind.noun else 0,
        )

    def fill(self, arrays: Arrays) -> Content:
        info, kind, layout = self.info, self.kind, self.layout
        rows = [kind.cut(info, row) for row in info.split(arrays[info.name])]
        drawn = _join([tiles[: layout.cells] for tiles in rows])
        is_map = layout.leads
        scale = find_map_scale(drawn, info.is_share, info.is_signed) if is_map else find_scale(drawn, info.is_signed)
        choice = f"the first {layout.cells} of {self.total} {kind.noun}" if layout.cells < self.total else ""
        names = info.channels if info.channels is not None and kind.noun == "channels" else range(self.total)

        def draw_block(row: int) -> tuple[str, list[Cell | None]]:
            original = self.originals.get(info.find_input(row)) if layout.leads else None
            seen = crop_seen(original, layout.size) if original is not None else None
            cells: list[Cell | None] = [Cell(seen, ["seen"]) if seen is not None else None] if layout.leads else []
            for number in range(layout.cells):
                values = rows[row][number]
                image = draw_tile(values, scale, self.zoom) if seen is None else lay_grid_over(seen, values, scale)
                cells.append(Cell(image, [str(names[number])]))
            return _caption(info, row), cells

        parts = [*_describe(info), format_range(_join(rows)), choice]
        return Content(info.name, parts, scale, map(draw_block, range(len(rows))))


class _Charts:
    """A cell for each input, with axes of its own."""

    def __init__(self, infos: Infos, tiles: int, originals: Originals | None) -> None:
        [self.info] = infos
        several = self.info.rows > 1
        size = (NARROW if several else WIDTH, measure_chart(self.info))
        self.layout = Layout(self.info.rows, 1, 1, size, captioned=several or bool(self.info.captions))

    def fill(self, arrays: Arrays) -> Content:
        info, size = self.info, self.layout.size
        rows = info.split(arrays[info.name])
        values = format_range(_join(rows)) if info.columns is None else ""  # each statistic has its own meaning
        blocks = ((_caption(info, row), [Cell(draw_chart(info, each, size))]) for row, each in enumerate(rows))
        return Content(info.name, [*_describe(info), values], None, blocks)


class _Maps:
    """A cell for each map of the same inputs, after their pictures: a line per method if there are few classes.

    Each map has one scale for all inputs. It is drawn over the picture, or alone if there is none.
    """

    def __init__(self, infos: Infos, tiles: int, originals: Originals | None) -> None:
        self.infos, self.originals = infos, originals or {}
        first = infos[0]
        [count, *others] = set(Counter(info.method for info in infos).values())
        by_class = not others and 1 < count <= MAP_COLUMNS
        known = [self.originals.get(first.find_input(row)) for row in range(first.rows)]
        self.layout = Layout(
            first.rows,
            len(infos),
            count if by_class else split_evenly(len(infos), MAP_COLUMNS),
            (OVERLAY, max((each.image.height if each is not None else OVERLAY for each in known), default=OVERLAY)),
            leads=_has_pictures(first, originals),
            captioned=first.rows > 1,
            lines=2,
            scaled=True,
        )

    def fill(self, arrays: Arrays) -> Content:
        first = self.infos[0]
        maps = [[find_kind(info).cut(info, row)[0] for row in info.split(arrays[info.name])] for info in self.infos]
        scales = [
            find_map_scale(_join(rows), is_share=info.is_share) for info, rows in zip(self.infos, maps, strict=True)
        ]

        def draw_block(row: int) -> tuple[str, list[Cell | None]]:
            original = self.originals.get(first.find_input(row))
            cells = [_show(original)] if self.layout.leads else []
            for info, rows, scale in zip(self.infos, maps, scales, strict=True):
                image = lay_over(original, rows[row], scale) if original is not None else _draw_map(rows[row], scale)
                note = join_words([*info.captions[row : row + 1], format_range(rows[row])])
                cells.append(Cell(image, [info.name, note], scale))
            return first.name_row(row), cells

        methods = ", ".join(dict.fromkeys(info.method for info in self.infos))
        return Content(methods, _describe(first), None, map(draw_block, range(first.rows)))


Section = _Tiles | _Charts | _Maps
SECTIONS: dict[Drawing, type[Section]] = {"tiles": _Tiles, "charts": _Charts, "maps": _Maps}


def _show(original: Original | None) -> Cell | None:
    if original is None:
        return None
    return Cell(original.image, ["picture", "" if original.is_seen_whole else "the model sees what is not dark"])


def _draw_map(values: Array, scale: Scale) -> Image.Image:
    """A map alone, scaled to almost ``OVERLAY`` pixels a side and no more."""
    height, width = values.shape
    if max(height, width) > OVERLAY:
        shrink = OVERLAY / max(height, width)
        values = stretch(values, (max(1, round(width * shrink)), max(1, round(height * shrink))))
    return draw_tile(values, scale, max(1, OVERLAY // max(values.shape)))


def _has_pictures(info: ResultInfo, originals: Originals | None) -> bool:
    return originals is None or any(info.find_input(row) in originals for row in range(info.rows))


def _describe(info: ResultInfo) -> list[str]:
    """A result's module, site and shape."""
    is_told = bool(info.method) or info.name.endswith(f":{info.site}")
    return [info.module, "" if is_told else info.site, " x ".join(map(str, info.shape))]


def _caption(info: ResultInfo, row: int) -> str:
    """The caption of a row: its input, and its class if known."""
    return join_words([info.name_row(row), *info.captions[row : row + 1]])


def _join(rows: Sequence[Array]) -> Array:
    return np.concatenate([each.reshape(-1) for each in rows]) if rows else np.zeros(0)

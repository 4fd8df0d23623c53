"""Sheets compared with the arrays that they are of: every number is a square of its own colour, in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from layertap.models.errors import TooLargeError
from layertap.service.pictures import charts, layout
from layertap.service.pictures.colormaps import DIVERGING, SEQUENTIAL
from layertap.service.pictures.overlay import Original, find_map_scale, lay_over
from layertap.service.pictures.panels import ResultInfo
from layertap.service.pictures.sheet import check_sheet, draw_sheet
from layertap.service.types import TILES

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(5)
LEFT, WIDTH = 28 + charts.LEFT, 900 - charts.LEFT - charts.RIGHT  # of the axes of a chart
TOP = 28 + layout.HEAD + charts.HEAD  # of the first axes: the words above them have its colours too


def info(array: Array, **changes: Any) -> ResultInfo:
    return ResultInfo(**{"name": "x", "module": "Conv2d", "site": "output", "shape": array.shape} | changes)


def draw(array: Array, tiles: int = TILES, **changes: Any) -> Array:
    return np.asarray(draw_sheet([info(array, **changes)], {"x": array}, tiles))


def look_up(values: Array, table: Array, low: float, high: float) -> Array:
    """The colours of numbers, by arithmetic of its own."""
    places = (values - low) / (high - low) * (len(table) - 1)
    return table[np.floor(places + 0.5).astype(int)]


def find_tile(sheet: Array, colors: Array) -> tuple[int, int, int]:
    """Where a tile of these colours stands, row and column, and how many pixels a side a number has; fails for none."""
    height, width = colors.shape[:2]
    found = (sheet == colors[0, 0]).all(-1)
    inner = np.zeros_like(found)  # no corner is right of, or below, a pixel of its own colour
    inner[1:] |= found[:-1]
    inner[:, 1:] |= found[:, :-1]
    corners = np.argwhere(found & ~inner)
    for zoom in range(min(96, sheet.shape[0] // height, sheet.shape[1] // width), 0, -1):
        inside = (corners <= [sheet.shape[0] - height * zoom, sheet.shape[1] - width * zoom]).all(1)
        places = corners[inside]
        for row, column in np.ndindex(height, width):
            pixels = sheet[places[:, 0] + row * zoom, places[:, 1] + column * zoom]
            places = places[(pixels == colors[row, column]).all(-1)]
        for top, left in places:
            tile = sheet[top : top + height * zoom, left : left + width * zoom]
            if (tile == colors.repeat(zoom, 0).repeat(zoom, 1)).all():
                return int(top), int(left), zoom
    raise AssertionError("no such tile is on the sheet")


def test_maps() -> None:
    """Each channel of a map is a tile, from left to right; of all of them one scale."""
    array = RANDOM.random((1, 3, 4, 5)).astype(np.float32)
    sheet = draw(array, layout="NCHW")
    places = [find_tile(sheet, look_up(tile, SEQUENTIAL, array.min(), array.max())) for tile in array[0]]
    assert len({top for top, _, _ in places}) == 1
    assert [left for _, left, _ in places] == sorted({left for _, left, _ in places})
    assert len({zoom for *_, zoom in places}) == 1


def amounts(*shape: int) -> Array:
    return np.random.default_rng(5).random((1, *shape)).astype(np.float32)


MAPS, TOKENS, HEADS, SEEN = amounts(4, 5, 2) - 0.5, amounts(2 + 9, 4), amounts(2, 4, 4), amounts(2, 5, 5)
KINDS: dict[str, tuple[Array, dict[str, Any], Array]] = {  # an array, what is known of it, and its tiles
    "channels last": (MAPS, {"layout": "NHWC"}, MAPS[0].transpose(2, 0, 1)),
    "gradients on one side of zero": (1 + amounts(1, 3, 3), {"site": "grad_output"}, 1 + amounts(1, 3, 3)[0]),
    "tokens behind two others": (*(TOKENS, {"layout": "NTC", "prefix_tokens": 2}, TOKENS[0, 2:].T.reshape(4, 3, 3)),),
    "all tokens on average": (
        *(HEADS, {"layout": "NAQK", "site": "attention"}, HEADS[0].mean(1, dtype=np.float32).reshape(2, 2, 2)),
    ),
    "what the first token looks at": (
        *(SEEN, {"layout": "NAQK", "site": "attention", "prefix_tokens": 1}, SEEN[0, :, 0, 1:].reshape(2, 2, 2)),
    ),
    "chosen queries, as they are": (HEADS, {"layout": "NAQK", "site": "attention", "whole": False}, HEADS[0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    """Of each kind of result every channel or head is a tile; where there is a sign, zero is in the middle."""
    array, known, tiles = KINDS[kind]
    signed, bound = tiles.min() < 0 or known.get("site") == "grad_output", float(np.abs(tiles).max())
    table, low, high = (DIVERGING, -bound, bound) if signed else (SEQUENTIAL, tiles.min(), tiles.max())
    sheet = draw(array, **{"layout": "NCHW", **known})
    for tile in tiles:
        find_tile(sheet, look_up(tile, table, low, high))


def test_inputs_beside_each_other() -> None:
    """Inputs stand beside each other, and share one scale."""
    array = RANDOM.random((3, 1, 4, 4)).astype(np.float32)
    sheet = draw(array, layout="NCHW")
    places = [find_tile(sheet, look_up(each[0], SEQUENTIAL, array.min(), array.max())) for each in array]
    assert len({top for top, *_ in places}) == 1
    assert [left for _, left, _ in places] == sorted(left for _, left, _ in places)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1, 4), np.float32),
        np.full((2, 3), np.nan),
        np.zeros((0, 3, 4, 4), np.float32),
        np.zeros((1, 0), np.float32),
        np.array([[True, False]]),
        np.array([7], np.int64),
        np.array(0.5, np.float32),
        np.arange(5000, dtype=np.float16)[None],
        np.full((1, 2, 3, 4, 5, 6), np.inf),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_whatever_a_result_is(array: Array) -> None:
    """A sheet is drawn of any array."""
    assert draw(array, row_axis=0 if array.ndim else None).shape[2] == 3


@pytest.mark.parametrize(
    "pair",
    [
        *((0.0, 0.0), (0.0, 5e-324), (5e-324, 5e-324), (-1e-320, 1.7e308), (1.7e308, 1.7e308), (-1e308, 1.7e308)),
        *((1.0, 1 + 1e-15), (np.inf, 1.0), (np.inf, -np.inf), (np.nan, np.nan), (np.nan, 1.0), (-1e308, -1e308)),
    ],
    ids=str,
)
def test_charts_of_any_numbers(pair: tuple[float, float]) -> None:
    """Numbers as far apart as they may be, or as near, have charts: as a vector, as statistics, of channels."""
    names = ("min", "max", "zeros", "histogram[0]", "histogram[1]")
    row = [*pair, *pair, 1.0]
    draw(np.array([pair]), layout="NC")
    draw(np.array([row]), columns=names)
    draw(np.array([pair]), columns=names[:2])
    draw(np.array([[row, row[::-1]]]), columns=names)


def test_bars() -> None:
    """Numbers above zero stand above the line, those below it below, as high as they are large."""
    sheet = draw(np.array([[4.0, -2.0, 1.0]], np.float32), layout="NC")
    painted = (sheet == (70, 124, 184)).all(-1)
    heights = painted.sum(0)
    columns = np.flatnonzero(heights)
    parts = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    tall, low, small = (int(heights[part].max()) for part in parts)
    assert tall / low == pytest.approx(2, abs=0.1)
    assert tall / small == pytest.approx(4, abs=0.5)
    first, second = (np.flatnonzero(painted[:, part].any(1)) for part in parts[:2])
    assert first.max() <= second.min() + 1


def test_size_is_known_before() -> None:
    """What would have too many pixels is refused by its shape alone, and named with the figure and the limit."""
    check_sheet([info(np.zeros((1, 16, 8, 8)), layout="NCHW")], TILES)
    large = np.broadcast_to(np.float32(0), (256, 64, 500, 500))
    with pytest.raises(TooLargeError, match=r"pixels \(\d+ by \d+\), the limit is 16000000"):
        check_sheet([info(large, layout="NCHW")], TILES)


def test_names_are_text() -> None:
    """A name of any characters and any length is drawn within the sheet."""
    array = np.zeros((1, 1, 2, 2), np.float32)
    names = dict.fromkeys(("<script>", "x" * 5000, "a\nb\x00c", "ж層", ""), array)
    infos = [info(array, name=name, layout="NCHW") for name in names]
    sheet = draw_sheet(infos, names, TILES)
    assert isinstance(sheet, Image.Image)
    edge = np.asarray(sheet)[:, -20:]
    assert (edge == 255).all()


@pytest.mark.parametrize(
    ("rows", "places", "names"),
    [
        (1, (3,), [""]),
        (2, (1, 3), ["input 1", "input 3"]),
        (4, (0, 2), ["input 0, part 0", "input 0, part 1", "input 2, part 0", "input 2, part 1"]),
        (2, (), ["input 0", "input 1"]),
    ],
)
def test_names_of_rows(rows: int, places: tuple[int, ...], names: list[str]) -> None:
    """Rows are named by the places of their inputs in the request; windows of one input by their numbers too."""
    one = info(np.zeros((rows, 2)), input_indexes=places)
    assert [one.name_row(row) for row in range(rows)] == names


def make_map(name: str, array: Array, **changes: Any) -> ResultInfo:
    return info(array, name=name, module="Net", layout="NHW", method=name.partition(".")[0], **changes)


def find_places(sheet: Array, part: Array) -> list[tuple[int, int]]:
    """Where a picture stands on a sheet, each time."""
    height, width = part.shape[:2]
    corners = np.argwhere((sheet[: len(sheet) - height + 1, : sheet.shape[1] - width + 1] == part[0, 0]).all(-1))
    inside = ((top, left, sheet[top : top + height, left : left + width]) for top, left in corners)
    return [(int(top), int(left)) for top, left, found in inside if (found == part).all()]


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["grad_cam"], 1),
        (["grad_cam.1", "grad_cam.2", "saliency.1", "saliency.2"], 2),
        (["attention_rollout", "saliency.1", "saliency.2"], 1),
    ],
)
def test_maps_beside_one_picture(names: list[str], lines: int) -> None:
    """The picture stands once, and beside it a map for each method and class; those of a class below each other."""
    pixels = RANDOM.integers(0, 256, (288, 288, 3), dtype=np.uint8)
    original = Original(Image.fromarray(pixels), (0.0, 0.0, 288.0, 288.0))
    arrays = {name: RANDOM.random((1, 6, 6)).astype(np.float32) for name in names}
    infos = [make_map(name, array) for name, array in arrays.items()]
    sheet = np.asarray(draw_sheet(infos, arrays, TILES, {0: original}))
    (picture,) = find_places(sheet, pixels)
    places = []
    for array in arrays.values():
        drawn = np.asarray(lay_over(original, array[0], find_map_scale(array, is_share=False)))
        places += find_places(sheet, drawn)[:1]
    assert len(places) == len([name for name in names if name != "attention_rollout"])
    assert len({top for top, _ in places}) == lines
    assert all(left > picture[1] for _, left in places)
    assert picture[0] == min(top for top, _ in places)


@pytest.mark.parametrize("over", [True, False])
def test_heads_over_the_picture(over: bool) -> None:
    """Heads lie over the picture where the model tells how its patches stand; a square of anything else does not."""
    pixels = RANDOM.integers(0, 256, (288, 288, 3), dtype=np.uint8)
    original = Original(Image.fromarray(pixels), (0.0, 0.0, 288.0, 288.0))
    array = RANDOM.random((1, 2, 5, 5)).astype(np.float32)
    one = info(array, layout="NAQK", site="attention", prefix_tokens=1, grid_size=(2, 2) if over else None)
    sheet = np.asarray(draw_sheet([one], {"x": array}, TILES, {0: original}))
    weights = array[0, :, 0, 1:].reshape(2, 2, 2)
    seen = np.asarray(Image.fromarray(pixels).resize((140, 140), Image.Resampling.BICUBIC))
    assert len(find_places(sheet, seen)) == int(over)
    if not over:
        for head in weights:
            find_tile(sheet, look_up(head, SEQUENTIAL, weights.min(), weights.max()))


def test_statistics_of_channels() -> None:
    """Below each other a plot for each statistic, with a bar for each channel, as high as it is large."""
    names = ("mean", "max", "zeros")
    array = np.array([[[2.0, 4.0, 0.0], [1.0, 4.0, 0.5]]], np.float32)
    sheet = draw(array, columns=names)
    middle = LEFT + WIDTH // 2
    heights = []
    for number in range(len(names)):
        top = TOP + number * (charts.HEAD + charts.STRIP)
        painted = (sheet[top : top + charts.STRIP] == (70, 124, 184)).all(-1).sum(0)
        heights.append((int(painted[:middle].max()), int(painted[middle:].max())))
    (mean, half), (first, second), (none, zeros) = heights
    assert half / mean == pytest.approx(1 / 2, abs=0.05)
    assert first == second > 30
    assert none == 0 < zeros

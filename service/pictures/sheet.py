"""A sheet: results below each other, each with a title and a scale of colours, inputs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from PIL import Image

from layertap.models.errors import TooLargeError
from layertap.service.pictures.blocks import MARGIN, WIDTH
from layertap.service.pictures.drawing import LINE, Canvas, Size
from layertap.service.pictures.map_section import MapSection
from layertap.service.pictures.options import PictureOptions
from layertap.service.pictures.overlay import OVERLAY, Original
from layertap.service.pictures.panels import ResultInfo, find_kind, is_over_pictures
from layertap.service.pictures.sections import ChartSection, Section, TileSection

Array = NDArray[Any]

MAX_PIXELS = 16 * 10**6
MAX_SIDE = 16_383  # of WebP; none of PNG, but who would look at it
CHARTS = ("bars", "statistics", "channels")
_HINT = "ask for fewer layers, tiles, inputs, methods or classes, or use application/x-npz (format=npz)"


def check_size(infos: Sequence[ResultInfo], options: PictureOptions) -> None:
    """TooLargeError where the sheet of some results would have more pixels than it may; nothing is drawn.

    The inputs' pictures are not known: there must be room for any.
    """
    width, height = _measure(_arrange(infos, options, None))
    if width * height > MAX_PIXELS:
        detail = f"the picture would have {width * height} pixels ({width} by {height}), the limit is {MAX_PIXELS}"
        raise TooLargeError(detail, hint=_HINT)
    if max(width, height) > MAX_SIDE:
        detail = f"the picture would have a side of {max(width, height)} pixels, the limit is {MAX_SIDE}"
        raise TooLargeError(detail, hint=_HINT)


def shows_originals(infos: Sequence[ResultInfo]) -> bool:
    """Whether a sheet of some results shows the inputs' pictures too, where these are known."""
    return any(find_kind(info).drawing == "map" or is_over_pictures(info) for info in infos)


def draw_sheet(
    infos: Sequence[ResultInfo],
    arrays: Mapping[str, Array],
    options: PictureOptions,
    originals: Mapping[int, Original] | None = None,
) -> Image.Image:
    """The sheet of some results, RGB, of at most ``MAX_PIXELS`` pixels; TooLargeError.

    ``originals`` are the pictures of the inputs by their places in the request, where they are known, in a square of
    ``OVERLAY`` a side.
    """
    check_size(infos, options)
    known = originals or {}
    sections = _arrange(infos, options, known)
    canvas = Canvas.of_size(_measure(sections))
    top = MARGIN
    for number, section in enumerate(sections):
        if number:
            line = top - MARGIN // 2
            canvas.draw.line([(MARGIN, line), (canvas.image.width - MARGIN, line)], LINE)
        section.paint(canvas, top, arrays, known)
        top += section.size[1] + MARGIN
    return canvas.image


def _arrange(
    infos: Sequence[ResultInfo], options: PictureOptions, originals: Mapping[int, Original] | None
) -> list[Section]:
    """What is drawn from top to bottom: of each result a section, of all maps of the same inputs one."""
    sections: dict[object, Section] = {}
    for info in infos:
        drawing = find_kind(info).drawing
        if drawing == "map":
            alike = tuple(each for each in infos if _find_inputs(each) == _find_inputs(info))
            sections.setdefault(_find_inputs(info), _make_map_section(alike, originals))
        elif drawing in CHARTS:
            sections[info.name] = ChartSection(info)
        else:
            shown = originals is None or any(info.find_place(row) in originals for row in range(info.rows))
            sections[info.name] = TileSection(info, options, shown)
    return list(sections.values())


def _find_inputs(info: ResultInfo) -> object:
    """Of which inputs a map is; None for what is none."""
    return (info.rows, info.places) if find_kind(info).drawing == "map" else None


def _make_map_section(infos: tuple[ResultInfo, ...], originals: Mapping[int, Original] | None) -> MapSection:
    if originals is None:
        return MapSection(infos, OVERLAY, shown=True)
    first = infos[0]
    places = [first.find_place(row) for row in range(first.rows)]
    heights = [originals[place].image.height if place in originals else OVERLAY for place in places]
    return MapSection(infos, max(heights, default=OVERLAY), any(place in originals for place in places))


def _measure(sections: Sequence[Section]) -> Size:
    widths, heights = zip(*(section.size for section in sections), strict=True)
    return max(WIDTH, *widths) + 2 * MARGIN, sum(heights) + (len(heights) + 1) * MARGIN

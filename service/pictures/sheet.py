"""A sheet: results below each other, each with a title and a scale of colours, inputs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw

from layertap.models.errors import TooLargeError
from layertap.service.pictures.charts import check_installed
from layertap.service.pictures.layout import LINE, MARGIN, PAPER, WIDTH, Layout, Size
from layertap.service.pictures.options import PictureOptions
from layertap.service.pictures.overlay import Original
from layertap.service.pictures.panels import ResultInfo, find_kind, is_over_pictures
from layertap.service.pictures.sections import WAYS, Arrays, Infos

MAX_PIXELS = 16 * 10**6
MAX_SIDE = 16_383  # of WebP; none of PNG, but who would look at it
_HINT = "ask for fewer layers, tiles, inputs, methods or classes, or use application/x-npz (format=npz)"


def check_sheet(infos: Infos, options: PictureOptions) -> None:
    """Refuse a sheet that can't be drawn; the inputs' pictures are not known: there must be room for any.

    TooLargeError: more pixels than it may have. NotInstalledError: charts, and no matplotlib.
    """
    layouts = [WAYS[find_kind(group[0]).drawing].arrange(group, options, None) for group in _group(infos)]
    width, height = _measure(layouts)
    if width * height > MAX_PIXELS:
        detail = f"the picture would have {width * height} pixels ({width} by {height}), the limit is {MAX_PIXELS}"
        raise TooLargeError(detail, hint=_HINT)
    if max(width, height) > MAX_SIDE:
        detail = f"the picture would have a side of {max(width, height)} pixels, the limit is {MAX_SIDE}"
        raise TooLargeError(detail, hint=_HINT)
    if any(find_kind(info).drawing == "charts" for info in infos):
        check_installed()


def shows_originals(infos: Infos) -> bool:
    """Whether a sheet of some results shows the inputs' pictures too, where these are known."""
    return any(find_kind(info).drawing == "maps" or is_over_pictures(info) for info in infos)


def draw_sheet(
    infos: Infos, arrays: Arrays, options: PictureOptions, originals: Mapping[int, Original] | None = None
) -> Image.Image:
    """The sheet of some results, RGB; refused as by ``check_sheet``.

    ``originals`` are the pictures of the inputs by their places in the request, where they are known, in a square of
    ``OVERLAY`` a side.
    """
    check_sheet(infos, options)
    known = originals or {}
    groups = _group(infos)
    ways = [WAYS[find_kind(group[0]).drawing] for group in groups]
    layouts = [way.arrange(group, options, known) for way, group in zip(ways, groups, strict=True)]
    image = Image.new("RGB", _measure(layouts), PAPER)
    top = MARGIN
    for way, group, layout in zip(ways, groups, layouts, strict=True):
        if top > MARGIN:
            line = top - MARGIN // 2
            ImageDraw.Draw(image).line([(MARGIN, line), (image.width - MARGIN, line)], LINE)
        layout.draw(image, top, way.fill(group, options, layout, arrays, known))
        top += layout.whole[1] + MARGIN
    return image


def _group(infos: Infos) -> list[list[ResultInfo]]:
    """The results of each section from top to bottom: one, or all maps of the same inputs."""
    groups: dict[object, list[ResultInfo]] = {}
    for info in infos:
        key = (info.rows, info.places) if find_kind(info).drawing == "maps" else info.name
        groups.setdefault(key, []).append(info)
    return list(groups.values())


def _measure(layouts: Sequence[Layout]) -> Size:
    widths, heights = zip(*(layout.whole for layout in layouts), strict=True)
    return max(WIDTH, *widths) + 2 * MARGIN, sum(heights) + (len(heights) + 1) * MARGIN

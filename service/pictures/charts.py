"""Charts by matplotlib (the extra ``charts``): vectors, histograms, statistics of each channel.

Uses neither pyplot nor rcParams, which are global, so that several threads may draw their own figures. ``Figure.draw``
takes matplotlib's font lock. No text of a request is drawn, because matplotlib would parse formulas in it.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import inf, nan
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layertap.service.errors import NotInstalledError
from layertap.service.pictures.colormaps import NOT_FINITE
from layertap.service.pictures.layout import GREY, LINE, PAPER, SMALL, Size, format_number
from layertap.service.pictures.panels import HISTOGRAM, ResultInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]

BAR = "#467cb8"
LOST = "#{:02x}{:02x}{:02x}".format(*NOT_FINITE)
HEAD, PLOT, STRIP, FOOT = 22, 140, 48, 40  # pixels: above axes, of axes, of low ones, below the last axes
LEFT, RIGHT = 64, 20  # beside axes, for their numbers
MOST = 1e300  # larger numbers are clipped to this, so that differences are finite


def check_installed() -> None:
    """NotInstalledError if matplotlib is missing; does not import it, which takes long."""
    if find_spec("matplotlib") is None:
        raise NotInstalledError(
            "charts of vectors and statistics need matplotlib, which is not installed here",
            hint='use another format; the operator types pip install "layertap[charts]"',
        )


def _list_plots(info: ResultInfo) -> list[tuple[str, int, int]]:
    """The plots of a result from top to bottom: the column that each shows, the pixels above it, and its height.

    A vector is one column without a name; all statistics of a result share one plot unless they are by channel.
    """
    if info.columns is None:
        return [("", HEAD, PLOT)]
    bins = [name for name in info.columns if name.startswith(HISTOGRAM)]
    if len(info.row_shape) == 1:
        return [("", 2 * HEAD, PLOT if bins else 0)]
    return [(name, HEAD, STRIP) for name in info.columns if name not in bins]


def measure_chart(info: ResultInfo) -> int:
    """The height in pixels of a result's chart."""
    return sum(head + height for _, head, height in _list_plots(info)) + FOOT


def draw_chart(info: ResultInfo, values: Array, size: Size) -> Image.Image:
    """The chart of a result for one input, of ``size`` pixels.

    Bars in another colour and of full height mark numbers that are not finite. If there are more numbers than pixel
    columns, neighbours share a bar.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = info.columns or ("",)
    table = np.asarray(values, np.float64).reshape(-1, len(names))
    columns = dict(zip(names, np.where(np.isfinite(table), table.clip(-MOST, MOST), table).T, strict=True))
    figure = Figure((size[0] / 72, size[1] / 72), dpi=72)  # one point per pixel
    canvas = FigureCanvasAgg(figure)
    top = 0
    for name, head, height in _list_plots(info):
        axes = _add_axes(figure, top + head, height)
        if table.size and name in columns:
            _draw_bars(axes, name, columns[name], info)
        elif table.size:
            _draw_statistics(axes, columns)
        top += head + height
    axes.xaxis.set_visible(True)
    canvas.draw()  # type: ignore[no-untyped-call]
    return Image.fromarray(np.asarray(canvas.renderer.buffer_rgba())[..., :3])


def _draw_bars(axes: Axes, name: str, values: Array, info: ResultInfo) -> None:
    """Draw numbers as bars from zero; above a vector's greatest number stands its index."""
    _number(axes, len(values), info)
    axes.set_title(name, loc="left", fontsize=SMALL)
    _scale(axes, values)
    _fill(axes, np.minimum(_join(axes, values, np.minimum), 0), np.maximum(_join(axes, values, np.maximum), 0))
    axes.axhline(0, color=GREY, linewidth=1)
    finite = np.where(np.isfinite(values), values, -inf)
    if not name and (greatest := finite.max(initial=0.0)) > 0:
        index = int(finite.argmax())
        axes.annotate(str(index), (index, greatest), (0, 2), textcoords="offset points", ha="center", fontsize=SMALL)


def _draw_statistics(axes: Axes, columns: dict[str, Array]) -> None:
    """Draw the bins of a histogram as bars, and above them the other statistics as text."""
    words = [f"{name}\xa0{format_number(value)}" for name, [value] in columns.items() if not name.startswith(HISTOGRAM)]
    axes.set_title("\n".join(wrap("   ".join(words), round(axes.bbox.width / 7))), loc="left", fontsize=SMALL)
    bins = np.array([value for name, [value] in columns.items() if name.startswith(HISTOGRAM)])
    if not bins.size:
        axes.set_axis_off()
        return
    [low], [high] = columns.get("min", [nan]), columns.get("max", [nan])
    known = -inf < low < high < inf
    axes.set_xlim(low, high) if known else axes.set_xlim(0, len(bins))
    axes.set_xlabel("value" if known else "bin", fontsize=SMALL)
    axes.set_ylabel("count", fontsize=SMALL)
    _scale(axes, bins)
    _fill(axes, np.zeros_like(bins), bins)


def _fill(axes: Axes, low: Array, high: Array) -> None:
    """Fill the width with bars from ``low`` to ``high``; of full height if these are not finite."""
    edges, lost = np.linspace(*axes.get_xlim(), len(low) + 1), ~np.isfinite(low + high)
    axes.stairs(np.where(lost, nan, high), edges, baseline=np.where(lost, 0.0, low), fill=True, color=BAR)
    if axes.bbox.width >= 4 * len(low):  # room for a gap of a pixel
        axes.vlines(edges[1:-1], np.minimum(low[:-1], low[1:]), np.maximum(high[:-1], high[1:]), PAPER, linewidth=1)
    if lost.any():
        transform = axes.get_xaxis_transform()
        axes.stairs(np.where(lost, 1.0, nan), edges, fill=True, color=LOST, transform=transform)


def _scale(axes: Axes, values: Array) -> None:
    """Set the limits of the y axis to include all numbers and zero."""
    shown = np.append(values[np.isfinite(values)], 0.0)
    low, high = float(shown.min()), float(shown.max())
    room = (high - low) / 20 or 1.0
    axes.set_ylim(low - room * (low < 0), high + room)


def _join(axes: Axes, values: Array, join: np.ufunc) -> Array:
    """Replace numbers that are not finite by NaN; join neighbours if there are more than pixel columns."""
    most = round(axes.bbox.width)
    values = np.where(np.isfinite(values), values, nan)
    joined: Array = values if len(values) <= most else join.reduceat(values, np.arange(most) * len(values) // most)
    return joined


def _number(axes: Axes, count: int, info: ResultInfo) -> None:
    """Label the x axis: with the numbers of channels if known, else from 0."""
    from matplotlib.ticker import MaxNLocator

    names = info.channels if info.channels is not None and len(info.channels) == count else range(count)
    axes.set_xlim(-0.5, max(count, 1) - 0.5)
    axes.set_xlabel("channel" if info.columns else "index", fontsize=SMALL)
    axes.xaxis.set_major_locator(MaxNLocator(round(axes.bbox.width / 45), integer=True))
    axes.xaxis.set_major_formatter(lambda x, _: str(names[round(x)]) if -0.5 < x < count - 0.5 else "")


def _add_axes(figure: Figure, top: int, height: int) -> Axes:
    """Axes ``top`` pixels below the top, without tick labels on x."""
    from matplotlib.ticker import MaxNLocator

    width, whole = figure.bbox.size
    axes = figure.add_axes((LEFT / width, 1 - (top + height) / whole, 1 - (LEFT + RIGHT) / width, height / whole))
    axes.tick_params(labelsize=SMALL, color=LINE, labelcolor=GREY)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=LINE)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(height // 28 or 1))
    axes.yaxis.set_major_formatter(lambda value, _: format_number(value))
    axes.xaxis.set_visible(False)
    return axes

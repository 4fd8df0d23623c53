"""Charts: vectors and histograms as bars, statistics in words, statistics of channels as ranges and bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from layertap.service.pictures.colormaps import NOT_FINITE, find_scale
from layertap.service.pictures.drawing import (
    GREY,
    INK,
    LINE,
    SMALL,
    TEXT,
    Canvas,
    Color,
    break_lines,
    cut_text,
    format_number,
)

Array = NDArray[Any]

BAR: Color = (70, 124, 184)
RANGE: Color = (214, 226, 240)
DEVIATION: Color = (150, 184, 220)
HEIGHT, STRIP, STRIP_HEAD = 170, 76, SMALL + 6
BIN = 6  # pixels that a bin of a channel's histogram is high
LEFT = 64  # of the bars: numbers of the axis stand before them
FOOT = SMALL + 8
BINS = "histogram["  # how the names of a histogram's columns begin
# What one chart shows of a channel together, and what channels that share a column come to.
SPREAD: dict[str, Callable[[Array], Any]] = {"mean": np.mean, "std": np.mean, "min": np.min, "max": np.max}
MAX_NUMBERED = 32  # bars, of which each has its name below it


@dataclass(frozen=True)
class _Axes:
    """A part of a canvas in which numbers stand above and below zero."""

    canvas: Canvas
    top: int
    bottom: int
    low: float
    high: float

    @property
    def width(self) -> int:
        """Pixels from the first bar to the last."""
        return self.canvas.image.width - LEFT

    def find_height(self, value: float) -> float:
        """Where a number stands, from the top of the canvas; what is not finite is nowhere."""
        share = (self.high - value) / (self.high - self.low) if self.high > self.low else 1.0
        return self.top + share * (self.bottom - self.top)

    def find_columns(self, place: int, count: int) -> tuple[int, int]:
        """The first and the last column of a bar."""
        step = self.width / max(count, 1)
        left = LEFT + round(place * step)
        return left, max(LEFT + round((place + 1) * step) - (2 if step >= 4 else 1), left)

    def draw_bar(self, place: int, count: int, low: float, high: float, color: Color) -> None:
        """A bar from one number to another; over the whole height, in a colour of its own, where one is not finite."""
        left, right = self.find_columns(place, count)
        if not np.isfinite((low, high)).all():
            self.canvas.draw.rectangle([left, self.top, right, self.bottom], NOT_FINITE)
            return
        self.canvas.draw.rectangle([left, self.find_height(high), right, self.find_height(low)], color)


def measure_channels(names: Sequence[str]) -> int:
    """How high the chart of some statistics of each channel is."""
    bins = len([name for name in names if name.startswith(BINS)])
    spread = len([name for name in names if name in SPREAD])
    return (
        (HEIGHT if spread else 0)
        + STRIP * (len(names) - bins - spread)
        + (BIN * bins + STRIP_HEAD + 8 if bins else 0)
        + FOOT
    )


def draw_bars(values: Array, width: int) -> Image.Image:
    """Numbers as bars from a line at zero; where they are more than pixels, of neighbours the farthest from 0.

    The bar of a number that is not finite goes over the whole height, in a colour of its own. The greatest one has its
    place above it.
    """
    canvas = Canvas.of_size((width, HEIGHT))
    numbers = np.asarray(values, np.float64).reshape(-1)
    axes = _draw_bars(canvas, numbers, SMALL + 6, HEIGHT - FOOT)
    _name_bars(axes, [str(number) for number in range(len(numbers))])
    finite = np.where(np.isfinite(numbers), numbers, -np.inf)
    if len(numbers) > MAX_NUMBERED and finite.max() > 0:
        best = int(finite.argmax())
        middle = LEFT + round((best + 0.5) / len(numbers) * axes.width)
        anchor = "ma" if LEFT + 20 < middle < width - 20 else "la" if middle < width // 2 else "ra"
        canvas.write((middle, 0), str(best), SMALL, INK, anchor)
    return canvas.image


def draw_statistics(values: Array, names: Sequence[str], width: int) -> Image.Image:
    """The bins of a histogram as bars, and above them the other statistics in words."""
    canvas = Canvas.of_size((width, HEIGHT))
    by_name = dict(zip(names, np.asarray(values).reshape(-1).tolist(), strict=True))
    figures = [f"{name} {format_number(value)}" for name, value in by_name.items() if not name.startswith(BINS)]
    top = 0
    for line in break_lines(figures, TEXT, width):
        canvas.write((0, top), line, TEXT)
        top += TEXT + 6
    bins = np.array([value for name, value in by_name.items() if name.startswith(BINS)])
    if bins.size:
        axes = _draw_bars(canvas, bins, top + 4, HEIGHT - FOOT)
        ends = [by_name.get("min"), by_name.get("max")]
        if None in ends:
            _name_bars(axes, [str(number) for number in range(len(bins))])
        else:
            canvas.write((LEFT, HEIGHT - SMALL - 4), format_number(by_name["min"]), SMALL, GREY)
            canvas.write((width, HEIGHT - SMALL - 4), format_number(by_name["max"]), SMALL, GREY, "ra")
    return canvas.image


def draw_channels(values: Array, names: Sequence[str], width: int, channels: Sequence[int] | None) -> Image.Image:
    """Statistics of each channel, (channels, columns), from left to right.

    Mean, deviation, least and greatest are one chart: a light range, in it a darker one of a deviation around the mean,
    and a line at the mean. Each other statistic has bars. Where channels are more than pixels, neighbours share one:
    the least of the least, the greatest of the greatest, the mean of the means; of bars the farthest from 0.
    """
    canvas = Canvas.of_size((width, measure_channels(names)))
    columns = dict(zip(names, np.asarray(values, np.float64).T, strict=True))
    top = 0
    if any(name in SPREAD for name in columns):
        axes = _draw_spread(canvas, columns, HEIGHT)
        top = HEIGHT
    for name, numbers in columns.items():
        if name in SPREAD or name.startswith(BINS):
            continue
        canvas.write((LEFT, top), name, SMALL, INK)
        axes = _draw_bars(canvas, numbers, top + STRIP_HEAD, top + STRIP - 8)
        top += STRIP
    bins = np.array([numbers for name, numbers in columns.items() if name.startswith(BINS)])
    if bins.size:
        axes = _draw_bins(canvas, bins, top)
    _name_bars(axes, [str(number) for number in channels or range(len(values))])
    return canvas.image


def _draw_spread(canvas: Canvas, columns: dict[str, Array], height: int) -> _Axes:
    width = canvas.image.width - LEFT
    groups = _split(len(next(iter(columns.values()))), width)
    parts = {
        name: np.array([SPREAD[name](columns[name][group]) for group in groups]) for name in SPREAD if name in columns
    }
    count = len(groups)
    words = {"min": "light: least to greatest", "std": "darker: a deviation around the mean", "mean": "line: mean"}
    told = [text for name, text in words.items() if name in parts]
    canvas.write((LEFT, 0), cut_text("    ".join(told), SMALL, width), SMALL, GREY)
    mean = parts.get("mean", np.zeros(count))
    deviation = parts.get("std", np.zeros(count))
    low, high = (parts.get(name, mean + sign * deviation) for name, sign in (("min", -1), ("max", 1)))
    axes = _open(canvas, np.concatenate([low, high, mean - deviation, mean + deviation]), SMALL + 8, height - 10)
    for place in range(count):
        axes.draw_bar(place, count, low[place], high[place], RANGE)
        if np.isfinite((low[place], high[place])).all():
            axes.draw_bar(place, count, mean[place] - deviation[place], mean[place] + deviation[place], DEVIATION)
        if "mean" in parts and np.isfinite(mean[place]):
            left, right = axes.find_columns(place, count)
            at = axes.find_height(mean[place])
            canvas.draw.rectangle([left, at - 1, right, at], INK)
    return axes


def _draw_bins(canvas: Canvas, bins: Array, top: int) -> _Axes:
    """Histograms of channels, (bins, channels), as colours, the last bin above: dark is none, yellow the most."""
    words = "histogram: bins from each channel's least (below) to its greatest; dark is none, yellow the most"
    canvas.write((LEFT, top), cut_text(words, SMALL, canvas.image.width - LEFT), SMALL, INK)
    colors = Image.fromarray(np.ascontiguousarray(find_scale(np.append(bins, 0.0)).to_colors(bins[::-1])))
    size = (canvas.image.width - LEFT, BIN * len(bins))
    canvas.image.paste(colors.resize(size, Image.Resampling.NEAREST), (LEFT, top + STRIP_HEAD))
    return _Axes(canvas, top + STRIP_HEAD, top + STRIP_HEAD + size[1], 0.0, 1.0)


def _draw_bars(canvas: Canvas, values: Array, top: int, bottom: int) -> _Axes:
    """Bars from some height down to another."""
    shown = _pick_extremes(values, canvas.image.width - LEFT)
    axes = _open(canvas, shown, top, bottom)
    for place, value in enumerate(shown):
        axes.draw_bar(place, len(shown), min(value, 0.0), max(value, 0.0), BAR)
    zero = axes.find_height(0.0)
    canvas.draw.line([(LEFT, zero), (canvas.image.width, zero)], GREY)
    return axes


def _open(canvas: Canvas, values: Array, top: int, bottom: int) -> _Axes:
    """Axes for some numbers and zero, with lines at the ends and at zero, and what these stand for."""
    finite = np.append(values[np.isfinite(values)], 0.0)
    axes = _Axes(canvas, top, bottom, float(finite.min()), float(finite.max()))
    written: list[float] = []
    for value in (axes.high, axes.low, 0.0):
        at = axes.find_height(value)
        if all(abs(at - other) > SMALL for other in written):
            written.append(at)
            canvas.draw.line([(LEFT, at), (canvas.image.width, at)], LINE)
            canvas.write((LEFT - 8, round(at)), format_number(value), SMALL, GREY, "rm")
    return axes


def _name_bars(axes: _Axes, names: Sequence[str]) -> None:
    """The names of bars below them; where they are too many those of the first and the last."""
    top = axes.canvas.image.height - SMALL - 4
    if len(names) <= MAX_NUMBERED:
        step = axes.width / max(len(names), 1)
        for place, name in enumerate(names):
            middle = LEFT + round((place + 0.5) * step)
            axes.canvas.write((middle, top), cut_text(name, SMALL, int(step) - 2), SMALL, GREY, "ma")
        return
    axes.canvas.write((LEFT, top), names[0], SMALL, GREY)
    axes.canvas.write((axes.canvas.image.width, top), names[-1], SMALL, GREY, "ra")


def _pick_extremes(values: Array, most: int) -> Array:
    if len(values) <= most:
        return values
    strength = np.where(np.isfinite(values), np.abs(values), np.inf)
    picked: Array = values[[part.start + strength[part].argmax() for part in _split(len(values), most)]]
    return picked


def _split(count: int, most: int) -> list[slice]:
    """So many numbers in at most so many parts of neighbours, as even as may be all along."""
    parts = min(count, most)
    ends = [place * count // parts for place in range(parts + 1)] if parts else []
    return [slice(start, stop) for start, stop in pairwise(ends)]

"""Colours of numbers: one map for amounts, one for what lies on both sides of zero; both even in lightness.

Colours are chosen in OKLab, in which equal steps look equal (Björn Ottosson, "A perceptual color space for image
processing", 2020). Neither map needs red told from green: blue to yellow, and blue to orange.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, radians, sin
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Colors = NDArray[np.uint8]  # (…, 3), sRGB

STEPS = 257  # an odd number: zero has a colour of its own
NOT_FINITE = (214, 39, 190)

_TO_LMS = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def convert_oklab(lab: Array) -> Colors:
    """OKLab (…, 3) as sRGB; what lies outside of sRGB is clipped."""
    linear = ((lab @ _TO_LMS.T) ** 3 @ _TO_RGB.T).clip(0.0, 1.0)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    colors: Colors = np.rint(encoded * 255).astype(np.uint8)
    return colors


def _interpolate(anchors: list[tuple[float, float, float, float]]) -> Colors:
    """A table through anchors: place from 0 to 1, lightness, chroma, hue in degrees."""
    places = [place for place, *_ in anchors]
    labs = [(light, chroma * cos(radians(hue)), chroma * sin(radians(hue))) for _, light, chroma, hue in anchors]
    steps = np.linspace(0.0, 1.0, STEPS)
    return convert_oklab(np.stack([np.interp(steps, places, column) for column in zip(*labs, strict=True)], -1))


SEQUENTIAL = _interpolate(
    [
        (0.0, 0.16, 0.04, 285),
        (0.25, 0.36, 0.12, 280),
        (0.5, 0.56, 0.11, 235),
        (0.75, 0.76, 0.13, 160),
        (1.0, 0.96, 0.13, 105),
    ]
)
DIVERGING = _interpolate(
    [
        (0.0, 0.36, 0.11, 260),
        (0.25, 0.64, 0.11, 250),
        (0.5, 0.97, 0.0, 0),
        (0.75, 0.64, 0.14, 50),
        (1.0, 0.36, 0.11, 40),
    ]
)


@dataclass(frozen=True)
class Scale:
    """Which numbers the first and the last colour stand for; ``diverging``: zero is in the middle."""

    low: float
    high: float
    diverging: bool

    @property
    def table(self) -> Colors:
        """The colours from ``low`` to ``high``."""
        return DIVERGING if self.diverging else SEQUENTIAL

    def to_places(self, values: Array) -> Array:
        """Numbers as places on the scale, 0 to 1; all are 0 (of a diverging scale: in the middle) where it is empty."""
        width = self.high - self.low
        if not width > 0:
            return np.full(values.shape, 0.5 if self.diverging else 0.0)
        with np.errstate(invalid="ignore"):
            places: Array = ((values.astype(np.float64) - self.low) / width).clip(0.0, 1.0)
        return places

    def to_colors(self, values: Array) -> Colors:
        """The colour of each number, (…, 3); NaN and infinite ones have a colour that is in neither table."""
        finite = np.isfinite(values)
        places = self.to_places(np.where(finite, values, 0.0))
        colors: Colors = self.table[np.rint(places * (STEPS - 1)).astype(np.intp)]
        colors[~finite] = NOT_FINITE
        return colors


def find_scale(values: Array, signed: bool = False) -> Scale:
    """The scale of some numbers: around zero where some are below it, or where they are ``signed`` by nature.

    Else from the least to the greatest. Numbers that are not finite do not count.
    """
    finite = values[np.isfinite(values)].astype(np.float64)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if signed or low < 0:
        bound = max(-low, high)
        return Scale(-bound, bound, diverging=True)
    return Scale(low, high, diverging=False)

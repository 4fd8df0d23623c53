"""Colour maps: one for amounts, one for numbers on both sides of zero; both have even steps of lightness.

Colours were chosen in OKLab, in which equal steps look equal (Björn Ottosson, "A perceptual color space for image
processing", 2020). Neither map contrasts red with green: blue to yellow, and blue to orange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Colors = NDArray[np.uint8]  # (…, 3), sRGB

STEPS = 257  # odd, so that zero has its own colour
NOT_FINITE = (214, 39, 190)


def _interpolate(colors: str) -> Colors:
    """A table of evenly spaced steps through these colours."""
    anchors = np.array([list(bytes.fromhex(color)) for color in colors.split()])
    places = np.linspace(0, len(anchors) - 1, STEPS)
    columns = [np.interp(places, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    table: Colors = np.rint(np.stack(columns, -1)).astype(np.uint8)
    return table


SEQUENTIAL = _interpolate(
    "0c0a1d 151333 1f1d49 292761 33317a 334486 315792 2a6a9f 1c7eab "
    "2a91a8 3aa4a3 4ab79d 5aca94 8bd694 b4e192 daec8f fff78b"
)
DIVERGING = _interpolate(
    "173a76 254f8b 3464a0 447ab6 5590cc 7eaad8 a5c3e2 cddcec f5f5f5 "
    "eed4c6 e5b397 da9168 ce6f33 b45b27 9b481b 82350e 6a2203"
)


@dataclass(frozen=True)
class Scale:
    """The numbers of the first and the last colour; ``diverging``: zero is in the middle."""

    low: float
    high: float
    diverging: bool

    @property
    def table(self) -> Colors:
        """The colours from ``low`` to ``high``."""
        return DIVERGING if self.diverging else SEQUENTIAL

    def to_places(self, values: Array) -> Array:
        """Positions on the scale, 0 to 1; all 0 (on a diverging scale: the middle) if the scale is empty."""
        width = self.high - self.low
        if not width > 0:
            return np.full(values.shape, 0.5 if self.diverging else 0.0)
        with np.errstate(invalid="ignore"):
            places: Array = ((values.astype(np.float64) - self.low) / width).clip(0.0, 1.0)
        return places

    def to_colors(self, values: Array) -> Colors:
        """The colour of each number, (…, 3); NaN and infinity have a colour that is in neither table."""
        finite = np.isfinite(values)
        places = self.to_places(np.where(finite, values, 0.0))
        colors: Colors = self.table[np.rint(places * (STEPS - 1)).astype(np.intp)]
        colors[~finite] = NOT_FINITE
        return colors


def find_scale(values: Array, signed: bool = False) -> Scale:
    """The scale of some numbers: around zero if any are negative or they are ``signed`` by nature.

    Else from the least to the greatest. Only finite numbers count.
    """
    finite = values[np.isfinite(values)].astype(np.float64)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if signed or low < 0:
        bound = max(-low, high)
        return Scale(-bound, bound, diverging=True)
    return Scale(low, high, diverging=False)

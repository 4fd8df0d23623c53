"""What a request may say of its picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["first", "strongest"]
MAX_TILES = 256


@dataclass(frozen=True)
class PictureOptions:
    """How results are drawn: at most so many ``tiles`` of each, in order or the ``strongest`` first.

    A tile is a channel of a map, or a head of attention; how strong it is, is the mean of its absolute values.
    """

    tiles: int = 16
    order: Order = "first"

"""What holds for every forward of a model, whatever the shape of its rows: found out when it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNREPEATABLE = "unrepeatable-"  # begins what stands for a fingerprint where a model gives another answer each time
LeftPadding = Literal["as sent", "numbered", "refused"]


@dataclass(frozen=True)
class Traits:
    """``state`` names the buffers and attributes (module, name) that forwards change, which are put back after each.

    ``deterministic``: whether the same row gives the same answer again. Of texts: ``pads``, whether one stays the same
    with padding behind it, beside a longer one; ``left_padding``, whether it does with padding in front: as it is sent,
    with its tokens numbered by the mask, or neither way.
    """

    state: tuple[tuple[str, str], ...] = ()
    deterministic: bool = True
    pads: bool = True
    left_padding: LeftPadding = "as sent"


DEFAULT_TRAITS = Traits()

"""Words that requests, the engine and the figures share."""

from __future__ import annotations

from typing import Literal

Priority = Literal["interactive", "bulk"]
BatchReason = Literal[
    "isolated", "single", "same_depth", "sharing_pays", "sharing_costs"
]  # why a batch has just these rows

"""Words that requests, the engine and the figures share."""

from __future__ import annotations

from typing import Literal

Priority = Literal["interactive", "bulk"]
# A worker's native code crashed; it took too long to decode; it took too long for all who waited; the system ended it,
# most often for want of memory; it exited; a model broke itself; nobody knows.
RestartReason = Literal["crash", "decode_timeout", "timeout", "killed", "exit", "failure", "unknown"]
CacheResult = Literal["hit", "shared", "miss"]  # kept; of an equal request that came first; computed
BatchReason = Literal[
    "isolated", "single", "same_depth", "sharing_pays", "sharing_costs"
]  # why a batch has just these rows

TILES, MAX_TILES = 16, 256  # of each result in a picture: channels of a map, heads of attention

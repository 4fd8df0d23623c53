"""Literal types shared by requests, the engine and the metrics."""

from __future__ import annotations

from typing import Literal

Priority = Literal["interactive", "bulk"]
# A worker's native code crashed; decoding took too long; the request's deadline passed; the system killed it, mostly
# when out of memory; it exited; a model broke itself; nobody waits any more for what it does; the reason is unknown.
RestartReason = Literal["crash", "decode_timeout", "timeout", "killed", "exit", "failure", "unknown"]
# Why a batch has just these rows.
BatchReason = Literal["isolated", "single", "same_depth", "sharing_pays", "sharing_costs"]

TILES, MAX_TILES = 16, 256  # per result in a picture: channels of a map, heads of attention

"""The formats of a reply, in order of preference; a new one is a file beside this and a line in the table."""

from __future__ import annotations

from service.wire import json, npy, npz, safetensors
from service.wire.negotiate import Encoding, Format

__all__ = ["FORMATS", "Encoding", "Format"]

_TABLE = (
    Format("json", "application/json", json.encode),
    Format("npy", "application/x-npy", npy.encode),
    Format("npz", "application/x-npz", npz.encode),
    Format("safetensors", "application/x-safetensors", safetensors.encode),
)

FORMATS: dict[str, Format] = {each.name: each for each in _TABLE}

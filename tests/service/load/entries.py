"""Kinds of requests that tests of the load tester send, and what makes scenarios of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from layertap.service.load.scenario import RequestKind, make_scenario
from tests.service.support import Json, tensor

ROOT = Path(__file__).parents[3]
NOWHERE = "http://127.0.0.1:1"
DIGIT = ROOT / "examples" / "digit.png"
PICTURE: Json = {"picture": str(DIGIT)}
VECTOR: Json = {"name": "vector", "weight": 3, "path": "/extract?layers=pool&pool=flatten", **PICTURE}
BLOCKS: Json = {
    "name": "blocks",
    "weight": 2,
    "path": "/extract?layers=block1,block2&format=npz",
    "inputs": 3,
    **PICTURE,
}
NO_PICTURE: Json = {"layers": ["pool"], "inputs": [{"image": "AAAA"}]}
BAD: Json = {"name": "bad", "weight": 2, "path": "/extract", "json": NO_PICTURE, "expect": 422}
UNKNOWN: Json = {"name": "unknown", "path": "/extract?layers=nowhere", **PICTURE}
ROWS: Json = {"model": "gated", "layers": ["linear"], "inputs": [tensor(np.zeros(4, np.float32))] * 20}
GATED: Json = {"name": "gated", "path": "/extract", "json": ROWS}


def of(*entries: Json) -> list[RequestKind]:
    """The scenario of some entries."""
    return make_scenario(list(entries), ROOT)

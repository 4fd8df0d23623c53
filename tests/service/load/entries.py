"""Kinds of requests that tests of the load tester send, and what makes scenarios of them."""

from __future__ import annotations

from pathlib import Path

from layertap.service.load.options import Options
from layertap.service.load.scenario import RequestKind, make_scenario
from tests.service.support import Json

ROOT = Path(__file__).parents[3]
NOWHERE = "http://127.0.0.1:1"
OPTIONS = Options(NOWHERE, requests=100)
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
ROWS: Json = {"name": "rows", "path": "/extract?layers=pool", "random": [3, 32, 32], "inputs": 4}
NO_PICTURE: Json = {"layers": ["pool"], "inputs": [{"image": "AAAA"}]}
BAD: Json = {"name": "bad", "weight": 2, "path": "/extract", "json": NO_PICTURE, "expect": 422}
UNKNOWN: Json = {"name": "unknown", "path": "/extract?layers=nowhere", **PICTURE}
GATED: Json = {"name": "gated", "path": "/extract?model=gated&layers=linear", "random": [4]}
LOOPS: dict[str, Json] = {"closed": {"connections": 4}, "open": {"rate": 200.0}}


def of(*entries: Json) -> list[RequestKind]:
    """The scenario of some entries."""
    return make_scenario(list(entries), ROOT)

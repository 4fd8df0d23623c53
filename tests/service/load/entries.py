"""Kinds of requests that tests of the load tester send, and what makes scenarios of them."""

from __future__ import annotations

from pathlib import Path

from layertap.service.load.options import Options
from layertap.service.load.scenario import Scenario, make_scenario
from tests.service.support import Json

ROOT = Path(__file__).parents[3]
NOWHERE = "http://127.0.0.1:1"
OPTIONS = Options(NOWHERE, requests=100)
PICTURE = {"picture": str(ROOT / "examples" / "digit.png")}
VECTOR = {"name": "vector", "weight": 3, "input": PICTURE, "layers": "pool", "pool": "flatten"}
BLOCKS = {"name": "blocks", "weight": 2, "input": PICTURE, "inputs": 3, "layers": ["block1", "block2"], "format": "npz"}
ROWS = {"name": "rows", "input": {"random": [3, 32, 32]}, "inputs": 4, "layers": "pool"}
BAD = {"name": "bad", "weight": 2, "input": {"bad": True}, "layers": "pool"}
UNKNOWN = {"name": "unknown", "input": PICTURE, "layers": "nowhere"}
GATED = {"name": "gated", "model": "gated", "input": {"random": [4]}, "layers": "linear"}
LOOPS: dict[str, Json] = {
    "closed": {"connections": 4},
    "open": {"rate": 200.0},
    "constant": {"rate": 200.0, "arrivals": "constant"},
}


def of(*entries: Json) -> Scenario:
    """The scenario of some entries."""
    return make_scenario(list(entries), ROOT)


def weights(scenario: Scenario) -> list[float]:
    """How often each kind is sent."""
    return [each.weight for each in scenario]

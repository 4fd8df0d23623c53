"""What would cost much is refused before it does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server import Live
from tests.service.conftest import Control
from tests.service.support import image, npy, picture, problem, raw

INPUT = {"inputs": [image(picture())]}
BODIES = {
    "inputs": ({"layers": ["pool"], "inputs": [{}] * 300_000}, 413),
    "fields": ({f"f{number}": 0 for number in range(300_000)}, 422),
    "fields of an input": ({"layers": ["pool"], "inputs": [{f"f{number}": 0 for number in range(100_000)}]}, 422),
    "inputs of a wrong type": ({"layers": ["pool"], "inputs": [0] * 200}, 422),
    "layers of a wrong type": ({"layers": [0] * 50_000, **INPUT}, 422),
    "an index twice": ({"layers": [{"layer": "block2", "channels": [1] * 10_000, "pool": "max"}], **INPUT}, 422),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(live: Live, control: Control, name: str) -> None:
    """A body that expands into many objects or complaints gets one short answer."""
    body, status = BODIES[name]
    problem(live.client.post("/extract", json=body), status)
    control.check()


@pytest.mark.parametrize("shape", [(3, 1, 4_100_000), (3, 2050, 2050)])
def test_shapes(live: Live, control: Control, shape: tuple[int, ...]) -> None:
    """A tensor of more pixels than a picture may have is refused, with the figure."""
    body = raw(npy(np.zeros(shape, np.float16)), "application/x-npy", layers="pool")
    assert "limit" in problem(live.client.post("/extract", **body), 413)["detail"]
    control.check()


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_whole_numbers(live: Live, dtype: str) -> None:
    """Pixels that nobody preprocessed are no input of a model that takes floating numbers."""
    body = raw(npy(np.ones((3, 32, 32), dtype)), "application/x-npy", layers="pool")
    found = problem(live.client.post("/extract", **body), 422)
    assert dtype in found["detail"]


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"layrs": ["pool"]}, "'layers'"),
        ({"layers": "pool"}, '"layers": ["NAME"'),
        ({"layers": ["pool"], "pool": "avg"}, "mean"),
        ({"layers": [{"layer": "pool", "as": "a b"}]}, "letters"),
    ],
)
def test_hints(live: Live, body: dict[str, object], hint: str) -> None:
    """The usual slips are answered with what to type instead."""
    found = problem(live.client.post("/extract", json=body | INPUT), 422)
    assert any(hint in fault["detail"] + fault.get("hint", "") for fault in found["errors"])

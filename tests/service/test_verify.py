"""``verify`` over HTTP: the same arrays as without it, said to be verified in every format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import arrays_of, configured, image, picture, problem, rows, same, tensor

HEADER = "x-layertap-verified"
INPUTS = [image(picture(seed)) for seed in range(3)]
LAYERS = ["block1", "block2.relu#*", {"layer": "block3", "stats": ["mean", "zeros"]}, "head:input"]


def extract(live: Live, form: str, **body: Any) -> Any:
    return live.client.post("/extract", json={"layers": LAYERS, "inputs": INPUTS, **body}, params={"format": form})


@pytest.mark.parametrize("form", ["json", "npz", "safetensors"])
def test_formats(live: Live, form: str) -> None:
    """The same bits and the same fingerprint; the header says it, and the formats that have a place for it."""
    plain, found = (extract(live, form, isolated=True, verify=verify) for verify in (False, True))
    assert same(arrays_of(found), arrays_of(plain))
    assert found.headers["x-layertap-fingerprint"] == plain.headers["x-layertap-fingerprint"]
    assert (found.headers.get(HEADER), plain.headers.get(HEADER)) == ("true", None)
    if form == "json":
        assert found.json()["verified"] is True
        assert "verified" not in plain.json()
    if form == "safetensors":
        size = int.from_bytes(found.content[:8], "little")
        assert json.loads(found.content[8 : 8 + size])["__metadata__"]["verified"] == "true"


def test_failure(serve: Serve) -> None:
    """A value that the model writes to under another name is named; others get their answers after it."""
    factory = "python:tests.models.capture.test_verification:Aliased"
    spec = ModelSpec("aliased", factory, weights="random:0", inputs=(InputSpec("x", (4,)),))
    with serve(configured(spec)) as live:
        body = {"model": "aliased", "layers": ["head", "same"], "inputs": [tensor(rows(1)[0])], "verify": True}
        found = problem(live.client.post("/extract", json=body), 422)
        assert "'same#0'" in found["detail"]
        assert found["errors"][0]["pointer"] == "/verify"
        reply = live.client.post("/extract", json=body | {"layers": ["head"]})
        assert reply.json()["verified"] is True
        assert np.isfinite(arrays_of(reply)["head"]).all()

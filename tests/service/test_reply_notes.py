"""What every reply says beside its results, whatever its format: which inputs were left out, that it was verified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import (
    Json,
    arrays_of,
    configured,
    image,
    metadata,
    net,
    npy,
    picture,
    problem,
    raw,
    rows,
    safetensors_of,
    same,
    tensor,
)

FORMATS = ("json", "npy", "safetensors")
SKIPPED, VERIFIED = "x-layertap-skipped", "x-layertap-verified"
GOOD = [image(picture(seed)) for seed in range(3)]
INPUTS = [GOOD[0], image(b"no picture"), GOOD[1], GOOD[2], {"image": "!"}]  # places 1 and 4 can't be read
ROWS = np.zeros((6, 3, 32, 32), np.float32)
ROWS[[1, 4], 0, 0, 0] = np.nan


def sent(form: str) -> Json:
    """A request of which the inputs 1 and 4 can't be used."""
    query = {"layers": "pool", "on_error": "skip"}
    parts = [picture(0), b"no picture", picture(1), picture(2), b""]
    return {
        "json": {"json": {"layers": ["pool"], "inputs": INPUTS, "on_error": "skip"}},
        "multipart": {"files": [("images", part) for part in parts], "params": query},
        "npy": raw(npy(ROWS), "application/x-npy", **query),
        "safetensors": raw(safetensors_of(image=ROWS), "application/x-safetensors", **query),
    }[form]


def post(live: Live, request: Json, path: str = "/extract", **query: str) -> Any:
    return live.client.post(path, **{**request, "params": {**request.get("params", {}), **query}})


@pytest.mark.parametrize("form", ["json", "multipart", "npy", "safetensors"])
def test_named(live: Live, form: str) -> None:
    """The head says which, by their places in the request, and so does what the format has for it."""
    for format_ in FORMATS:
        reply = post(live, sent(form), format=format_)
        assert reply.headers[SKIPPED] == "1,4"
        assert len(next(iter(arrays_of(reply).values()))) == (4 if form in ("npy", "safetensors") else 3)
        if format_ == "json":
            assert [error["input"] for error in reply.json()["errors"]] == [1, 4]
        if format_ == "safetensors":
            assert metadata(reply)["skipped"] == "1,4"


def test_explanations(live: Live) -> None:
    """Maps are told apart in the same way."""
    body = {"method": "saliency", "inputs": INPUTS, "on_error": "skip"}
    reply = post(live, {"json": body}, "/explain", format="npy")
    assert reply.headers[SKIPPED] == "1,4"
    assert len(next(iter(arrays_of(reply).values()))) == 3


LAYERS = ["block1", "block2.relu#*", {"layer": "block3", "stats": ["mean", "zeros"]}, "head:input"]


@pytest.mark.parametrize("form", ["json", "npz", "safetensors"])
def test_verified(live: Live, form: str) -> None:
    """The same bits and the same fingerprint; the header says it, and the formats that have a place for it."""
    plain, found = (
        post(live, {"json": {"layers": LAYERS, "inputs": GOOD, "isolated": True, "verify": verify}}, format=form)
        for verify in (False, True)
    )
    assert same(arrays_of(found), arrays_of(plain))
    assert found.headers["x-layertap-fingerprint"] == plain.headers["x-layertap-fingerprint"]
    assert (found.headers.get(VERIFIED), plain.headers.get(VERIFIED)) == ("true", None)
    if form == "json":
        assert found.json()["verified"] is True
        assert "verified" not in plain.json()
    if form == "safetensors":
        assert metadata(found)["verified"] == "true"


def test_not_verified(serve: Serve) -> None:
    """A value that the model writes to under another name is named; others get their answers after it."""
    with serve(configured(net("aliased", "Aliased", module="tests.models.capture.test_verification"))) as live:
        body = {"model": "aliased", "layers": ["head", "same"], "inputs": [tensor(rows(1)[0])], "verify": True}
        found = problem(live.client.post("/extract", json=body), 422)
        assert "'same#0'" in found["detail"]
        assert found["errors"][0]["pointer"] == "/verify"
        reply = live.client.post("/extract", json=body | {"layers": ["head"]})
        assert reply.json()["verified"] is True
        assert np.isfinite(arrays_of(reply)["head"]).all()

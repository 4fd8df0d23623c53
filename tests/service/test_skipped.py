"""Where inputs are left out every reply says which, whatever its format: no vector is attached to the wrong id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server import Live
from tests.service.support import Json, arrays_of, image, metadata, npy, picture, raw, safetensors_of

FORMATS = ("json", "npy", "safetensors")
HEADER = "x-layertap-skipped"
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
@pytest.mark.parametrize("format_", FORMATS)
def test_named(live: Live, form: str, format_: str) -> None:
    """The head says which, by their places in the request, and so does what the format has for it."""
    reply = post(live, sent(form), format=format_)
    arrays = arrays_of(reply)
    assert reply.headers[HEADER] == "1,4"
    assert len(next(iter(arrays.values()))) == (4 if form in ("npy", "safetensors") else 3)
    if format_ == "json":
        assert [error["input"] for error in reply.json()["errors"]] == [1, 4]
    if format_ == "safetensors":
        assert metadata(reply)["skipped"] == "1,4"


@pytest.mark.parametrize("format_", FORMATS)
def test_explanations(live: Live, format_: str) -> None:
    """Maps are told apart in the same way."""
    body = {"method": "saliency", "inputs": INPUTS, "on_error": "skip"}
    reply = post(live, {"json": body}, "/explain", format=format_)
    assert reply.headers[HEADER] == "1,4"
    assert len(next(iter(arrays_of(reply).values()))) == 3

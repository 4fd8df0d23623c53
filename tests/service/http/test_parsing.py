"""Three ways to send a request, one meaning."""

from __future__ import annotations

import json
import tempfile
from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.inputs.preprocess import preprocess
from layertap.service.inputs.images import decode_image
from tests.oracle import record
from tests.server import Live
from tests.service.support import (
    Array,
    Json,
    arrays_of,
    image,
    npy,
    npz,
    picture,
    problem,
    raw,
    safetensors_of,
    same,
    tensor,
    text64,
)

LAYERS = ["block1", "block2.bn2", "block3:input", "pool"]
QUERY = {"layers": ",".join(LAYERS), "dtype": "float16"}
BODY = {"layers": LAYERS, "dtype": "float16"}
PNG, JPEG = picture(1), picture(2, (64, 48), "JPEG")


def prepared(live: Live, data: bytes) -> Array:
    """What the model takes for a picture."""
    model = live.engine.manager.registry.get_entry("digits").model
    assert model is not None
    assert model.preprocess is not None
    return preprocess(decode_image(data, 10**6).image, model.preprocess).numpy()


def files(*pictures: bytes, request: Json | None = None, name: str = "p.bin") -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = [("images", (name, each, "application/octet-stream")) for each in pictures]
    return [("request", (None, json.dumps(request), "application/json")), *parts] if request is not None else parts


def test_one_meaning(live: Live) -> None:
    """A picture gives the same bits by each of the ways to send it, or the tensor that it becomes."""
    row = prepared(live, PNG)
    forms: dict[str, Json] = {
        "base64": {"json": BODY | {"inputs": [image(PNG)]}},
        "data URI": {"json": BODY | {"inputs": [{"image": f"data:image/png;base64,{text64(PNG)}"}]}},
        "wrong label": {"json": BODY | {"inputs": [{"image": f"DATA:text/plain;charset=x;BASE64,{text64(PNG)}"}]}},
        "tensor": {"json": BODY | {"inputs": [tensor(row)]}},
        "request and images": {"files": files(PNG, request=BODY)},
        "images and query": {"files": files(PNG), "params": QUERY},
        "raw": raw(PNG, "image/png", **QUERY),
        "several layers parameters": raw(PNG, "IMAGE/PNG", layers=LAYERS, dtype="float16"),
        "npy": raw(npy(row), "application/x-npy", **QUERY),
        "Fortran order": raw(npy(np.asfortranarray(row)), "application/x-npy", **QUERY),
        "big-endian": raw(npy(row.astype(">f4")), "application/x-npy", **QUERY),
        "npz": raw(npz(image=row), "application/x-npz", **QUERY),
        "safetensors": raw(safetensors_of(image=row), "application/x-safetensors", **QUERY),
        "safetensors, any name": raw(safetensors_of(arr_0=row[None]), "application/x-safetensors", **QUERY),
    }
    replies = {name: live.client.post("/extract", **form) for name, form in forms.items()}
    first = arrays_of(replies["base64"])
    assert {array.dtype.name for array in first.values()} == {"float16"}
    assert [name for name, reply in replies.items() if not same(arrays_of(reply), first)] == []
    arrays = {"tensor", "npy", "Fortran order", "big-endian", "npz", "safetensors", "safetensors, any name"}
    prints = {name: reply.json()["fingerprint"] for name, reply in replies.items()}
    assert len({prints[name] for name in arrays}) == 1
    assert len({prints[name] for name in prints.keys() - arrays}) == 1
    assert len(set(prints.values())) == 2


def test_truth(live: Live) -> None:
    """What comes back is what a hook with an immediate copy sees, though the model goes on in place."""
    model = live.engine.manager.registry.get_entry("digits").model
    assert model is not None
    seen = record(model.module, torch.from_numpy(prepared(live, PNG))[None])
    found = arrays_of(live.client.post("/extract", json={"layers": LAYERS, "inputs": [image(PNG)]}))
    for key, array in found.items():
        layer, _, site = key.partition(":")
        np.testing.assert_allclose(array, seen[layer, 0, (), site or "output"].numpy(), atol=1e-5)
    assert not np.array_equal(found["block2.bn2"], seen["block2.relu", 1, (), "output"].numpy())


@pytest.mark.parametrize("form", ["json", "request and images", "npy", "safetensors"])
def test_several_inputs(live: Live, form: str) -> None:
    """Rows come back in the order in which their inputs were sent, whatever form they were sent in."""
    pictures = [PNG, JPEG, picture(3), PNG]
    batch = np.stack([prepared(live, each) for each in pictures])
    forms: dict[str, Json] = {
        "json": {"json": BODY | {"inputs": [image(each) for each in pictures]}},
        "request and images": {"files": files(*pictures, request=BODY)},
        "npy": raw(npy(batch), "application/x-npy", **QUERY),
        "safetensors": raw(safetensors_of(image=batch), "application/x-safetensors", **QUERY),
    }
    reply = live.client.post("/extract", **forms[form])
    found = arrays_of(reply)
    assert reply.json()["rows"] == 4
    assert reply.json()["receipts"]["pool"]["captured"] == [4, 64, 1, 1]
    for at, each in enumerate(pictures):
        alone = arrays_of(live.client.post("/extract", json=BODY | {"inputs": [image(each)]}))
        for key, array in found.items():
            np.testing.assert_allclose(array[at], alone[key][0], atol=1e-2)
    assert np.array_equal(found["pool"][0], found["pool"][3])


@pytest.mark.parametrize("name", [None, "p.png"])
def test_multipart_bytes(live: Live, name: str | None) -> None:
    """A part of a multipart body is its bytes, whether or not the client gives it the name of a file."""
    parts = [("images", (name, PNG)), ("request", (name, json.dumps(BODY)))]
    reply = live.client.post("/extract", files=parts)
    assert same(arrays_of(reply), arrays_of(live.client.post("/extract", json=BODY | {"inputs": [image(PNG)]})))


def test_multipart_between_texts(live: Live) -> None:
    """What stands before the first part of a multipart body, or behind the last one, is none of it."""
    sent = live.client.build_request("POST", "/extract", files=files(PNG), params=QUERY)
    kind, body = sent.headers["content-type"], sent.read()
    around = b"a preamble\r\n--not a part\r\n" + body + b"an epilogue\r\n"
    reply = live.client.post("/extract", **raw(around, kind, **QUERY))
    assert same(arrays_of(reply), arrays_of(live.client.post("/extract", json=BODY | {"inputs": [image(PNG)]})))
    problem(live.client.post("/extract", **raw(body[: body.rindex(b"--")], kind, **QUERY)), 400)
    within = body.replace(PNG, b"no picture " + body[: body.index(b"\r\n")] + b"-- is here")
    problem(live.client.post("/extract", **raw(within[: within.rindex(b"--")], kind, **QUERY)), 400)


def test_no_temporary_file(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of any size stay in memory: a server that could write nowhere takes them all the same."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    large = picture(5, (1500, 1500))
    assert len(large) > 4 * 2**20
    reply = live.client.post("/extract", files=files(large, PNG, request=BODY))
    assert reply.json()["rows"] == 2

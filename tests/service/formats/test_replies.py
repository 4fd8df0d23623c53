"""What comes back: the same arrays in every format, the headers that are always there, receipts, fingerprints."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors
from scipy.sparse import csr_array

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, image, picture, problem, rows, same, tensor

LAYERS = ["block3", {"layer": "pool", "pool": "flatten", "as": "v"}, "block3.relu#*"]
FORMATS = {
    "json": "application/json",
    "npz": "application/x-npz",
    "safetensors": "application/x-safetensors",
}
INPUTS = [image(picture(1)), image(picture(2, (64, 48), "JPEG"))]


def extract(live: Live, accept: str | None = None, form: str | None = None, **body: Any) -> Any:
    """A reply in a format."""
    return live.client.post(
        "/extract",
        json={"layers": LAYERS, "inputs": INPUTS, **body},
        headers={"accept": accept} if accept else {},
        params={"format": form} if form else {},
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_formats_agree(live: Live, dtype: str) -> None:
    """The same bits come in every format and both encodings, asked for by header or by parameter."""
    first = arrays_of(extract(live, dtype=dtype))
    others = [extract(live, dtype=dtype, encoding="base64")]
    others += [extract(live, media_type, dtype=dtype) for media_type in FORMATS.values()]
    others += [extract(live, form=name, dtype=dtype) for name in FORMATS]
    assert [other for other in others if not same(arrays_of(other), first)] == []
    expected = ["block3", "v", "block3.relu#0", "block3.relu#1"]
    assert [key for key in first if not key.endswith(".scale")] == expected
    assert {first[key].dtype.name for key in expected} == {dtype}


def test_sparse(live: Live) -> None:
    """The values that are not 0 come as Qdrant takes them, and as scipy's rows; nothing else is left out."""
    asked = {"layers": [{"layer": "block3.relu#1", "pool": "flatten", "as": "v"}], "encoding": "sparse"}
    dense = arrays_of(extract(live, **{**asked, "encoding": "list"}))["v"]
    entry = extract(live, **asked).json()["features"]["v"]
    assert entry["shape"] == list(dense.shape)
    for row, values in zip(entry["data"], dense, strict=True):
        assert row["indices"] == values.nonzero()[0].tolist()
        assert np.array(row["values"], np.float32).tolist() == values[row["indices"]].tolist()
    for form in ("npz", "safetensors"):
        found = arrays_of(extract(live, form=form, **asked))
        parts = found["v.data"], found["v.indices"], found["v.indptr"]
        assert (csr_array(parts, tuple(found["v.shape"])).toarray() == dense).all(), form
    assert 0 < len(found["v.data"]) < dense.size


def test_sparse_lists_are_bounded(serve: Serve) -> None:
    """Indices and values are numbers in lists, too."""
    asked = {"layers": [{"layer": "block3.relu#1", "pool": "flatten"}], "encoding": "sparse"}
    with serve(max_json_numbers=64) as live:
        assert "numbers in JSON lists" in problem(extract(live, **asked), 413)["detail"]
        assert extract(live, form="npz", **asked).status_code == 200


@pytest.mark.parametrize(("form", "layer"), [("npy", {"layer": "pool", "pool": "mean"}), ("npz", "block3")])
def test_no_place_for_sparse(live: Live, form: str, layer: Any) -> None:
    """A single array has no parts, and maps are no rows."""
    assert problem(extract(live, form=form, layers=[layer], encoding="sparse"), 406)["hint"]


def test_each_layer_its_own_dtype(live: Live) -> None:
    """An entry of ``layers`` may have options of its own."""
    entries = [{"layer": "pool", "dtype": "float16"}, {"layer": "block3", "pool": "max", "normalize": True}, "head"]
    found = arrays_of(extract(live, layers=entries, pool="mean"))
    assert {key: (array.dtype.name, array.shape) for key, array in found.items()} == {
        "pool": ("float16", (2, 64)),
        "block3": ("float32", (2, 64)),
        "head": ("float32", (2, 10)),
    }
    np.testing.assert_allclose(np.linalg.norm(found["block3"], axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(("pool", "normalize"), [("mean", False), ("max", True), ("gem", False), ("flatten", True)])
def test_pools(live: Live, pool: str, normalize: bool) -> None:
    """A pooled result is what the pool says, computed from the unpooled one, and normalised over its last axis."""
    whole = arrays_of(extract(live, layers=["block2"]))["block2"]
    found = arrays_of(extract(live, layers=["block2"], pool=pool, normalize=normalize))["block2"]
    pooled: Array = {
        "mean": lambda: whole.mean((2, 3)),
        "max": lambda: whole.max((2, 3)),
        "gem": lambda: (np.maximum(whole, 1e-6) ** 3).mean((2, 3)) ** (1 / 3),
        "flatten": lambda: whole.reshape(2, -1),
    }[pool]()
    expected = pooled / np.linalg.norm(pooled, axis=1, keepdims=True) if normalize else pooled
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_receipts(live: Live) -> None:
    """A receipt tells layer, call, class, site, what was captured and what was done to it."""
    entries = [{"layer": "block2.relu#0", "pool": "mean", "normalize": True, "as": "r"}, "head:input"]
    receipts = extract(live, layers=entries).json()["receipts"]
    prints = [receipt.pop("fingerprint") for receipt in receipts.values()]
    assert len({*prints, *(receipt.pop("space") for receipt in receipts.values())}) == 4
    assert receipts == {
        "r": {
            "layer": "block2.relu",
            "call": 0,
            "module": "ReLU",
            "site": "output",
            "layout": "NCHW",
            "captured": [2, 32, 16, 16],
            "dtype": "float32",
            "pool": "mean",
            "normalize": True,
        },
        "head:input": {
            "layer": "head",
            "call": 0,
            "module": "Linear",
            "site": "input",
            "layout": "NC",
            "captured": [2, 64],
            "dtype": "float32",
            "pool": "none",
        },
    }


def test_safetensors_metadata(live: Live) -> None:
    """A safetensors reply carries in its metadata what a JSON reply has beside the arrays, and nothing in headers."""
    document = extract(live).json()
    reply = extract(live, "application/x-safetensors")
    size = int.from_bytes(reply.content[:8], "little")
    metadata = json.loads(reply.content[8 : 8 + size])["__metadata__"]
    assert {key: metadata[key] for key in ("model", "fingerprint", "rows")} == {
        "model": "digits",
        "fingerprint": document["fingerprint"],
        "rows": "2",
    }
    assert json.loads(metadata["receipts"]) == document["receipts"]
    assert json.loads(metadata["errors"]) == []
    assert sum(len(name) + len(value) for name, value in reply.headers.raw) < 1024
    assert safetensors.deserialize(reply.content)


def test_fingerprint(live: Live) -> None:
    """The fingerprint is the same in header, body and on every call, and another one for other results."""
    replies = [extract(live, form=form) for form in ("json", "npz", "safetensors")]
    prints = {reply.headers["x-layertap-fingerprint"] for reply in replies}
    assert prints == {replies[0].json()["fingerprint"]}
    changes: list[Json] = [{"pool": "mean"}, {"dtype": "float16"}, {"layers": ["block1"]}, {"layers": ["block1:input"]}]
    assert len(prints | {extract(live, **change).json()["fingerprint"] for change in changes}) == 5
    pictures = [image(picture(7))]
    assert extract(live, inputs=pictures, encoding="base64").json()["fingerprint"] in prints


def test_headers(live: Live) -> None:
    """Id, timings, variation and fingerprint are in the head of every reply; nothing is compressed."""
    for form in FORMATS:
        headers = extract(live, form=form).headers
        assert headers["content-type"] == FORMATS[form]
        assert headers["vary"] == "Accept"
        assert headers["x-content-type-options"] == "nosniff"
        assert "content-encoding" not in headers
        entries = headers["server-timing"].split(", ")
        steps = [step.partition(";dur=") for step in entries if ";dur=" in step]
        assert [name for name, _, _ in steps] == [
            *("parse", "decode", "queue", "forward", "copy", "encode", "total"),
        ]
        assert [name.partition(";desc=")[0] for name in entries[len(steps) :]] == ["fill", "depth"]
        assert all(float(milliseconds) >= 0 for _, _, milliseconds in steps)
        assert sum(float(milliseconds) for _, _, milliseconds in steps[:-1]) <= float(steps[-1][2]) + 0.1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123_X.y", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("<script>", False),
        ("ü", False),
        ("", False),
    ],
)
def test_request_id(live: Live, given: str, kept: bool) -> None:
    """A harmless id of the caller's comes back, any other is replaced, on good and bad requests alike."""
    for path in ("/models", "/nowhere"):
        reply = live.client.get(path, headers={b"x-request-id": given.encode("latin-1")})
        assert (reply.headers["x-request-id"] == given) == kept
        assert 0 < len(reply.headers["x-request-id"]) <= 64
    assert problem(reply, 404)["request_id"] == reply.headers["x-request-id"]


def test_not_finite(live: Live) -> None:
    """Values that JSON has no number for are null in lists and exact in every other format."""
    request: Json = {"model": "gated", "layers": ["linear"], "dtype": "float16", "inputs": [tensor(rows(1, 1e30)[0])]}
    listed = live.client.post("/extract", json=request)
    assert listed.json()["features"]["linear"]["data"] == [[None] * 3]
    for exact in ({"params": {"format": "npz"}}, {"json": request | {"encoding": "base64"}}):
        found = arrays_of(live.client.post("/extract", **{"json": request, **exact}))
        assert np.isinf(found["linear"]).all()

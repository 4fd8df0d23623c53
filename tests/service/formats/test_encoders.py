from __future__ import annotations

import base64
import json
import zipfile
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from layertap.service.errors import NotAcceptableError
from layertap.service.features import Features, Receipt
from layertap.service.formats.buffers import EncodeOptions
from layertap.service.formats.table import FORMATS

Array = np.ndarray[Any, Any]


def receipt(layer: str, **changes: Any) -> Receipt:
    values: dict[str, Any] = {
        "layer": layer,
        "call": 1,
        "module": "Conv2d",
        "site": "output",
        "path": "",
        "layout": "NCHW",
        "captured": (2, 3, 4, 4),
        "dtype": "float32",
        "pool": "mean",
        "normalize": False,
        "fingerprint": "f00d",
    }
    return Receipt(**values | changes)


def features(arrays: dict[str, Array], **changes: Any) -> Features:
    values: dict[str, Any] = {
        "model": "resnet50",
        "fingerprint": "cafe",
        "rows": 2,
        "receipts": {key: receipt(key) for key in arrays},
    }
    return Features(arrays=arrays, **values | changes)


CHANCE = np.random.default_rng(11)
BITS = CHANCE.integers(0, 65536, 4000, dtype=np.uint16).view(np.float16)
ARRAYS: dict[str, Array] = {
    "layer4": CHANCE.standard_normal((2, 5, 3)).astype(np.float32),
    "tiny and huge": np.array([[1e-45, 3.4e38, -0.0, 1 / 3]], np.float32),
    "half": BITS[np.isfinite(BITS)][:3000].reshape(2, -1),
    "double": CHANCE.standard_normal((2, 4)),
    "int8": CHANCE.integers(-128, 128, (2, 7), dtype=np.int8),
    "int64": np.array([[2**62 + 1, -(2**62) - 1]]),
    "mask": np.array([[True, False]]),
    "no axis": np.array(0.1, np.float32),
    "one row": np.array([0.1], np.float32),
    "no rows": np.zeros((0, 3), np.float32),
    "no columns": np.zeros((2, 0, 3), np.float16),
    "file": np.array([[1.0]], np.float32),
    "layer3.0#1[logits][0]:grad_output": np.array([[2.0]], np.float32),
    "a/b \\ \"c\" 'd' é": np.array([[3.0]], np.float32),
}


def encode(name: str, result: Features, encoding: Any = "list") -> bytes:
    return b"".join(FORMATS[name].encode(result, EncodeOptions(encoding)))


def same(found: Array, expected: Array) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


def from_json(body: bytes) -> dict[str, Array]:
    found = json.loads(body)["features"]
    return {key: np.array(each["data"], each["dtype"]).reshape(each["shape"]) for key, each in found.items()}


def from_base64(body: bytes) -> dict[str, Array]:
    return {
        key: np.frombuffer(base64.b64decode(each["data"], validate=True), each["dtype"]).reshape(each["shape"])
        for key, each in json.loads(body)["features"].items()
    }


def from_npz(body: bytes) -> dict[str, Array]:
    with np.load(BytesIO(body), allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


READERS = {
    "json": ("json", "list", from_json),
    "base64": ("json", "base64", from_base64),
    "npz": ("npz", "list", from_npz),
    "safetensors": ("safetensors", "list", safetensors.numpy.load),
}


@pytest.mark.parametrize("kind", READERS)
def test_round_trip(kind: str) -> None:
    """Every format gives back each array bit by bit, under its own key, to a reader that is not ours."""
    name, encoding, read = READERS[kind]
    found = read(encode(name, features(ARRAYS), encoding))
    assert found.keys() == ARRAYS.keys()
    assert [key for key in ARRAYS if not same(found[key], ARRAYS[key])] == []


QUANTISED = features(
    {"x": np.array([[127, -128], [5, 0]], np.int8), "y": np.array([[1.0]], np.float32)},
    scales={"x": np.array([0.1, 2.5], np.float32)},
)


@pytest.mark.parametrize("name", ["npz", "safetensors"])
def test_scale(name: str) -> None:
    """The scale of an int8 result is an array of its own, KEY.scale."""
    found = READERS[name][2](encode(name, QUANTISED))
    assert found.keys() == {"x", "y", "x.scale"}
    assert same(found["x.scale"], QUANTISED.scales["x"])


@pytest.mark.parametrize("name", ["npz", "safetensors"])
def test_scale_meets_a_key(name: str) -> None:
    """Where a scale would overwrite another result, the reply is refused."""
    arrays = {"x": QUANTISED.arrays["x"], "x.scale": QUANTISED.arrays["y"]}
    with pytest.raises(NotAcceptableError, match=r"'x\.scale'"):
        encode(name, features(arrays, scales=QUANTISED.scales))


@pytest.mark.parametrize(
    "result",
    [features({}), features({"a": ARRAYS["file"], "b": ARRAYS["file"]}), features({"x": QUANTISED.arrays["x"]})],
    ids=["none", "two", "scaled"],
)
def test_npy_refused(result: Features) -> None:
    """A .npy reply is refused for none or several results and for one with a scale, naming the format to use."""
    scales = QUANTISED.scales if "x" in result.arrays else {}
    with pytest.raises(NotAcceptableError) as caught:
        encode("npy", features(result.arrays, scales=scales))
    assert "format=npz" in caught.value.hint


def test_npz_archive() -> None:
    """A .npz reply holds its arrays only, unpacked and without the time of day."""
    with zipfile.ZipFile(BytesIO(encode("npz", features(ARRAYS)))) as archive:
        assert archive.testzip() is None
        assert [entry.filename for entry in archive.infolist()] == [f"{key}.npy" for key in ARRAYS]
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        # Sizes and sums stand before the data: behind it many readers don't look for them.
        assert not any(entry.flag_bits & 8 for entry in archive.infolist())


def test_safetensors_reserved_name() -> None:
    """A result cannot be named as the format's own entry."""
    with pytest.raises(NotAcceptableError, match="__metadata__"):
        encode("safetensors", features({"__metadata__": ARRAYS["file"]}))

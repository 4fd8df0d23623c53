"""Requests that can be read and are refused, to ``digits``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.recorded.request import Json, Request, image, noise, picture, post, send, tensor, tensor_body

PNG = picture(1)
ROW = noise(3, 32, 32)
SPOILED = np.where(np.arange(3072).reshape(3, 32, 32) == 100, np.nan, ROW).astype(np.float32)
INFINITE = np.where(np.arange(3072).reshape(3, 32, 32) == 100, np.inf, ROW).astype(np.float32)
FIELDS: dict[str, Json] = {
    "null for layers": {"layers": None},
    "no layer": {"layers": []},
    "layers as a text": {"layers": "pool"},
    "null among layers": {"layers": ["pool", None]},
    "unknown field": {"laiers": 1},
    "unknown field far from all": {"xyzzy": 1},
    "many unknown fields": {f"field{number}": number for number in range(70)},
    "some unknown fields": {f"field{number}": number for number in range(20)},
    "a field with a slash": {"a/b~c": 1},
    "a field of line breaks": {"a\r\nX-Evil: 1": 1},
    "pool": {"pool": "average"},
    "dtype": {"dtype": "float64"},
    "encoding": {"encoding": "hex"},
    "normalize": {"normalize": "maybe"},
    "on_error": {"on_error": "ignore"},
    "priority": {"priority": "urgent"},
    "verify": {"verify": "maybe"},
    "isolated": {"isolated": 7},
    "resume": {"resume": ""},
    "model as a list": {"model": ["digits"]},
    "a long model": {"model": "Q" * 400},
    "inputs as an object": {"inputs": {}},
    "too many layers": {"layers": ["p"] * 50_001},
    "normalize without a pool": {"normalize": True, "layers": ["block2"]},
    "objective without a gradient": {"objective": {"kind": "sum"}},
    "many interventions": {"interventions": [{"layer": "pool", "op": "zero"}] * 300},
    "a method": {"method": "saliency"},
}
LAYERS: dict[str, Json] = {
    "nothing": {},
    "unknown field": {"layer": "pool", "__class__": 1},
    "unknown class": {"type": "Conv3d"},
    "class of none": {"layer": "head", "type": "Conv2d"},
    "call": {"layer": "pool", "call": "all"},
    "fractional call": {"layer": "pool", "call": 0.5},
    "call that is not there": {"layer": "pool", "call": 5},
    "two calls": {"layer": "pool#0", "call": 1},
    "two sites": {"layer": "pool:input", "site": "output"},
    "unknown site": {"layer": "pool", "site": "outside"},
    "path": {"layer": "pool", "path": "["},
    "path that is not there": {"layer": "pool", "path": "[0]"},
    "negative channel": {"layer": "pool", "channels": [-1]},
    "channel that is not there": {"layer": "pool", "channels": [4096]},
    "channel twice": {"layer": "pool", "channels": [1, 1]},
    "no channel": {"layer": "pool", "channels": []},
    "as": {"layer": "pool", "as": "../x"},
    "empty as": {"layer": "pool", "as": ""},
    "pool": {"layer": "pool", "pool": "average"},
    "unknown statistic": {"layer": "pool", "stats": ["median"]},
    "a statistic twice": {"layer": "pool", "stats": ["mean", "mean"]},
    "no statistic": {"layer": "pool", "stats": []},
    "statistics and a pool": {"layer": "pool", "stats": True, "pool": "mean"},
    "statistics and normalize": {"layer": "pool", "stats": True, "normalize": True},
    "statistics as int8": {"layer": "pool", "stats": True, "dtype": "int8"},
    "tokens of a vector": {"layer": "head", "tokens": [0]},
    "cls of a map": {"layer": "block2", "pool": "cls"},
}
INPUTS: dict[str, list[Any]] = {
    "none": [],
    "nothing": [{}],
    "null": [None],
    "a null image": [{"image": None}],
    "a text for an input": ["a"],
    "unknown field": [{"path": "/etc/passwd"}],
    "two kinds": [{**image(PNG), **tensor(ROW)}],
    "url": [{"url": "http://127.0.0.1/x.png"}],
    "text": [{"text": "a cat"}],
    "tokens": [{"tokens": [1, 2]}],
    "negative tokens": [{"tokens": [1, -2]}],
    "not base64": [{"image": "not base64!"}],
    "base64 without padding": [{"image": "QQ"}],
    "another data uri": [{"image": "data:text/plain,hello"}],
    "words for a picture": [image(b"Q" * 400)],
    "the second bad": [image(PNG), image(b"x")],
    "three bad": [image(b"x"), image(b""), image(PNG), {}],
    "another shape": [tensor(ROW[:1])],
    "a batch axis": [tensor(ROW[None])],
    "no pixels": [tensor(np.zeros((3, 0, 32), np.float32))],
    "a scalar": [tensor(np.zeros((), np.float32))],
    "nan": [tensor(ROW), tensor(SPOILED)],
    "infinity": [tensor(INFINITE)],
    "integers": [tensor(np.zeros((3, 32, 32), np.int64))],
    "unknown dtype": [{"tensor": {"dtype": "object", "shape": [1], "data": ""}}],
    "too few bytes": [{"tensor": {"dtype": "float32", "shape": [3, 32, 32], "data": "AAAA"}}],
    "a huge shape": [{"tensor": {"dtype": "float32", "shape": [2**39] * 8, "data": ""}}],
    "a negative shape": [{"tensor": {"dtype": "float32", "shape": [-1], "data": ""}}],
    "no dtype": [{"tensor": {"shape": [1], "data": ""}}],
    "unknown name": [{"tensors": {"pixels": tensor_body(ROW)}}],
    "a name too many": [{"tensors": {"image": tensor_body(ROW), "more": tensor_body(ROW)}}],
    "257": [image(PNG)] * 257,
}
QUERIES: dict[str, Json] = {
    "unknown": {"layers": "pool", "lairs": "x"},
    "twice": {"layers": "pool", "pool": ["mean", "max"]},
    "two formats": {"layers": "pool", "format": ["json", "npy"]},
    "normalize": {"layers": "pool", "normalize": "x"},
    "no layers": {"layers": ",,"},
    "dry_run": {"layers": "pool", "dry_run": "perhaps"},
    "format": {"layers": "pool", "format": "exe"},
    "empty format": {"layers": "pool", "format": ""},
    "class alone": {"layers": "pool:grad_output", "class": "3"},
    "class that is none": {"layers": "pool:grad_output", "objective": "logit", "class": "cat"},
    "interventions": {"layers": "pool", "interventions": "[]"},
    "unknown model": {"layers": "pool", "model": "digit"},
    "method": {"layers": "pool", "method": "saliency"},
}
MODELS = ("digit", "../../etc/passwd", "__class__", "", "DIGITS")
FORMS: dict[str, Json] = {
    "two as npy": {"layers": ["pool", "head"]},
    "int8 as npy": {"layers": ["head"], "dtype": "int8"},
}
TIMEOUTS = ("0", "-1", "nan", "inf", "soon", "", "1e-9")


def requests() -> Iterator[Request]:
    """A good request with one thing changed."""
    good = {"layers": ["pool"], "inputs": [image(PNG)]}
    for name, fields in FIELDS.items():
        yield post(f"errors/{name}", good | fields)
    for name, entry in LAYERS.items():
        yield post(f"errors/layer with {name}", good | {"layers": [entry]})
    for name, inputs in INPUTS.items():
        yield post(f"errors/inputs: {name}", good | {"inputs": inputs})
        yield post(f"errors/inputs skipped: {name}", good | {"inputs": [*inputs, image(PNG)], "on_error": "skip"})
    for name, query in QUERIES.items():
        yield send(f"errors/query: {name}", PNG, "image/png", **query)
    for number, model in enumerate(MODELS):
        yield post(f"errors/model {number}", good | {"model": model})
    for name, fields in FORMS.items():
        yield post(f"errors/{name}", good | fields, query={"format": "npy"})
    for value in TIMEOUTS:
        yield post(f"errors/timeout '{value}'", good, headers={"x-request-timeout": value})
    yield post("errors/json with a query", good, query={"pool": "mean"})
    yield send("errors/a raw text", b"a cat", "text/plain", layers="pool")
    yield send("errors/a raw text that is not utf-8", "käse".encode("latin-1"), "text/plain", layers="pool")
    yield send("errors/no body", b"", "application/json", layers="pool")
    yield post("errors/many unknown layers", good | {"layers": [f"block{number}" for number in range(100, 150)]})
    yield send("errors/long", json.dumps(good | {"layers": ["Q" * 100_000]}).encode(), "application/json")

"""Every way to send an input."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from tests.recorded.request import (
    Json,
    Request,
    base64,
    get,
    image,
    multipart,
    noise,
    npy,
    picture,
    post,
    safetensors_of,
    send,
    tensor,
    tensors,
)

PNG, OTHER = picture(1), picture(2)
ROW, ROWS = noise(3, 32, 32), noise(3, 3, 32, 32, seed=1)
NPY, SAFETENSORS = "application/x-npy", "application/x-safetensors"
DOCUMENT = {"layers": ["pool", "head"], "pool": "flatten"}
QUERY: Json = {"layers": "pool,head", "pool": "flatten"}
JSON_INPUTS = {
    "base64": [image(PNG)],
    "data uri": [{"image": f"data:image/png;base64,{base64(PNG)}"}],
    "tensor": [tensor(ROW)],
    "tensors by name": [tensors(image=ROW)],
    "two pictures": [image(PNG), image(OTHER)],
    "three tensors": [tensor(row) for row in ROWS],
    "picture and tensor": [image(PNG), tensor(ROW)],
    "tensor of another size": [tensor(noise(3, 48, 40))],
    "tensors of two sizes": [tensor(noise(3, 48, 40)), tensor(noise(3, 32, 32)), tensor(noise(3, 48, 40))],
    "tensor in float64": [tensor(ROW.astype(np.float64))],
    "tensor in float16": [tensor(ROW.astype(np.float16))],
    "forty pictures": [image(picture(seed, (32, 32))) for seed in range(40)],
}
ARRAYS = {
    "npy": (npy(ROW), NPY),
    "npy batch": (npy(ROWS), NPY),
    "npy batch of one": (npy(ROWS[:1]), NPY),
    "npy float16": (npy(ROW.astype(np.float16)), NPY),
    "npy float64": (npy(ROW.astype(np.float64)), NPY),
    "npy big endian": (npy(ROW.astype(">f4")), NPY),
    "npy in Fortran order": (npy(np.asfortranarray(ROW)), NPY),
    "safetensors": (safetensors_of(image=ROW), SAFETENSORS),
    "safetensors batch": (safetensors_of(image=ROWS), SAFETENSORS),
    "safetensors of another name": (safetensors_of(whatever=ROW), SAFETENSORS),
}
OPTIONS: Json = {
    "model": "digits",
    "normalize": "true",
    "dtype": "float16",
    "encoding": "base64",
    "on_error": "skip",
    "priority": "bulk",
    "isolated": "true",
    "verify": "true",
}
PART = ("request", "application/json", json.dumps(DOCUMENT).encode())
PICTURE, SECOND = ("images", "image/png", PNG), ("images", "image/png", OTHER)


def requests() -> Iterator[Request]:
    """Requests to ``digits`` for two layers."""
    for name, entries in JSON_INPUTS.items():
        yield post(f"inputs/json {name}", DOCUMENT | {"inputs": entries})
    for name, (data, media_type) in ARRAYS.items():
        yield send(f"inputs/{name}", data, media_type, **QUERY)
    yield send("inputs/png", PNG, "image/png", **QUERY)
    yield send("inputs/no layers", PNG, "image/png")
    yield send("inputs/no layers with pool", PNG, "image/png", pool="none")
    yield post("inputs/json no layers", {"inputs": [image(PNG)]})
    for option, value in OPTIONS.items():
        yield send(f"inputs/query {option}", PNG, "image/png", **QUERY, **{option: value})
    yield multipart("inputs/multipart", PICTURE, PART)
    yield multipart("inputs/multipart two pictures", PICTURE, SECOND, PART)
    yield multipart("inputs/multipart by query", PICTURE, SECOND, **QUERY)
    yield multipart("inputs/multipart without layers", PICTURE)
    yield multipart("inputs/multipart npy", ("tensors", NPY, npy(ROW)), PART)
    yield multipart("inputs/multipart npy by query", *[("tensors", NPY, npy(row)) for row in ROWS], **QUERY)
    yield get("inputs/dry run without a body", "/extract", method="POST", dry_run="true", **QUERY)

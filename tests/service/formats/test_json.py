"""Large JSON in pieces: the bytes of one document, none of whose pieces keeps other threads waiting."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from layertap.service.features import Features
from layertap.service.formats.buffers import Buffers, EncodeOptions, view_bytes
from layertap.service.formats.json import NUMBER_BYTES, count_text, write_json
from layertap.service.formats.table import FORMATS
from layertap.service.oip.encoding import encode_reply
from layertap.service.openai.embeddings import encode_embeddings
from tests.service.formats.test_encoders import features

MAX_PIECE = 2**20  # bytes
CHANCE = np.random.default_rng(3)
SHAPES = ((200_000,), (3, 40_000), (2, 3, 20_000), (30_000, 2, 3), (16_385, 1), (100_000, 0), (2, 16_384), (5, 4))
ENCODERS: dict[str, Callable[[Features], Buffers]] = {
    "list": lambda given: FORMATS["json"].encode(given, EncodeOptions()),
    "base64": lambda given: FORMATS["json"].encode(given, EncodeOptions("base64")),
    "embeddings as lists": lambda given: encode_embeddings(given, "net", "list"),
    "embeddings as base64": lambda given: encode_embeddings(given, "net", "base64"),
    "open inference": lambda given: encode_reply(given, "7", {}, binary_default=False)[0],
}


def dump(document: Any) -> bytes:
    """What orjson writes at once, with memoryviews as base64."""
    return orjson.dumps(document, default=lambda view: b64encode(view).decode(), option=orjson.OPT_SERIALIZE_NUMPY)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_same_bytes(dtype: type) -> None:
    """Pieces of arrays, in dictionaries and lists, are what orjson writes of the whole."""
    arrays = [(CHANCE.standard_normal(shape) * 9).astype(dtype) for shape in SHAPES]
    document = {
        "a": 1,
        'quoted "é"': [{"of": each, "shape": each.shape} for each in arrays],
        "none": None,
        "not finite": np.array([np.nan, np.inf] * 20_000),
        "encoded": [memoryview(CHANCE.bytes(size)) for size in (0, 1, 2_000_000, 3 * 2**18, 3 * 2**18 + 1)],
        "empty": ({}, [], ()),
        "many": {str(number): list(range(100)) for number in range(1000)},
    }
    assert b"".join(write_json(document)) == dump(document)


LONGEST = {
    **{name: np.iinfo(name).min or np.iinfo(name).max for name in NUMBER_BYTES if "int" in name},
    "bool": False,
    "float16": -1.0728836e-6,
    "float32": -6.3184107e-6,
    "float64": -5.2753968819712335e194,
}


@pytest.mark.parametrize("dtype", NUMBER_BYTES)
def test_longest_numbers(dtype: str) -> None:
    """Text is as long as it was taken to be before, where the longest numbers are written."""
    array = np.full(50, LONGEST[dtype], dtype)
    taken = count_text("list", dtype, array.size, array.nbytes) + 1
    assert 0.95 * taken <= sum(map(len, write_json(array))) <= taken  # older versions of orjson write no plus sign
    quoted = sum(map(len, write_json(view_bytes(array))))
    assert quoted == count_text("base64", dtype, array.size, array.nbytes) + 2


@pytest.mark.parametrize("name", ENCODERS)
def test_bounded(name: str) -> None:
    """No reply, whoever's clients read it, is written at once where it is large."""
    result = features({"embedding": CHANCE.standard_normal((500, 4096)).astype(np.float32)}, rows=500)
    buffers = ENCODERS[name](result)
    assert sum(map(len, buffers)) > 2_000_000 * 4
    assert max(map(len, buffers)) <= MAX_PIECE
    assert orjson.loads(b"".join(buffers))

"""Results that hold no numbers, or vectors that have no length: a warning with the key and the count, or an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from layertap.models.spec import InputSpec, PreprocessSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import (
    Json,
    configured,
    encode,
    image,
    metadata,
    net,
    text64,
)

SIZE = 8
STEPS = PreprocessSpec(resize=SIZE, crop=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")
NETS = "tests.service.nets_tensors"
SPEC = net("numbers", "Numbers", InputSpec("x", (3, SIZE, SIZE)), module=NETS, preprocess=STEPS)
NAN = "'logs': 3 numbers are NaN or infinite"
SCALES = "'logs': 1 scales are NaN: the values that they scale are not finite"
ZEROS = "'zeros': 2 vectors are all zeros: they have no length 1"


@pytest.fixture(scope="module")
def numbers(serve: Serve) -> Iterator[Live]:
    """A server that takes two inputs a request, and keeps answers."""
    with serve(configured(SPEC), max_inputs=2, cache_bytes=2**20) as live:
        yield live


def plain(shade: int) -> bytes:
    """A picture of one gray: the means of those below 128 are negative."""
    return encode(np.full((SIZE, SIZE, 3), shade, np.uint8))


def post(live: Live, *shades: int, accept: str = "application/json", **body: Any) -> httpx.Response:
    inputs = [image(plain(shade)) for shade in shades]
    headers = {"accept": accept}
    return live.client.post("/extract", json={"model": "numbers", "inputs": inputs, **body}, headers=headers)


def read_warnings(reply: httpx.Response) -> list[str]:
    """What a reply of JSON warns of; its head says the same."""
    assert reply.status_code == 200, reply.text
    found: list[str] = reply.json().get("warnings", [])
    assert reply.headers.get("x-layertap-warnings", "") == "; ".join(found)
    return found


CASES: dict[str, tuple[Json, list[str]]] = {
    "NaN": ({"layers": ["logs"]}, [NAN]),
    "NaN in int8": ({"layers": ["logs"], "dtype": "int8"}, [SCALES]),
    "zeros": ({"layers": ["zeros"], "pool": "flatten", "normalize": True}, [ZEROS]),
    "overflow": ({"layers": ["large"], "dtype": "float16"}, ["'large': 6 numbers are infinite: float16 ends at 65504"]),
    "several": ({"layers": ["means", {"layer": "logs", "as": "x"}]}, ["'x': 3 numbers are NaN or infinite"]),
    "zeros that are no vectors": ({"layers": ["zeros"]}, []),
    "all is well": ({"layers": ["means"], "pool": "flatten", "normalize": True}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_warnings(numbers: Live, case: str) -> None:
    """What is wrong is counted by key, also in an answer that was kept."""
    body, wanted = CASES[case]
    for _ in range(2):
        assert read_warnings(post(numbers, 10, 200, **body)) == wanted


def test_every_format(numbers: Live) -> None:
    """The head of each reply says it, and the metadata of those formats that have any."""
    for accept in ("application/x-npy", "image/png", "application/x-safetensors"):
        reply = post(numbers, 10, 200, accept=accept, layers=["logs"])
        assert (reply.status_code, reply.headers["x-layertap-warnings"]) == (200, NAN)
    assert json.loads(metadata(reply)["warnings"]) == [NAN]
    data = np.full((1, 3, SIZE, SIZE), -1, np.float32)
    sent = {"name": "x", "shape": data.shape, "datatype": "FP32", "data": data.ravel().tolist()}
    reply = numbers.client.post("/v2/models/numbers/infer", json={"inputs": [sent], "outputs": [{"name": "logs"}]})
    assert reply.json()["parameters"]["warnings"] == reply.headers["x-layertap-warnings"] == NAN


def test_embeddings(numbers: Live) -> None:
    """In OpenAI's dialect it is an error with the input's index, counted over all parts of a request."""
    with OpenAI(base_url=f"{numbers.url}/v1", api_key="any", max_retries=0) as client:
        uris = [f"data:image/png;base64,{text64(plain(shade))}" for shade in (200, 210, 220, 10, 12)]
        assert len(client.embeddings.create(model="numbers:logs", input=uris[:3]).data) == 3
        for layer, what, index in (("logs", "numbers are NaN or infinite", 3), ("zeros", "1 vectors are all zeros", 0)):
            for more in ({}, {"encoding_format": "base64"}):
                with pytest.raises(openai.BadRequestError, match=what) as caught:
                    client.embeddings.create(model=f"numbers:{layer}", input=uris, **more)  # type: ignore[arg-type]
                assert caught.value.param == f"input[{index}]"

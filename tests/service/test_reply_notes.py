"""What every reply says beside its results: inputs that were left out, that it was verified, numbers that are none."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from layertap.models.spec import InputSpec, PreprocessSpec
from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.support import (
    Json,
    arrays_of,
    configured,
    encode,
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
    text64,
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


LAYERS = ["block1", "block2.relu#*", {"layer": "block3", "stats": ["mean", "zeros"]}, "head:input"]


def test_verified(live: Live) -> None:
    """The same bits and the same fingerprint; the header says it, and the formats that have a place for it."""
    body = {"layers": LAYERS, "inputs": GOOD, "isolated": True}
    plain, found, file = (
        post(live, {"json": body | more}, format=form)
        for more, form in (({}, "json"), ({"verify": True}, "json"), ({"verify": True}, "safetensors"))
    )
    assert same(arrays_of(found), arrays_of(plain))
    assert found.headers["x-layertap-fingerprint"] == plain.headers["x-layertap-fingerprint"]
    assert (found.headers.get(VERIFIED), plain.headers.get(VERIFIED)) == ("true", None)
    assert (found.json()["verified"], plain.json().get("verified"), metadata(file)["verified"]) == (True, None, "true")


def test_not_verified(serve: Serve) -> None:
    """A value that the model writes to under another name is named; others get their answers after it."""
    with serve(configured(net("aliased", "Aliased", module="tests.models.run.test_verification"))) as live:
        body = {"model": "aliased", "layers": ["head", "same"], "inputs": [tensor(rows(1)[0])], "verify": True}
        found = problem(live.client.post("/extract", json=body), 422)
        assert "'same#0'" in found["detail"]
        assert found["errors"][0]["pointer"] == "/verify"
        reply = live.client.post("/extract", json=body | {"layers": ["head"]})
        assert reply.json()["verified"] is True
        assert np.isfinite(arrays_of(reply)["head"]).all()


SIZE = 8
STEPS = PreprocessSpec(resize=SIZE, crop=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")
NETS = "tests.service.nets_tensors"
SPEC = net("numbers", "Numbers", InputSpec("x", (3, SIZE, SIZE)), module=NETS, preprocess=STEPS)
NAN = "'logs': 3 numbers are NaN or infinite"
SCALES = "'logs': 1 scales are NaN: the values that they scale are not finite"
ZEROS = "'zeros': 2 vectors are all zeros: they have no length 1"


numbers = server_of(SPEC, max_inputs=2)  # two inputs a request


def plain(shade: int) -> bytes:
    """A picture of one gray: the means of those below 128 are negative."""
    return encode(np.full((SIZE, SIZE, 3), shade, np.uint8))


def ask(live: Live, *shades: int, accept: str = "application/json", **body: Any) -> httpx.Response:
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
    """What is wrong is counted by key."""
    body, wanted = CASES[case]
    assert read_warnings(ask(numbers, 10, 200, **body)) == wanted


def test_every_format(numbers: Live) -> None:
    """The head of each reply says it, and the metadata of those formats that have any."""
    for accept in ("application/x-npy", "image/png", "application/x-safetensors"):
        reply = ask(numbers, 10, 200, accept=accept, layers=["logs"])
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

"""What the tests of the Open Inference Protocol share: a client of NVIDIA's package, inputs, bodies by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

from tests.server import Live
from tests.service.support import ADDRESS, Array, Json, find_secrets

HEADER = "Inference-Header-Content-Length"


@contextmanager
def connect(live: Live) -> Iterator[Any]:
    """A client of a server, as it is published."""
    with triton.InferenceServerClient(live.url.removeprefix("http://")) as client:
        yield client


def make_input(name: str, array: Array, *, binary: bool = True) -> Any:
    """An input of a request."""
    data = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    return data.set_data_from_numpy(array, binary_data=binary)


def make_bytes(name: str, elements: Sequence[bytes | str], shape: Sequence[int], *, binary: bool = True) -> Any:
    """An input of encoded elements."""
    array = np.array([*elements, None], dtype=object)[:-1].reshape(shape)  # numpy would cut bytes at their zeros
    return triton.InferInput(name, list(shape), "BYTES").set_data_from_numpy(array, binary_data=binary)


def make_outputs(*names: str, binary: bool = True) -> list[Any]:
    """Outputs that are asked for."""
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def read_outputs(result: Any) -> dict[str, Array]:
    """All outputs of a reply by their names."""
    return {each["name"]: result.as_numpy(each["name"]) for each in result.get_response()["outputs"]}


def body(*inputs: Json, data: bytes = b"", **fields: Any) -> Json:
    """The arguments of a request by hand: JSON, and bytes behind it."""
    head = json.dumps({"inputs": list(inputs), **fields}).encode()
    return {"content": head + data, "headers": {HEADER: str(len(head))} if data else {}}


def make_tensor(shape: Sequence[int] = (1, 4), data: Any = (1, 2, 3, 4), datatype: str = "FP32", **fields: Any) -> Json:
    """An input of ``body``, for a model that takes four numbers a row."""
    return {"name": "x", "shape": list(shape), "datatype": datatype, "data": data, **fields}


def behind(size: int | str, shape: Sequence[int] = (1, 4), datatype: str = "FP32") -> Json:
    """An input of ``body`` whose bytes are behind the JSON."""
    return {"name": "x", "shape": list(shape), "datatype": datatype, "parameters": {"binary_data_size": size}}


def read_error(response: httpx.Response, status: int) -> str:
    """An error's text, once it is sure that it is the protocol's and gives nothing away."""
    assert response.status_code == status, response.text[:2000]
    assert response.headers["content-type"] == "application/json"
    fields = response.json()
    assert fields.keys() == {"error"}
    text: str = fields["error"]
    assert text.strip() == text != ""
    assert len(response.content) < 1024
    assert response.text.isprintable()
    assert not find_secrets(response.text)
    assert not ADDRESS.search(response.text)
    return text

"""What the tests of the HTTP side share: requests to make, replies to read, what must hold of every error."""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from PIL import Image

from layertap.models.digits import spec as digits
from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from tests.server import Live

Array = NDArray[Any]
Json = dict[str, Any]

SECRETS = ("Traceback", "secret", "site-packages", ".py", str(Path.cwd()), sys.prefix, tempfile.gettempdir())
OWN_LINE = re.compile(r" at \w+\.py:\d+")  # of a model's own code, without a folder
ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
ALWAYS = ("x-request-id", "server-timing", "vary")
ROW = InputSpec("x", (4,))


def net(
    name: str, factory: str, *inputs: InputSpec, module: str = "tests.service.nets_http", **fields: Any
) -> ModelSpec:
    """The entry of a model of a module; it takes rows of four numbers where nothing else is said."""
    chosen = {"weights": "random:0", "device": "cpu", **fields}
    return ModelSpec(name, f"python:{module}:{factory}", inputs=inputs or (ROW,), **chosen)


def configured(*specs: ModelSpec, load: Literal["startup", "lazy"] = "lazy") -> Configuration:
    """A configuration of ``digits``, which is the default, and others.

    Alone it is loaded at startup; beside others, which most tests ask, as ``load`` says.
    """
    return Configuration((replace(digits(), load=load) if specs else digits(), *specs), "digits")


def picture(seed: int = 0, size: tuple[int, int] = (40, 32), format: str = "PNG") -> bytes:  # noqa: A002
    """An encoded picture of noise."""
    return encode(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8), format)


def encode(pixels: Array, format: str = "PNG") -> bytes:  # noqa: A002
    """An encoded picture of these pixels."""
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, format)
    return stream.getvalue()


def text64(data: bytes) -> str:
    """Base64."""
    return b64encode(data).decode()


def image(data: bytes) -> Json:
    """An entry of ``inputs``."""
    return {"image": text64(data)}


def tensor(array: Array) -> Json:
    """An entry of ``inputs``."""
    return {"tensor": {"dtype": array.dtype.name, "shape": list(array.shape), "data": text64(array.tobytes())}}


def tensors(**arrays: Any) -> Json:
    """An entry of ``inputs`` of a model of several, by name."""
    return {"tensors": {name: tensor(np.asarray(array))["tensor"] for name, array in arrays.items()}}


def rows(count: int = 1, value: float = 1.0) -> Array:
    """Rows for a model that takes four numbers each."""
    return np.full((count, 4), value, np.float32)


def npy(array: Array) -> bytes:
    """A .npy file."""
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays: Array) -> bytes:
    """A .npz file, packed."""
    stream = BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def safetensors_of(**arrays: Array) -> bytes:
    """A .safetensors file."""
    return safetensors.numpy.save(arrays)


def raw(data: bytes, media_type: str, **query: Any) -> Json:
    """The arguments of a request whose body is one input."""
    return {"content": data, "headers": {"content-type": media_type}, "params": query}


def arrays_of(response: httpx.Response) -> dict[str, Array]:
    """The arrays of a reply, whatever its format."""
    assert response.status_code == 200, response.text
    return READERS[response.headers["content-type"]](response)


def metadata(response: httpx.Response) -> dict[str, str]:
    """What a safetensors reply says beside its tensors."""
    head = json.loads(response.content[8 : 8 + int.from_bytes(response.content[:8], "little")])
    return head["__metadata__"]


def same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    """Whether keys, dtypes, shapes and bits are equal."""
    return a.keys() == b.keys() and all(
        (x.dtype, x.shape, x.tobytes()) == (b[key].dtype, b[key].shape, b[key].tobytes()) for key, x in a.items()
    )


def find_secrets(text: str) -> list[str]:
    """What an error must not give away, and does."""
    return [secret for secret in SECRETS if secret in OWN_LINE.sub("", text)]


def problem(response: httpx.Response, status: int, *, seconds: bool = False) -> Json:
    """An error's body, once it is sure that it has the fields of RFC 9457 and gives nothing away.

    ``seconds``: whether it says when to try again.
    """
    assert response.status_code == status, response.text[:2000]
    assert response.headers["content-type"] == "application/problem+json"
    assert all(name in response.headers for name in ALWAYS)
    assert ("retry-after" in response.headers) == seconds
    assert not seconds or int(response.headers["retry-after"]) >= 1
    body: Json = response.json()
    assert body["type"].startswith("urn:layertap:problem:")
    assert body["status"] == status
    assert body["title"] in (TITLES.get(status), HTTPStatus(status).phrase)
    assert body["request_id"] == response.headers["x-request-id"]
    assert body["detail"].strip() == body["detail"] != ""
    assert all(set(fault) <= {"detail", "hint", "pointer", "input"} and fault["detail"] for fault in body["errors"])
    assert body["hint"]
    assert not body["errors"] or body["errors"][0].get("hint", body["hint"]) == body["hint"]
    assert len(response.content) < 1024
    assert not find_secrets(response.text)
    assert not ADDRESS.search(response.text)
    assert response.text.isprintable()
    return body


@dataclass(frozen=True)
class Control:
    """A good request and the reply that it must always get."""

    live: Live
    request: Json
    expected: bytes

    def check(self) -> None:
        """The server is as well as before: same bytes, no hook left, ready."""
        response = self.live.client.post("/extract", **self.request)
        assert (response.status_code, response.content) == (200, self.expected)
        assert self.live.client.get("/models/digits").json()["hooks"] == 0
        assert self.live.client.get("/readyz").status_code == 200


def copy_module(live: Live, name: str) -> Any:
    """A copy of a model that the server runs in its own process."""
    model = live.engine.manager.registry.get_entry(name).model
    assert model is not None
    return copy.deepcopy(model.module)


def control(live: Live) -> Control:
    """A control of a server, by its reply now."""
    request: Json = {"json": {"layers": ["block?", "head"], "pool": "mean", "inputs": [image(picture(99))]}}
    response = live.client.post("/extract", **request)
    assert response.status_code == 200, response.text
    return Control(live, request, response.content)


def _listed(response: httpx.Response) -> dict[str, Array]:
    found = {}
    for key, entry in response.json()["features"].items():
        data, dtype = entry["data"], np.dtype(entry["dtype"])
        array = np.frombuffer(b64decode(data), dtype) if isinstance(data, str) else np.array(data, dtype)
        found[key] = array.reshape(entry["shape"])
        if "scale" in entry:
            found[f"{key}.scale"] = np.array(entry["scale"], np.float32)
    return found


def _npz(response: httpx.Response) -> dict[str, Array]:
    with np.load(BytesIO(response.content), allow_pickle=False) as archive:
        return dict(archive)


READERS: dict[str, Callable[[httpx.Response], dict[str, Array]]] = {
    "application/json": _listed,
    "application/x-npy": lambda response: {"": np.load(BytesIO(response.content), allow_pickle=False)},
    "application/x-npz": _npz,
    "application/x-safetensors": lambda response: dict(safetensors.numpy.load(response.content)),
}

TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}  # as RFC 9110 has them, newer than Python's


# Stored pixels to upright ones by hand, by EXIF orientation.
UPRIGHT: dict[int, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}

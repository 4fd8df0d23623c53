"""Requests as plain data, and builders of their bodies."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import urlencode

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[Any]
Json = dict[str, Any]
Headers = Mapping[str, str]
BOUNDARY = "recorded-boundary"


@dataclass(frozen=True)
class Request:
    """One request; ``name`` is ``KIND/NAME``. With ``wire`` these bytes are sent as they are, and nothing else."""

    name: str
    method: str = "POST"
    target: str = "/extract"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    wire: bytes | None = None

    @property
    def kind(self) -> str:
        """What stands before the slash of its name."""
        return self.name.split("/", 1)[0]


def url(path: str, query: Mapping[str, Any] | None = None) -> str:
    """A path with its query; a list gives the parameter several times."""
    return f"{path}?{urlencode(query, doseq=True)}" if query else path


def get(name: str, path: str, headers: Headers | None = None, /, method: str = "GET", **query: Any) -> Request:
    """A request without a body."""
    return Request(name, method, url(path, query), tuple((headers or {}).items()))


def send(
    name: str, body: bytes, media_type: str, path: str = "/extract", headers: Headers | None = None, **query: Any
) -> Request:
    """A POST with a body and what is said in the query."""
    fields = {"content-type": media_type, **(headers or {})}
    return Request(name, "POST", url(path, query), tuple(fields.items()), body)


def post(
    name: str,
    document: Any,
    path: str = "/extract",
    headers: Headers | None = None,
    query: Mapping[str, Any] | None = None,
) -> Request:
    """A POST of a JSON document."""
    return send(name, json.dumps(document).encode(), "application/json", path, headers, **(query or {}))


def multipart(name: str, *parts: tuple[str, str, bytes], path: str = "/extract", **query: Any) -> Request:
    """A POST of parts: their names, media types and contents."""
    lines = []
    for field, media_type, content in parts:
        head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{field}"; filename="file"\r\n'
        lines.append(f"{head}content-type: {media_type}\r\n\r\n".encode() + content + b"\r\n")
    body = b"".join(lines) + f"--{BOUNDARY}--\r\n".encode()
    return send(name, body, f"multipart/form-data; boundary={BOUNDARY}", path, None, **query)


def picture(
    seed: int = 0,
    size: tuple[int, int] = (40, 32),
    format: str = "PNG",  # noqa: A002
    mode: str = "RGB",
    **options: Any,
) -> bytes:
    """An encoded picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, format, **options)
    return stream.getvalue()


def noise(*shape: int, seed: int = 0) -> Array:
    """Normal numbers in float32."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def base64(data: bytes) -> str:
    """Base64 as text."""
    return b64encode(data).decode()


def image(data: bytes) -> Json:
    """An entry of ``inputs``."""
    return {"image": base64(data)}


def tensor_body(array: Array) -> Json:
    """A tensor as JSON has it."""
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64(array.tobytes())}


def tensor(array: Array) -> Json:
    """An entry of ``inputs``."""
    return {"tensor": tensor_body(array)}


def tensors(**arrays: Array) -> Json:
    """An entry of ``inputs`` for a model with several."""
    return {"tensors": {name: tensor_body(array) for name, array in arrays.items()}}


def npy(array: Array) -> bytes:
    """A .npy file."""
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def safetensors_of(**arrays: Array) -> bytes:
    """A .safetensors file."""
    data: bytes = safetensors.numpy.save(arrays)
    return data

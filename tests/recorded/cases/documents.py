"""Bodies that can't be read: broken JSON, broken multipart, broken arrays, wrong content types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain

import numpy as np

from tests.recorded.request import (
    BOUNDARY,
    Json,
    Request,
    image,
    multipart,
    noise,
    npy,
    picture,
    safetensors_of,
    send,
)

PNG = picture(1)
GOOD = json.dumps({"layers": ["pool"], "inputs": [image(PNG)]})
JSON: dict[str, bytes] = {
    "empty": b"",
    "single quotes": b"{'layers': 1}",
    "cut short": GOOD[:-2].encode(),
    "two documents": b"{} {}",
    "byte order mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "utf-16": GOOD.encode("utf-16"),
    "latin-1": '{"layers": ["käse"]}'.encode("latin-1"),
    "nul": b'{"layers": ["a\0b"]}',
    "nan": b'{"layers": [NaN]}',
    "a huge exponent": b'{"layers": ["pool"], "normalize": 1e400}',
    "very many digits": b'{"layers": [{"layer": "pool", "call": ' + b"9" * 5000 + b"}]}",
    "lone surrogate": b'{"layers": ["\\ud800"]}',
    "deeper than allowed": b'{"layers": ' + b"[" * 40 + b"]" * 40 + b"}",
    "very deep": b"[" * 100_000 + b"]" * 100_000,
    "very many brackets": json.dumps({"layers": [[]] * 500_001}).encode(),
    "a list": b"[]",
    "null": b"null",
    "a number": b"5",
    "a key twice": b'{"layers": ["pool"], "layers": ["head"]}',
}
HEAD = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
PARTS: dict[str, str] = {
    "empty": "",
    "cut short": f'{HEAD}request"\r\n\r\n{{}}\r\n',
    "no end of a head": f"--{BOUNDARY}\r\nX: a",
    "no names": f"--{BOUNDARY}\r\nContent-Disposition: form-data\r\n\r\na\r\n--{BOUNDARY}--\r\n",
    "no headers": f"--{BOUNDARY}\r\n\r\na\r\n--{BOUNDARY}--\r\n",
    "a bad header": f"--{BOUNDARY}\r\nNo header\r\n\r\na\r\n--{BOUNDARY}--\r\n",
    "another boundary": "--other\r\n\r\n--other--\r\n",
    "a request that is no JSON": f'{HEAD}request"\r\n\r\n{{\r\n--{BOUNDARY}--\r\n',
    "line feeds alone": f'{HEAD}images"; filename="p"\r\n\r\np\r\n--{BOUNDARY}--\r\n'.replace("\r", ""),
}
ARRAYS: dict[str, tuple[bytes, str]] = {
    "npy of nothing": (b"", "npy"),
    "npy of words": (b"words", "npy"),
    "npy cut short": (npy(noise(3, 32, 32))[:-5], "npy"),
    "npy with more behind": (npy(noise(3, 32, 32)) + b"more", "npy"),
    "npy of objects": (npy(np.array([{}], object)), "npy"),
    "npy of texts": (npy(np.array(["a"])), "npy"),
    "npy of no rows": (npy(np.zeros((0, 3, 32, 32))), "npy"),
    "npy of integers": (npy(np.zeros((3, 32, 32), np.int32)), "npy"),
    "npy of complex": (npy(np.zeros((3, 32, 32), np.complex64)), "npy"),
    "npy of another shape": (npy(noise(2, 32, 32)), "npy"),
    "npy of nine axes": (npy(np.zeros((1,) * 9)), "npy"),
    "npy with nan": (npy(np.full((2, 3, 32, 32), np.nan, np.float32)), "npy"),
    "safetensors of words": (b"\xff" * 100, "safetensors"),
    "safetensors of nothing": (safetensors_of(), "safetensors"),
    "safetensors cut short": (safetensors_of(image=noise(3, 32, 32))[:-3], "safetensors"),
}
TYPES = (
    "text/html",
    "application/x-www-form-urlencoded",
    "application/octet-stream",
    "",
    "rubbish",
    "text/plain; charset=utf-16",
    "multipart/form-data",
    "multipart/form-data; boundary=",
    f"multipart/form-data; boundary={'y' * 5000}",
)
IMAGES: dict[str, bytes] = {
    "nothing": b"",
    "words": b"no picture at all",
    "a png cut short": PNG[:200],
    "a jpeg cut short": picture(1, format="JPEG")[:-300],
    "a head alone": PNG[:33],
    "an svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a png of zeros": PNG[:60] + b"\0" * 500,
    "an icon": picture(1, format="ICO"),
}
QUERY: Json = {"layers": "pool"}


def requests() -> Iterator[Request]:
    """To ``digits``; nearly all are refused."""
    for name, body in JSON.items():
        yield send(f"documents/json {name}", body, "application/json")
    form = f"multipart/form-data; boundary={BOUNDARY}"
    for name, parts in PARTS.items():
        yield send(f"documents/multipart {name}", parts.encode(), form)
    for name, (data, format_) in ARRAYS.items():
        yield send(f"documents/{name}", data, f"application/x-{format_}", **QUERY)
    for number, media_type in enumerate(TYPES):
        yield send(f"documents/type {number}", b"x", media_type, **QUERY)
    for name, data in IMAGES.items():
        yield send(f"documents/picture of {name}", data, "image/png", **QUERY)
    encodings = {"gzip": "gzip", "br": "br", "identity": "identity"}
    for name, encoding in encodings.items():
        yield send(f"documents/encoded as {name}", PNG, "image/png", headers={"content-encoding": encoding}, **QUERY)
    yield from _parts()


def _parts() -> Iterator[Request]:
    request = ("request", "application/json", b'{"layers": ["pool"]}')
    images = ("images", "image/png", PNG)
    array = ("image", "application/x-npy", npy(noise(3, 32, 32)))
    lists = {
        "two requests": (request, request),
        "no picture": (request,),
        "a part of another name": (images, ("image", "image/png", PNG)),
        "an empty picture": (images, ("images", "image/png", b""), request),
        "an array by name": (array, request),
        "inputs in the request": (images, ("request", "application/json", GOOD.encode())),
    }
    for name, parts in lists.items():
        yield multipart(f"documents/parts {name}", *parts)
    yield multipart("documents/parts and a query", *chain((images, request)), pool="mean")

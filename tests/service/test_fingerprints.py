"""Equal fingerprints mean that vectors may be compared: rows that the caller made have others than pictures."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.server import Live
from tests.service.support import Json, image, npy, picture, raw, safetensors_of, tensor

PNG = picture(1)
ROW = np.linspace(-1, 1, 3 * 32 * 32, dtype=np.float32).reshape(3, 32, 32)
QUERY = {"layers": "pool"}


def told(reply: Any) -> tuple[str, str | None]:
    """The fingerprint of a reply's only result, once header, body and receipt agree, and whose work its rows are."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    (receipt,) = body["receipts"].values()
    assert receipt["fingerprint"] == body["fingerprint"] == reply.headers["x-layertap-fingerprint"]
    return body["fingerprint"], receipt.get("preprocessed")


def asked(live: Live, *inputs: Json, **fields: Any) -> tuple[str, str | None]:
    """The same of a JSON request."""
    return told(live.client.post("/extract", json={"layers": ["pool"], "inputs": list(inputs), **fields}))


def test_rows_of_the_caller(live: Live) -> None:
    """However a tensor is sent it has one fingerprint, another than a picture's; the receipt says who made it."""
    pictures = {
        told(live.client.post("/extract", **raw(PNG, "image/png", **QUERY))),
        told(live.client.post("/extract", files=[("images", PNG)], params=QUERY)),
        asked(live, image(PNG)),
    }
    tensors = {
        told(live.client.post("/extract", **raw(npy(ROW), "application/x-npy", **QUERY))),
        told(live.client.post("/extract", **raw(safetensors_of(image=ROW), "application/x-safetensors", **QUERY))),
        asked(live, tensor(ROW)),
        asked(live, tensor(ROW * 255), tensor(ROW)),
    }
    assert [len(each) for each in (pictures, tensors)] == [1, 1]
    ((ours, silent),), ((theirs, caller),) = pictures, tensors
    assert (silent, caller) == (None, "caller")
    assert ours != theirs


def test_mixed(live: Live) -> None:
    """A request of pictures and tensors has a third one, in whatever order."""
    mixed = {asked(live, image(PNG), tensor(ROW)), asked(live, tensor(ROW), image(PNG), image(PNG))}
    ((fingerprint, whose),) = mixed
    assert whose == "mixed"
    assert fingerprint not in (asked(live, image(PNG))[0], asked(live, tensor(ROW))[0])


def test_what_is_left_out_does_not_count(live: Live) -> None:
    """Rows that were left out are in nobody's index."""
    bad, nan = image(b"no picture"), tensor(ROW * np.float32("nan"))
    assert asked(live, bad, tensor(ROW), on_error="skip") == asked(live, tensor(ROW))
    assert asked(live, nan, image(PNG), on_error="skip") == asked(live, image(PNG))

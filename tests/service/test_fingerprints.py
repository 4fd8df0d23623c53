"""Equal fingerprints mean that vectors may be compared: rows that the caller made have others than pictures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.conftest import net_spec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, configured, image, npy, picture, raw, tensor

PNG = picture(1)
ROW = np.linspace(-1, 1, 3 * 32 * 32, dtype=np.float32).reshape(3, 32, 32)
SMALL, WIDE = np.ones((3, 16, 16), np.float32), np.ones((3, 32, 48), np.float32)
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


def dry(live: Live, *inputs: Json, **fields: Any) -> str:
    """The fingerprint that a dry run promises."""
    body = {"layers": ["pool"], "inputs": list(inputs), **fields}
    reply = live.client.post("/extract?dry_run=true", json=body)
    assert reply.json()["fingerprint"] == reply.headers["x-layertap-fingerprint"]
    return str(reply.json()["fingerprint"])


@pytest.fixture(scope="module")
def nets(serve: Serve) -> Iterator[Live]:
    """The embedded model, and one that takes tensors only."""
    with serve(configured(net_spec("Chain"))) as live:
        yield live


def test_rows_of_the_caller(live: Live) -> None:
    """However a tensor is sent it has one fingerprint, another than a picture's; the receipt says who made it."""
    pictures = {
        told(live.client.post("/extract", **raw(PNG, "image/png", **QUERY))),
        told(live.client.post("/extract", files=[("images", PNG)], params=QUERY)),
        asked(live, image(PNG)),
    }
    tensors = {
        told(live.client.post("/extract", **raw(npy(ROW), "application/x-npy", **QUERY))),
        told(live.client.post("/extract", **raw(npy(ROW[None]), "application/x-npy", **QUERY))),
        told(
            live.client.post(
                "/extract", **raw(safetensors.numpy.save({"image": ROW}), "application/x-safetensors", **QUERY)
            )
        ),
        asked(live, tensor(ROW)),
        asked(live, tensor(ROW * 255), tensor(ROW)),
    }
    assert [len(each) for each in (pictures, tensors)] == [1, 1]
    ((ours, silent),), ((theirs, caller),) = pictures, tensors
    assert (silent, caller) == (None, "caller")
    assert ours != theirs


def test_shapes(live: Live) -> None:
    """Rows of another shape than the configured one have a fingerprint for each shape."""
    found = [asked(live, tensor(row)) for row in (ROW, SMALL, WIDE, WIDE.transpose(0, 2, 1).copy())]
    assert {whose for _, whose in found} == {"caller"}
    assert len({fingerprint for fingerprint, _ in found}) == len(found)
    assert asked(live, tensor(SMALL * 2)) == found[1]


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
    assert asked(live, {"image": "!"}, tensor(ROW), on_error="skip") == asked(live, tensor(ROW))


def test_at_the_same_time(live: Live) -> None:
    """Requests that share a forward and are planned alike each get their own."""
    kinds = [[image(PNG)], [tensor(ROW)], [image(PNG), tensor(ROW)]]
    wanted = [asked(live, *inputs) for inputs in kinds]
    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(lambda number: asked(live, *kinds[number % 3]), range(45)))
    assert found == wanted * 15

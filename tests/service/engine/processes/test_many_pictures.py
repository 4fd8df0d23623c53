"""Requests of many pictures, which their batches decode: every row in its place, each that can't be decoded told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from layertap.service.inputs.items import EncodedItem
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, arrays_of, picture, problem, raw

QUERY = {"layers": "block3", "pool": "flatten", "format": "npz"}
PICTURES = [picture(seed) for seed in range(40)]


@pytest.fixture(scope="module", params=[2, 0], ids=["workers", "threads"])
def either(serve: Serve, request: pytest.FixtureRequest) -> Iterator[Live]:
    """A server whose workers decode, and one that decodes first."""
    with serve(workers=request.param) as live:
        yield live


def send(live: Live, pictures: Sequence[bytes], **query: str) -> Any:
    return live.client.post("/extract", files=[("images", each) for each in pictures], params={**QUERY, **query})


def replace(places: Mapping[int, bytes]) -> list[bytes]:
    """The pictures with others in some places."""
    return [places.get(place, each) for place, each in enumerate(PICTURES)]


@pytest.fixture(scope="module")
def alone(either: Live) -> Array:
    """The row of each picture, asked for by itself."""
    replies = [either.client.post("/extract", **raw(each, "image/png", **QUERY)) for each in PICTURES]
    return np.concatenate([arrays_of(reply)["block3"] for reply in replies])


@pytest.mark.parametrize("count", [1, 40])
def test_in_order(either: Live, alone: Array, count: int) -> None:
    """Rows come in the order of the pictures, however many forwards have them; others' make no difference."""
    found = arrays_of(send(either, PICTURES[:count]))["block3"]
    assert len({row.tobytes() for row in alone}) == len(PICTURES)
    np.testing.assert_allclose(found, alone[:count], rtol=1e-4, atol=1e-5)


def test_all_are_told(either: Live) -> None:
    """Every picture that can't be decoded has its error, wherever it is."""
    bad = replace({0: b"no picture", 17: PICTURES[17][:300], 39: b"GIF89a"})
    found = problem(send(either, bad), 422)
    assert [error["input"] for error in found["errors"]] == [0, 17, 39]


def test_skipped(either: Live, alone: Array) -> None:
    """The others are answered where that is asked for."""
    reply = send(either, replace({3: b"no picture", 38: b"none"}), on_error="skip")
    assert reply.headers["x-layertap-skipped"] == "3,38"
    np.testing.assert_allclose(arrays_of(reply)["block3"], np.delete(alone, [3, 38], 0), rtol=1e-4, atol=1e-5)


DECODED: list[tuple[list[bytes], bool, list[bytes]]] = [  # what is sent, whether isolated, what is decoded first
    (PICTURES[:1], False, []),
    (PICTURES, False, []),
    (PICTURES, True, PICTURES),
    ([*PICTURES[:9], b"bad", *PICTURES[9:]], False, PICTURES),
]


def test_who_decodes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures go to their batches as they are; those of a batch shared with nobody are decoded side by side.

    So are the others of one that its batch could not decode: that one is not tried again.
    """
    items: list[EncodedItem] = []
    with serve(workers=2) as live:
        executor = live.engine.manager.handles["digits"].executor
        decode = executor.decode
        monkeypatch.setattr(executor, "decode", lambda group, inputs: (items.extend(group), decode(group, inputs))[1])
        for pictures, isolated, decoded in DECODED:
            body = {"layers": ["pool"], "isolated": isolated, "on_error": "skip"}
            files = [("request", ("", json.dumps(body), "application/json")), *[("images", each) for each in pictures]]
            assert live.client.post("/extract", files=files).status_code == 200
            assert sorted(item.data for item in items) == sorted(decoded)
            items.clear()

"""Streams of embedded inputs: order, bad inputs by index, bounded memory, and a server that is busy or breaks."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import layertap_client as lt
from layertap_client import RetryPolicy
from tests.client.misbehaving_server import Received, cut, misbehaving, relay, reply
from tests.server import Live, serving
from tests.service.support import Array, configured, net, picture, raw

ONE = ("digit.png", b"bytes", {"text": "a cat"})
PICTURES = [picture(seed, size=(20 + seed % 7, 24)) for seed in range(24)]
Embed = Callable[..., list[lt.Embedded]]


@pytest.fixture(params=["sync", "async"])
def embed(request: pytest.FixtureRequest) -> Embed:
    """Embeds inputs by one of the clients, and gives all that comes."""

    def by_client(url: str, inputs: Any, *args: Any, retries: Any = None, **options: Any) -> list[lt.Embedded]:
        with lt.Client(url, retries=retries, verify=False) as client:
            return list(client.embed(inputs, *args, **options))

    def by_async_client(url: str, inputs: Any, *args: Any, retries: Any = None, **options: Any) -> list[lt.Embedded]:
        async def run() -> list[lt.Embedded]:
            async with lt.AsyncClient(url, retries=retries, verify=False) as client:
                return [each async for each in client.embed(inputs, *args, **options)]

        return asyncio.run(run())

    return by_client if request.param == "sync" else by_async_client


def vectors_of(live: Live, *pictures: bytes) -> list[Array]:
    """Each picture's vector by a request of its own."""
    requests = (raw(each, "image/png", format="npy") for each in pictures)
    replies = [live.client.post("/extract", **request) for request in requests]
    return [np.load(BytesIO(each.raise_for_status().content))[0] for each in replies]


def test_order(embed: Embed, live: Live) -> None:
    """Each input's vector is its own, in the order of the inputs, of a list or a generator."""
    expected = vectors_of(live, *PICTURES)
    for inputs in (PICTURES, iter(PICTURES)):
        items = embed(live.url, inputs)
        assert [each.index for each in items] == list(range(len(PICTURES)))
        assert len({each.fingerprint for each in items}) == 1
        for each, vector in zip(items, expected, strict=True):
            np.testing.assert_allclose(each.vector, vector, rtol=1e-4, atol=1e-5)


def test_kinds(embed: Embed, live: Live, tmp_path: Path) -> None:
    """Pictures, paths, pixels and arrays in one stream; what was preprocessed by the caller has another fingerprint."""
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURES[0])
    opened = Image.open(BytesIO(PICTURES[0]))
    array = np.zeros((3, 32, 32), np.float32)
    items = embed(live.url, [PICTURES[0], path, array, array, opened, np.asarray(opened), {"image": path}, str(path)])
    assert [each.error for each in items] == [None] * 8
    (vector,) = vectors_of(live, PICTURES[0])
    for each in items[:2] + items[4:]:
        np.testing.assert_allclose(each.vector, vector, rtol=1e-4, atol=1e-5)
    fingerprints = [each.fingerprint for each in items]
    assert len(set(fingerprints)) == 2
    assert fingerprints[2] == fingerprints[3] != fingerprints[0]


def test_bad_inputs(embed: Embed, live: Live, tmp_path: Path) -> None:
    """Bad inputs of every kind are told by their index, and are no end."""
    broken = Image.open(BytesIO(PICTURES[0][:200]))
    bad: dict[int, Any] = {
        0: b"no picture",
        3: tmp_path / "missing.png",
        4: "missing.png",
        9: 3.5,
        15: broken,
        16: np.zeros((3, 7), np.float32),
        17: np.array(["text"]),
        23: b"",
    }
    inputs = [bad.get(index, each) for index, each in enumerate(PICTURES)]
    items = embed(live.url, inputs)
    assert [each.index for each in items] == list(range(len(PICTURES)))
    assert {each.index for each in items if each.error} == bad.keys()
    for each in items:
        assert each.error is None or (each.error.detail and each.error.input == each.index and not each.arrays)
    expected = vectors_of(live, PICTURES[2], PICTURES[22])
    np.testing.assert_allclose(items[2].vector, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(items[22].vector, expected[1], rtol=1e-4, atol=1e-5)


def test_wrong_request(embed: Embed, live: Live) -> None:
    """What is wrong with the request as a whole is an error, not one for each input."""
    with pytest.raises(lt.InvalidRequestError, match="blok2"):
        embed(live.url, PICTURES[:5], "blok2")
    with pytest.raises(TypeError, match="on_error"):
        embed(live.url, PICTURES[:5], on_error="fail")


def test_generators_are_drawn_as_needed(live: Live) -> None:
    """An endless source is read as far as results are taken, and a bounded number of inputs beyond."""
    drawn = 0

    def endless() -> Iterator[bytes]:
        nonlocal drawn
        for each in itertools.cycle(PICTURES):
            drawn += 1
            yield each

    with lt.Client(live.url) as client:
        stream = client.embed(endless(), batch_size=7, concurrency=2)
        for taken in range(1, 150):
            assert next(stream).index == taken - 1
            assert drawn - taken < 2 * 2 * 7
        stream.close()


def test_asynchronous_source(live: Live) -> None:
    """Inputs may come asynchronously."""

    async def source() -> AsyncIterator[bytes]:
        for each in PICTURES:
            await asyncio.sleep(0)
            yield each

    async def run() -> lt.Embeddings:
        async with lt.AsyncClient(live.url) as client:
            return await client.embed(source()).collect()

    embeddings = asyncio.run(run())
    np.testing.assert_allclose(embeddings.array, vectors_of(live, *PICTURES), rtol=1e-4, atol=1e-5)


def test_collect(live: Live) -> None:
    """All in one array, with the places of its rows and the faults of the rest."""
    with lt.Client(live.url) as client:
        embeddings = client.embed([PICTURES[0], b"x", PICTURES[1]]).collect()
        assert embeddings.indices.tolist() == [0, 2]
        assert list(embeddings.errors) == [1]
        np.testing.assert_allclose(embeddings.array, vectors_of(live, *PICTURES[:2]), rtol=1e-4, atol=1e-5)
        assert embeddings.fingerprint == client.extract(PICTURES[0]).fingerprint
        assert embeddings.fingerprint in repr(embeddings)
        nothing = client.embed([b"x"]).collect()
        assert (dict(nothing.arrays), nothing.indices.tolist()) == ({}, [])
        mixed = client.embed([PICTURES[0], np.zeros((3, 32, 32), np.float32)]).collect()
        with pytest.raises(ValueError, match="2 fingerprints"):
            _ = mixed.fingerprint


def test_small_limits(embed: Embed) -> None:
    """A server with little room gets what fits: inputs, bytes, rows in its queue."""
    with serving(max_inputs=3, max_body_bytes=20_000, max_queue_rows=4) as live:
        big = picture(7, size=(100, 100))
        assert len(big) > 20_000
        items = embed(live.url, [*PICTURES[:8], big, *PICTURES[8:16]])
        assert [each.index for each in items if each.error] == [8]
        expected = vectors_of(live, *PICTURES[:16])
        for each, vector in zip(items[:8] + items[9:], expected, strict=True):
            np.testing.assert_allclose(each.vector, vector, rtol=1e-4, atol=1e-5)


def test_troubled_connection(embed: Embed, live: Live) -> None:
    """Refusals, cut connections and a proxy's errors in between change no vector."""
    refused, ending = reply(429, retry_after="0"), reply(503, retry_after="0")
    good = relay(live.url)
    behaviours = [good, refused, cut, good, ending, reply(502), good, cut, refused, good]
    with misbehaving(*behaviours) as server:
        items = embed(server.url, PICTURES, retries=RetryPolicy(backoff_s=0.001), batch_size=4, concurrency=1)
    assert len(server.received) >= len(behaviours)
    for each, vector in zip(items, vectors_of(live, *PICTURES), strict=True):
        np.testing.assert_allclose(each.vector, vector, rtol=1e-4, atol=1e-5)


def test_a_slow_batch(embed: Embed, live: Live) -> None:
    """Where all that may wait for a slow batch do, the rest comes after it: nothing ends too soon."""
    good, answered = relay(live.url), threading.Semaphore(0)

    def late(connection: socket.socket, request: Received) -> bool:
        return all(answered.acquire(timeout=60) for _ in range(3)) and good(connection, request)

    def soon(connection: socket.socket, request: Received) -> bool:
        goes_on = good(connection, request)
        answered.release()
        return goes_on

    # The first is held until as many wait as may, and none is under way.
    with misbehaving(good, late, soon) as server:
        items = embed(server.url, PICTURES[:20], batch_size=1, concurrency=2)
    assert [each.index for each in items] == list(range(20))
    assert [each.index for each in items if each.error] == []


def test_another_model(embed: Embed) -> None:
    """Vectors of a model that was exchanged meanwhile are not mixed with those before."""
    rows = [np.full(4, number, np.float32) for number in range(200)]
    first, second = (configured(net("m", "Gated", weights=f"random:{seed}")) for seed in (0, 1))
    with serving(first) as one, serving(second) as other:
        behaviours = [relay(one.url)] * 3 + [relay(other.url)]
        with misbehaving(*behaviours) as server, pytest.raises(lt.FingerprintChangedError):
            embed(server.url, rows, "linear", model="m")


@pytest.mark.parametrize("given", ONE, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("cls", [lt.Client, lt.AsyncClient])
def test_one_input(cls: Any, given: Any) -> None:
    """A single input is not taken apart into letters, lines or fields: it is refused, with what to write."""
    with pytest.raises(lt.InputError, match=r"write \[INPUT\]"):
        cls().embed(given)

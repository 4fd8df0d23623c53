"""What stands around a body is read once for all requests that send the same."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from layertap.models.errors import RequestError
from layertap.service.errors import NotAcceptableError
from layertap.service.formats.table import FORMATS
from layertap.service.http.body import LONG_JSON
from layertap.service.http.receiving import MAX_KEPT_BYTES, MEDIA, make_envelope_reader
from tests.service.conftest import Serve
from tests.service.support import image, picture

BODY = {"layers": ["pool"], "inputs": [image(picture(1))]}
JSON = {"content-type": "application/json"}
QUERY = b"layers=pool&pool=mean"


def test_same_is_read_once() -> None:
    """Each part of it makes another envelope."""
    read = make_envelope_reader(FORMATS)
    sent = b"application/x-npy", b"Image/PNG ;q=1", QUERY
    envelope = read(*sent)
    assert (envelope.media_type, envelope.format.name, envelope.query["pool"]) == (MEDIA, "npy", "mean")
    assert read(*sent) is envelope
    others = {(b"", *sent[1:]), (sent[0], b"text/plain", QUERY), (*sent[:2], b"layers=pool")}
    assert len({id(read(*each)) for each in {sent, *others}}) == len(others) + 1


def test_boundaries_share_an_envelope() -> None:
    """A client chooses another boundary each time, and asks the same."""
    read = make_envelope_reader(FORMATS)
    first, second = (read(b"", b"multipart/form-data; boundary=%d" % number, QUERY) for number in range(2))
    assert first.asked is second.asked
    assert [each.content_type[-1] for each in (first, second)] == ["0", "1"]


def test_long_ones_are_not_kept() -> None:
    """What is kept is bounded, by its size too."""
    read = make_envelope_reader(FORMATS)
    query = b"layers=" + b"a" * MAX_KEPT_BYTES
    assert not read(b"", b"image/png", query).is_kept
    assert read(b"", b"image/png", query) is not read(b"", b"image/png", query)


def test_long_bodies_in_turn(serve: Serve) -> None:
    """Long bodies wait for each other, but keep no thread from other work meanwhile."""
    gate = Event()
    with serve(cpu_threads=1) as live, ThreadPoolExecutor(2) as pool:
        deadline = time.monotonic() + 60
        held = pool.submit(live.run, live.engine.parse_long(gate.wait, deadline))
        long = pool.submit(live.client.post, "/extract", content=json.dumps(BODY).ljust(LONG_JSON + 1), headers=JSON)
        medium = live.client.post("/extract", content=json.dumps(BODY).ljust(LONG_JSON), headers=JSON)
        assert medium.status_code == 200
        assert not long.done()
        gate.set()
        assert long.result().content == medium.content
        assert held.result()


def test_mistakes_are_not_kept() -> None:
    """A refusal is an error of its own each time."""
    read = make_envelope_reader(FORMATS)
    for _ in range(2):
        with pytest.raises(NotAcceptableError):
            read(b"video/mp4", b"image/png", QUERY)
        with pytest.raises(RequestError):
            read(b"", b"image/png", b"format=npy&format=npz")

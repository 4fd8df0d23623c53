"""Bodies that arrive packed: unpacked within the limits of any body, whatever is in them."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.models.errors import LayertapError
from layertap.service.http.body import measure_unpacked, unpack
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.queue_harness import gauges
from tests.service.support import Control, Json, image, picture, problem

BODY: Json = {"layers": ["pool"], "inputs": [image(picture(1)), image(picture(2))]}
JSON = json.dumps(BODY).encode()
MIB = 2**20
BOMB = gzip.compress(bytes(200 * MIB))


def headers(coding: str, media_type: str = "application/json") -> dict[str, str]:
    return {"content-type": media_type, "content-encoding": coding}


PACKERS = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("coding", ["GZip,", "Deflate", "identity", ""])
def test_taken(live: Live, coding: str) -> None:
    """A packed body is the body that it holds."""
    pack = PACKERS.get(coding.lower().strip(","), bytes)
    reply = live.client.post("/extract", content=pack(JSON), headers=headers(coding))
    assert reply.status_code == 200, reply.text
    assert reply.content == live.client.post("/extract", json=BODY).content
    assert ("unpack" in reply.headers["server-timing"]) == (pack is not bytes)


BROKEN = {
    "no gzip": JSON,
    "another checksum": gzip.compress(JSON)[:-8] + b"\0\0\0\0" + gzip.compress(JSON)[-4:],
    "gzip and rubbish": gzip.compress(JSON) + b"rubbish",
    "zlib": zlib.compress(JSON),
}
BROKEN_ZLIB = {
    "no zlib": JSON,
    "another checksum": zlib.compress(JSON)[:-4] + b"\0\0\0\0",
    "zlib and rubbish": zlib.compress(JSON) + b"rubbish",
    "cut": zlib.compress(JSON)[:-9],
    "gzip": gzip.compress(JSON),
}


@pytest.mark.parametrize(
    ("coding", "name"), [*(("gzip", name) for name in BROKEN), *(("deflate", name) for name in BROKEN_ZLIB)]
)
def test_broken(live: Live, control: Control, coding: str, name: str) -> None:
    """What does not unpack to its end is refused."""
    data = {"gzip": BROKEN, "deflate": BROKEN_ZLIB}[coding][name]
    body = problem(live.client.post("/extract", content=data, headers=headers(coding)), 400)
    assert coding in body["detail"] or "JSON" in body["detail"]
    control.check()


@pytest.mark.parametrize("coding", ["gzip, gzip", "gzip, identity, gzip", "deflate, gzip", "br", "zstd", "*"])
def test_codings_that_are_not_taken(live: Live, coding: str) -> None:
    """One coding, of those that are taken: what is packed twice is refused, unread, with what is taken."""
    reply = live.client.post("/extract", content=gzip.compress(gzip.compress(JSON)), headers=headers(coding))
    body = problem(reply, 415)
    assert "Content-Encoding: gzip" in body["errors"][0]["hint"]
    assert reply.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("coding", PACKERS)
@pytest.mark.parametrize("nested", [False, True])
def test_bomb(serve: Serve, nested: bool, coding: str) -> None:
    """A body of kilobytes that unpacks to very much is refused at the limit, and takes little more than twice that."""
    bomb = BOMB if coding == "gzip" else zlib.compress(bytes(200 * MIB))
    data = PACKERS[coding](bomb) if nested else bomb
    with serve() as live:
        tracemalloc.start()
        try:
            reply = live.client.post("/extract", content=data, headers=headers(coding))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if nested:  # unpacked once: no JSON
            problem(reply, 400)
            assert peak < 4 * MIB
        else:
            assert f"the unpacked body has more than {32 * MIB} bytes" in problem(reply, 413)["detail"]
            assert peak < 80 * MIB
        wait_until(lambda: gauges(live)["queue_bytes"] == 0)


@pytest.mark.parametrize("coding", PACKERS)
def test_memory_is_reserved(serve: Serve, coding: str) -> None:
    """What is unpacked counts to the bytes that the queue holds."""
    with serve(max_queue_bytes=8 * MIB) as live:
        large, small = (
            live.client.post("/extract", content=PACKERS[coding](JSON.ljust(size)), headers=headers(coding))
            for size in (20 * MIB, 0)
        )
    detail = problem(large, 413)["detail"]
    assert f"the queue holds {8 * MIB}" in detail
    assert int(detail.split()[3]) > 20 * MIB  # what the request needs
    assert small.status_code == 200


@given(
    data=st.data(),
    part=st.binary(max_size=3000),
    times=st.sampled_from([1, 7, 2000]),
    coding=st.sampled_from(sorted(PACKERS)),
)
def test_any_bytes(data: st.DataObject, part: bytes, times: int, coding: str) -> None:
    """Whatever was packed comes out again; what is cut off or changed is refused, and takes no more than it says."""
    content = part * times
    packed = PACKERS[coding](content)
    assert unpack(packed, coding, measure_unpacked(packed, coding, MIB * 8), MIB * 8) == content
    place = data.draw(st.integers(0, len(packed) - 1))
    changes = [packed[:place], packed[:place] + b"\xff" + packed[place + 1 :], packed + b"\x01"]
    changed = data.draw(st.sampled_from(changes))
    try:
        found = unpack(changed, coding, measure_unpacked(changed, coding, MIB * 8), MIB * 8)
    except LayertapError:
        return
    assert found == content  # the change was in what says nothing of it

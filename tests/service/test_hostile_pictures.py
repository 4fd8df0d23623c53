"""Pictures that are made to cost: refused by a running server, soon, without memory for them, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.hard.measure import answer, held_mb
from bench.hard.pictures import FOREIGN, LABELS, LARGE, PLAIN, SMALL, saved
from layertap.models.digits import spec as digits
from tests.server import Live
from tests.service.load_server import Process, process
from tests.service.support import Control, picture, problem, raw

OWN = Path("/proc/self")
MOST_MB = 20
MOST_LARGE_MB = 220  # a body of 30 MB is kept twice or thrice; without limits some took a gigabyte
SOON_S = 20.0  # so much that it is no measure of time: refusals take milliseconds, believing takes minutes
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


@pytest.fixture(scope="module")
def warmed(live: Live) -> Live:
    """A server that has decoded a picture of each format before."""
    for kind in FORMATS:
        reply = live.client.post("/extract", **raw(picture(format=kind), "image/x", layers="pool"))
        assert reply.status_code == 200, (kind, reply.text)
    return live


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize("name", SMALL)
def test_small(warmed: Live, control: Control, name: str) -> None:
    """A small file that claims much is refused with the reason, and takes no memory for what it claims."""
    case = SMALL[name]
    request = raw(case.make(), "image/x", layers="pool")
    if (OWN / "clear_refs").exists():
        (OWN / "clear_refs").write_text("5")  # the highest mark starts anew
    before = held_mb("self", "VmRSS")
    reply = warmed.client.post("/extract", timeout=SOON_S, **request)
    peak = held_mb("self", "VmHWM")
    assert case.says in problem(reply, case.status)["detail"]
    if (OWN / "clear_refs").exists():
        assert peak - before < MOST_MB
    control.check()


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign(warmed: Live, name: str) -> None:
    """What is none of the formats reaches no decoder, whatever it is called."""
    for label in ("image/png", f"image/{name.split()[0]}"):
        found = problem(warmed.client.post("/extract", **raw(FOREIGN[name], label, layers="pool")), 422)
        assert "JPEG, PNG, WebP, AVIF, GIF or BMP" in found["errors"][0]["hint"]


@pytest.mark.parametrize("label", LABELS)
def test_labels(warmed: Live, label: str) -> None:
    """A body of a type that is none of the offered ones is refused for that, unread."""
    data = FOREIGN.get(LABELS[label], picture())
    problem(warmed.client.post("/extract", **raw(data, label, layers="pool")), 415)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Process]]:
    """A server in a process of its own, whose memory is nobody else's."""
    with (
        process([digits()], tmp_path_factory.mktemp("alone")) as found,
        httpx.Client(base_url=found.url, timeout=SOON_S) as client,
    ):
        for kind in FORMATS:
            assert answer(client, found.running.pid, "image/x", saved(PLAIN, kind)).status == 200
        yield client, found


@pytest.mark.hard
@pytest.mark.parametrize("name", LARGE)
def test_large(alone: tuple[httpx.Client, Process], name: str) -> None:
    """A picture as large as a body may be, of pieces beyond number, is answered soon, and the next request as ever."""
    client, server = alone
    good = client.post("/extract", **raw(picture(), "image/png", layers="pool")).content
    case = LARGE[name]
    found = answer(client, server.running.pid, "image/x", case.make())
    assert (found.status, case.says in found.text) == (case.status, True), found.text[:1000]
    assert found.status == 200 or len(found.text) < 1024
    assert found.megabytes < MOST_LARGE_MB
    assert client.post("/extract", **raw(picture(), "image/png", layers="pool")).content == good
    assert server.hooks() == {"digits": 0}
    assert client.get("/readyz").status_code == 200

"""Errors of a device, raised by a model on the CPU: those of one forward, and those that never end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.nets_batch import Fragile
from tests.service.queue_harness import extract_request, hold_queue, random_rows, right, serving_nets
from tests.service.support import picture, problem, raw

COUNT = 5


@pytest.fixture
def fragile(serve: Serve) -> Iterator[Live]:
    """A server that nothing has happened to yet; it has loaded ``digits``, too."""
    with serving_nets(serve, "fragile") as live:
        assert live.client.post("/models/digits/load").status_code == 200
        yield live


def test_error_of_one_forward(fragile: Live) -> None:
    """A request that the device can't run, or has no memory for, is refused alone; the device goes on."""
    bad = {0: (Fragile.ODD, 500), 3: (Fragile.FULL, 413)}
    rows = [random_rows(1, number) for number in range(COUNT)]
    for number, (mark, _) in bad.items():
        rows[number][0, 0] = mark
    with hold_queue(fragile, "fragile") as pile:
        replies = [pile.enqueue(extract_request(each, "fragile", "."), 1) for each in rows]
    for number, (row, reply) in enumerate(zip(rows, replies, strict=True)):
        if number in bad:
            problem(reply.result(), bad[number][1])
        else:
            right(fragile, reply, row, ".", name="fragile")
    assert fragile.client.get("/readyz").status_code == 200


@pytest.mark.parametrize("isolated", ["false", "true"])
def test_lost(fragile: Live, isolated: str) -> None:
    """After an error that does not end, who shared the forward, who waited and who comes later get 503, never 200."""
    rows = [random_rows(1, number) for number in range(COUNT)]
    rows[0][0, 0] = Fragile.ASSERTS
    with hold_queue(fragile, "fragile") as pile:
        replies = [pile.enqueue(extract_request(each, "fragile", ".", isolated=isolated), 1) for each in rows]
    for reply in replies:
        assert "restarted" in str(problem(reply.result(), 503, seconds=True))
    wait_until(lambda: fragile.client.get("/livez").status_code == 503)
    for path in ("/livez", "/readyz"):
        assert "restart it" in problem(fragile.client.get(path), 503, seconds=True)["hint"]
    for name in ("fragile", "digits"):
        body = fragile.client.get(f"/models/{name}").json()
        assert (body["state"], body["hooks"]) == ("failed", 0)
        assert "device" in body["reason"]
    later = fragile.client.post("/extract", **raw(picture(), "image/png", layers="pool", model="digits"))
    assert "restarted" in str(problem(later, 503, seconds=True))
    # The forward that failed and the one that shows that all do: nobody's request is tried again.
    assert pile.module.forwards == [1 if isolated == "true" else COUNT, 1]

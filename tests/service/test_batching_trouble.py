"""Batches in trouble, over HTTP: memory that runs out, rows that break a forward, who leaves, and what is refused."""

from __future__ import annotations

from concurrent.futures import Future

import httpx
import pytest

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import admitted_rows, connect, encode_request, gated_module, wait_until
from tests.service.nets_batch import LIMIT, Hungry, Moody
from tests.service.queue_harness import (
    HELD_COUNTS,
    HELD_ROWS,
    MetricsDelta,
    QueueHarness,
    batch_counts,
    extract_request,
    hold_queue,
    post,
    queue_server_of,
    queued_rows,
    random_rows,
    read_figure,
    right,
    row_counts,
    serving_nets,
    wait_idle,
)
from tests.service.support import Array, problem

troubled = queue_server_of("moody", "tower")
hungry = queue_server_of("hungry")  # whose ceilings nothing has lowered yet
COUNT = 5  # requests of a batch; one that is bad is found by halving it, until it is alone
HALVED = {0: 2, 2: 2, 4: 3}


def put_rows(pile: QueueHarness, counts: tuple[int, ...]) -> list[tuple[Array, Future[httpx.Response]]]:
    """Requests of so many rows for the ``linear`` of a model."""
    batches = [random_rows(count, seed) for seed, count in enumerate(counts)]
    for batch in batches:
        batch[:, 0] = 0.0  # each needs as much memory as the others
    return [(batch, pile.enqueue(extract_request(batch, pile.name, "linear"), len(batch))) for batch in batches]


def test_out_of_memory(hungry: Live) -> None:
    """A batch that memory does not hold is run in parts, each request is answered, later batches are smaller."""
    ledger, counts = MetricsDelta(hungry, "hungry"), (2, 3, 1, 3)
    with hold_queue(hungry, "hungry") as pile:
        replies = put_rows(pile, counts)
        module = gated_module(hungry, "hungry")
        assert isinstance(module, Hungry)
        module.room = 4
    for batch, reply in replies:
        right(hungry, reply, batch, "linear", name="hungry")
    assert pile.module.forwards == [9, 4, 5, 2, 3]
    failed = {"out_of_memory": 2.0, "split:memory": 2.0}
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 9, 4), row_counts(9), failed)
    sunk = read_figure(hungry, "layertap_batch_ceiling_rows", model="hungry")
    assert 1 <= sunk <= 4
    with hold_queue(hungry, "hungry") as pile:
        put_rows(pile, counts)
    assert max(pile.module.forwards) <= sunk == read_figure(hungry, "layertap_batch_ceiling_rows", model="hungry")
    wait_idle(hungry)


@pytest.mark.parametrize(
    ("mark", "place"), [(LIMIT, 0), (LIMIT + 1, 2), (LIMIT + 2, 4), (Moody.LEAVES_OUT, 0), (Moody.CUTS, 2)]
)
def test_bad_request_in_a_batch(troubled: Live, mark: int, place: int) -> None:
    """A row with which a forward raises, leaves a layer out or gives another shape harms its own request alone."""
    ledger, name = MetricsDelta(troubled, "moody"), "moody"
    batches = [random_rows(1 + number % 2, number) for number in range(COUNT)]
    batches[place][-1, 0] = mark
    with hold_queue(troubled, name) as pile:
        replies = [pile.enqueue(extract_request(batch, name, "end"), len(batch)) for batch in batches]
    for number, (batch, reply) in enumerate(zip(batches, replies, strict=True)):
        if number == place:
            shown = str(problem(reply.result(), 500 if mark == LIMIT else 422))
            assert ("of the model ... at ..." in shown) == (mark < Moody.LEAVES_OUT)
        else:
            right(troubled, reply, batch, "end", name=name)
    rows = sum(map(len, batches))
    assert pile.module.forwards[0] == rows
    good = row_counts(rows - len(batches[place]))
    ledger.check(HELD_COUNTS, batch_counts("same_depth", rows, COUNT), good, {"split:error": HALVED[place]})
    assert troubled.client.get("/livez").status_code == 200
    assert troubled.client.get("/models/moody").json()["hooks"] == 0
    for error in Moody.RAISED:  # the model keeps them
        assert error.__traceback__ is None, "everything that the forward held is kept with the error"


def test_who_leaves_and_who_is_late(troubled: Live) -> None:
    """What nobody waits for any more never runs; whoever is still there shares the forward without it."""
    ledger = MetricsDelta(troubled, "tower")
    with hold_queue(troubled, "tower") as pile:
        first = pile.enqueue(extract_request(random_rows(1), "tower", "tail"), 1)
        with connect(troubled) as connection:
            left = troubled.client.build_request("POST", "/extract", **extract_request(random_rows(4), "tower", "tail"))
            connection.sendall(encode_request(left))
            wait_until(lambda: queued_rows(troubled) == 5)
        wait_until(lambda: queued_rows(troubled) == 1 and admitted_rows(troubled) == HELD_ROWS + 1)
        late = extract_request(random_rows(2, 1), "tower", "tail")
        late["headers"] = {**late["headers"], "x-request-timeout": "0.3"}
        problem(post(troubled, late), 504, seconds=True)
        last = pile.enqueue(extract_request(random_rows(3, 2), "tower", "tail"), 3)
        assert queued_rows(troubled) == 4
    right(troubled, first, random_rows(1), "tail")
    right(troubled, last, random_rows(3, 2), "tail")
    assert pile.module.forwards == [4]
    gone = {"expired": 1.0, "cancelled": 1.0}
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 4, 2), row_counts(4), gone)
    wait_idle(troubled)


def test_a_large_request_that_leaves(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Of a request that leaves between its forwards the rest never runs, whatever else its connection has asked for."""
    behind = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
    with serving_nets(serve, "tower", max_batch_rows=4) as live:
        module = gated_module(live, "tower")
        module.forwards.clear()
        module.gate.clear()
        module.entered.clear()
        with connect(live) as connection:
            request = live.client.build_request("POST", "/extract", **extract_request(random_rows(20), "tower", "tail"))
            connection.sendall(encode_request(request) + behind)
            assert module.entered.wait(30)
            wait_until(lambda: queued_rows(live) == 16)
        wait_until(lambda: admitted_rows(live) == 0)
        assert queued_rows(live) == 0
        module.gate.set()
        right(live, post(live, extract_request(random_rows(1), "tower", "tail")), random_rows(1), "tail")
        assert module.forwards == [4, 1]
        assert "bug" not in caplog.messages
        wait_idle(live)

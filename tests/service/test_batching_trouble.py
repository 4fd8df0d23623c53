"""Batches in trouble, over HTTP: memory that runs out, rows that break a forward, who leaves, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

import httpx
import numpy as np
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
    batch_ceiling,
    batch_counts,
    extract_request,
    hold_queue,
    hook_outputs,
    post,
    queued_rows,
    random_rows,
    row_counts,
    serving_nets,
    wait_idle,
)
from tests.service.support import Array, arrays_of, problem

RIGHT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def troubled(serve: Serve) -> Iterator[Live]:
    """A server of models that fail at will."""
    with serving_nets(serve, "moody", "tower") as live:
        yield live


def right(live: Live, name: str, layer: str, batch: Array, reply: Future[httpx.Response] | httpx.Response) -> None:
    """A reply is what hooks say offline."""
    response = reply.result() if isinstance(reply, Future) else reply
    wanted = hook_outputs(live, name, batch)[layer, 0, (), "output"]
    np.testing.assert_allclose(arrays_of(response)[layer], wanted, **RIGHT)


@pytest.fixture
def hungry(serve: Serve) -> Iterator[Live]:
    """A server whose ceilings nothing has lowered yet."""
    with serving_nets(serve, "hungry") as live:
        yield live


def room(live: Live, units: float) -> Hungry:
    """From now on a model's memory holds so many rows."""
    module = gated_module(live, "hungry")
    assert isinstance(module, Hungry)
    module.room = units
    module.forwards.clear()
    return module


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
        room(hungry, 4)
    assert batch_ceiling(hungry, "hungry") < 32
    for batch, reply in replies:
        right(hungry, "hungry", "linear", batch, reply)
    assert pile.module.forwards == [9, 4, 5, 2, 3]
    failed = {"out_of_memory": 2.0, "split:memory": 2.0}
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 9, 4), row_counts(9), failed)
    sunk = batch_ceiling(hungry, "hungry")
    assert 1 <= sunk <= 4
    with hold_queue(hungry, "hungry") as pile:
        replies = put_rows(pile, counts)
    for batch, reply in replies:
        right(hungry, "hungry", "linear", batch, reply)
    assert sum(pile.module.forwards) == 9
    assert max(pile.module.forwards) <= sunk
    assert batch_ceiling(hungry, "hungry") == sunk
    wait_idle(hungry)


def test_one_row_that_never_fits(hungry: Live) -> None:
    """A request one of whose rows needs more than there is gets 413; the others their answers, now and later."""
    ledger, place = MetricsDelta(hungry, "hungry"), 2
    with hold_queue(hungry, "hungry") as pile:
        batches = [random_rows(2, seed) for seed in range(5)]
        batches[place][1, 0] = 100.0
        replies = [pile.enqueue(extract_request(batch, "hungry", "linear"), 2) for batch in batches]
        room(hungry, 50)
    for number, (batch, reply) in enumerate(zip(batches, replies, strict=True)):
        if number == place:
            assert "memory" in problem(reply.result(), 413)["detail"]
        else:
            right(hungry, "hungry", "linear", batch, reply)
    assert pile.module.forwards[0] == 10
    failed = {"out_of_memory": 4.0, "split:memory": 3.0}  # of ten rows, five, two and the one
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 10, 5), row_counts(8), failed)
    assert batch_ceiling(hungry, "hungry") == 32  # the others' rows are not to blame
    wait_idle(hungry)


def splits(bad: list[bool]) -> int:
    """How often a batch is halved until each bad request is alone."""
    if not any(bad) or len(bad) == 1:
        return 0
    return 1 + splits(bad[: len(bad) // 2]) + splits(bad[len(bad) // 2 :])


def check_bad(live: Live, count: int, marks: dict[int, int]) -> None:
    """Of so many requests of one batch those with marks are refused, and only those."""
    ledger, name = MetricsDelta(live, "moody"), "moody"
    batches = [random_rows(1 + number % 2, number) for number in range(count)]
    for place, mark in marks.items():
        batches[place][-1, 0] = mark
    with hold_queue(live, name) as pile:
        replies = [pile.enqueue(extract_request(batch, name, "end"), len(batch)) for batch in batches]
    for number, (batch, reply) in enumerate(zip(batches, replies, strict=True)):
        if number in marks:
            assert "secret" not in str(problem(reply.result(), 500 if marks[number] == LIMIT else 422))
        else:
            right(live, name, "end", batch, reply)
    rows, good = (
        sum(len(batches[number]) for number in range(count) if not (number in marks and answers)) for answers in (0, 1)
    )
    assert pile.module.forwards[0] == rows
    why = "same_depth" if count > 1 else "single"
    halved = splits([number in marks for number in range(count)])
    ledger.check(
        HELD_COUNTS, batch_counts(why, rows, count), row_counts(good), {"split:error": halved} if halved else {}
    )
    assert live.client.get("/livez").status_code == 200
    assert live.client.get("/models/moody").json()["hooks"] == 0


@pytest.mark.parametrize("count", [1, 5])
def test_bad_request_in_a_batch(troubled: Live, count: int) -> None:
    """What makes a forward raise is refused alone, wherever it stands; all others get what is right."""
    for place in range(count):
        check_bad(troubled, count, {place: LIMIT + place % len(Moody.RAISED)})
    for error in Moody.RAISED:  # the model keeps them
        assert error.__traceback__ is None, "everything that the forward held is kept with the error"


@pytest.mark.parametrize(("mark", "place"), [(Moody.LEAVES_OUT, 0), (Moody.CUTS, 2)])
def test_what_depends_on_the_values(troubled: Live, mark: int, place: int) -> None:
    """A row with which a layer never runs, or gives another shape, harms its own request alone."""
    check_bad(troubled, 5, {place: mark})


def test_who_leaves_and_who_is_late(troubled: Live) -> None:
    """What nobody waits for any more never runs; whoever is still there shares the forward without it."""
    ledger, late_s = MetricsDelta(troubled, "tower"), 1.5
    with hold_queue(troubled, "tower") as pile, ExitStack() as stack:
        late = extract_request(random_rows(2, 1), "tower", "tail")
        late["headers"] = {**late["headers"], "x-request-timeout": str(late_s)}
        first = pile.enqueue(extract_request(random_rows(1), "tower", "tail"), 1)
        expired = pile.enqueue(late, 2)
        with connect(troubled) as connection:
            request = troubled.client.build_request(
                "POST", "/extract", **extract_request(random_rows(4), "tower", "tail")
            )
            connection.sendall(encode_request(request))
            wait_until(lambda: queued_rows(troubled) == 7)
        wait_until(lambda: queued_rows(troubled) < 7 and admitted_rows(troubled) <= HELD_ROWS + 3)
        last = pile.enqueue(extract_request(random_rows(3, 2), "tower", "tail"), 3)
        problem(expired.result(), 504, seconds=True)
        wait_until(lambda: queued_rows(troubled) == 4)
        stack.pop_all().close()
    right(troubled, "tower", "tail", random_rows(1), first)
    right(troubled, "tower", "tail", random_rows(3, 2), last)
    assert pile.module.forwards == [4]
    left = {"expired": 1.0, "cancelled": 1.0}
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 4, 2), row_counts(4), left)
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
        right(live, "tower", "tail", random_rows(1), post(live, extract_request(random_rows(1), "tower", "tail")))
        assert module.forwards == [4, 1]
        assert "bug" not in caplog.messages
        wait_idle(live)


def retry(reply: httpx.Response) -> int:
    """After how many seconds to come again."""
    problem(reply, 429, seconds=True)
    return int(reply.headers["retry-after"])


def test_too_many_bytes(serve: Serve) -> None:
    """Bodies, rows and replies of what waits count together; all of it is given back."""
    isolated = partial(extract_request, model="tower", layers="tail", isolated="true")
    with serving_nets(serve, "tower", max_queue_bytes=50_000, max_queue_rows=2000) as live:
        ledger, large = MetricsDelta(live, "tower"), extract_request(random_rows(256), "tower", "linear")
        assert "50000" in problem(post(live, large), 413)["detail"]  # no queue could hold it
        with hold_queue(live, "tower") as pile:
            waits = [pile.enqueue(isolated(random_rows(256, seed)), 256) for seed in range(4)]
            used = live.engine.admission.used_bytes
            assert 4 * 256 * (16 + 16 + 8) <= used <= 50_000  # a row as sent, as decoded, and its result
            assert all(retry(post(live, extract_request(random_rows(256), "tower", "tail"))) >= 1 for _ in range(3))
            wait_until(lambda: live.engine.admission.used_bytes == used)
            waits.append(pile.enqueue(isolated(random_rows(2)), 2))
        assert [reply.result().status_code for reply in waits] == [200] * 5
        wait_idle(live)
        assert post(live, isolated(random_rows(256))).status_code == 200
        rows = 4 * 256 + 2 + 256
        times = 4 * 8 + 1 + 8  # forwards of 32 rows
        ledger.check(
            HELD_COUNTS, batch_counts("isolated", rows, times, times), row_counts(rows), {"refused:queue_bytes": 3.0}
        )
        wait_idle(live)

"""Batches in trouble, over HTTP: memory that runs out, rows that break a forward, who leaves, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations

import httpx
import numpy as np
import pytest

from layertap.models.spec import InputSpec
from tests.marks import slow_but
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import admitted_rows, connect, encode_request, gated_module, wait_until
from tests.service.nets_batch import LIMIT, SLOW_S, Hungry, Moody, Residual
from tests.service.queue_harness import (
    HELD_COUNTS,
    HELD_ROWS,
    LONG_S,
    MetricsDelta,
    QueueHarness,
    batch_ceiling,
    batch_counts,
    batch_net,
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
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor

SIDE, LARGE = 64, 1024
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


def test_large_request_out_of_memory(hungry: Live) -> None:
    """A single request that memory does not hold at once comes back in one piece all the same."""
    room(hungry, 4)
    batch = random_rows(19)
    right(hungry, "hungry", "linear", batch, post(hungry, extract_request(batch, "hungry", "linear")))
    assert 1 <= batch_ceiling(hungry, "hungry") <= 4


@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_row_that_never_fits(hungry: Live, place: int) -> None:
    """A request one of whose rows needs more than there is gets 413; the others their answers, now and later."""
    ledger = MetricsDelta(hungry, "hungry")
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
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 10, 5), row_counts(8), out_of_memory(batches, 50))
    assert batch_ceiling(hungry, "hungry") == 32  # the others' rows are not to blame
    wait_idle(hungry)


def out_of_memory(batches: list[Array], units: float) -> dict[str, float]:
    """The figures of a batch that is halved, by rows, until each part fits or is one row."""
    needs = np.concatenate(batches)[:, 0].clip(min=1)

    def halved(part: Array) -> tuple[int, int]:
        if part.sum() <= units:
            return 0, 0
        if len(part) == 1:
            return 1, 0
        below = [halved(half) for half in (part[: len(part) // 2], part[len(part) // 2 :])]
        return 1 + sum(each[0] for each in below), 1 + sum(each[1] for each in below)

    failed, split = halved(needs)
    return {"out_of_memory": float(failed), "split:memory": float(split)}


def test_fixed_rows_out_of_memory(serve: Serve) -> None:
    """Where memory does not hold as many rows as every forward should have, requests are answered with fewer."""
    with serving_nets(serve, "hungry", fixed_batch_rows=8) as live:
        module = room(live, 4)
        for _ in range(2):
            right(
                live,
                "hungry",
                "linear",
                random_rows(3),
                post(live, extract_request(random_rows(3), "hungry", "linear")),
            )
        assert 2 <= batch_ceiling(live, "hungry") <= 4
        with hold_queue(live, "hungry") as pile:
            replies = put_rows(pile, (2, 3, 1, 3))
        for batch, reply in replies:
            right(live, "hungry", "linear", batch, reply)
        assert max(module.forwards) <= 4


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


@pytest.mark.parametrize("count", slow_but((1, 2, 5, 9), range(1, 10)))
def test_bad_request_in_a_batch(troubled: Live, count: int) -> None:
    """What makes a forward raise is refused alone, wherever it stands; all others get what is right."""
    for place in range(count):
        check_bad(troubled, count, {place: LIMIT + place % len(Moody.RAISED)})
    for error in Moody.RAISED:  # the model keeps them
        assert error.__traceback__ is None, "everything that the forward held is kept with the error"


@pytest.mark.parametrize("count", [2, 5, 9])
def test_two_bad_requests_in_a_batch(troubled: Live, count: int) -> None:
    """Two of them, of different kinds, each get their own answer."""
    for one, other in list(combinations(range(count), 2))[:: max(1, count // 2)]:
        check_bad(troubled, count, {one: LIMIT, other: LIMIT + 1})


def test_all_bad(troubled: Live) -> None:
    """A batch of which nothing can be served ends as well."""
    check_bad(troubled, 4, {place: LIMIT + place % 3 for place in range(4)})


@pytest.mark.parametrize("mark", [Moody.LEAVES_OUT, Moody.CUTS])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_what_depends_on_the_values(troubled: Live, mark: int, place: int) -> None:
    """A row with which a layer never runs, or gives another shape, harms its own request alone."""
    check_bad(troubled, 5, {place: mark})


def test_trouble_beyond_the_stop(troubled: Live) -> None:
    """Who wants nothing of the part that fails is served, bad row or not, where nobody else goes that far."""
    batch = random_rows(2)
    batch[0, 0] = Moody.LEAVES_OUT
    right(troubled, "moody", "linear", batch, post(troubled, extract_request(batch, "moody", "linear")))
    with hold_queue(troubled, "moody") as pile:
        shallow = pile.enqueue(extract_request(batch, "moody", "linear"), 2)
        deep = pile.enqueue(extract_request(random_rows(2, 1), "moody", "end"), 2)
    right(troubled, "moody", "linear", batch, shallow)
    right(troubled, "moody", "end", random_rows(2, 1), deep)
    assert pile.module.forwards == [4, 2, 2]


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


@pytest.mark.parametrize(
    "behind", [b"", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2], ids=["alone", "more behind it"]
)
def test_a_large_request_that_leaves(serve: Serve, caplog: pytest.LogCaptureFixture, behind: bytes) -> None:
    """Of a request that leaves between its forwards the rest never runs, whatever else its connection has asked for."""
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


@pytest.mark.slow
def test_too_many_rows(serve: Serve) -> None:
    """A full queue is refused with when to come again, the later the more waits; then its places are free again."""
    with serving_nets(serve, "slow", max_queue_rows=200) as live:
        ledger, whens = MetricsDelta(live, "slow"), []
        with hold_queue(live, "slow") as pile:
            replies = []
            for seed in range(3):
                replies.append(
                    pile.enqueue(extract_request(random_rows(64, seed), "slow", "linear", isolated="true"), 64)
                )
                whens.append(retry(post(live, extract_request(random_rows(200 - 64 * len(replies)), "slow", "linear"))))
        assert all(when >= 64 * SLOW_S * seed for seed, when in enumerate(whens, 1))
        assert [reply.result().status_code for reply in replies] == [200] * 3
        grown = {"refused:queue_rows": 3.0}
        ledger.check(HELD_COUNTS, batch_counts("isolated", 192, 6, times=6), row_counts(192), grown)
        wait_idle(live)


def hasty(request: Json, seconds: float) -> Json:
    """A request that waits for so long and no longer."""
    return {**request, "headers": {**request.get("headers", {}), "x-request-timeout": str(seconds)}}


@pytest.mark.slow
def test_too_little_time(serve: Serve) -> None:
    """What can't be served in time for what waits already is refused at once; an idle server refuses nobody."""
    with serving_nets(serve, "slow") as live:
        ledger = MetricsDelta(live, "slow")
        for seed in range(12):  # the pace is that of late
            assert post(live, extract_request(random_rows(4, seed), "slow", "linear")).status_code == 200
        with hold_queue(live, "slow") as pile:
            waits = pile.enqueue(extract_request(random_rows(100), "slow", "linear", isolated="true"), 100)
            need = 100 * SLOW_S
            for part in (0.2, 0.9):
                refused = post(live, hasty(extract_request(random_rows(1), "slow", "linear"), need * part))
                assert retry(refused) >= need
                (fault,) = refused.json()["errors"]
                assert f"X-Request-Timeout of {need * part:g} s" in fault["detail"]
                assert f"more time by X-Request-Timeout, at most {LONG_S:g} s" in fault["hint"]
            late = post(live, hasty(extract_request(random_rows(1), "slow", "linear"), need * 1.6))
            problem(late, 504, seconds=True)
            assert int(late.headers["retry-after"]) >= need  # by what waits still
        assert waits.result().status_code == 200
        rows = 48 + 100
        ledger.check(
            HELD_COUNTS,
            batch_counts("single", 48, 12, times=12),
            batch_counts("isolated", 100, 4, times=4),
            row_counts(rows),
            {"refused:deadline": 2.0, "expired": 1.0},
        )
        wait_idle(live)
        # Nobody waits: though it can't be done, it is tried.
        problem(post(live, hasty(extract_request(random_rows(64), "slow", "linear"), 0.3)), 504, seconds=True)


def test_too_little_time_of_the_servers_own(serve: Serve) -> None:
    """Where no time that the caller may allow would do, the hint is to come later, or with less."""
    limit = 150 * SLOW_S
    with serving_nets(serve, "slow", deadline_s=limit) as live:
        for seed in range(12):
            assert post(live, extract_request(random_rows(4, seed), "slow", "linear")).status_code == 200
        with hold_queue(live, "slow") as pile:
            waits = pile.enqueue(extract_request(random_rows(90), "slow", "linear", isolated="true"), 90)
            plain = {
                "json": {"model": "slow", "layers": ["linear"], "inputs": [tensor(row) for row in random_rows(60)]}
            }
            replies = {request: post(live, sent) for request, sent in (("", plain), ("own", hasty(plain, limit / 2)))}
        for request, reply in replies.items():
            retry(reply)
            (fault,) = reply.json()["errors"]
            said = f"X-Request-Timeout of {limit / 2:g} s" if request else f"this server's limit of {limit:g} s"
            assert said in fault["detail"]
            assert fault["hint"] == "come again later, or send fewer inputs at once"
        assert waits.result().status_code == 200
        wait_idle(live)


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


def test_bytes_of_a_body_that_still_arrives(serve: Serve) -> None:
    """What has come of a body counts before it is complete, and no more once its client is gone."""
    with serving_nets(serve, "tower", max_queue_bytes=50_000) as live:
        body = extract_request(random_rows(2000), "tower", "tail")
        request = live.client.build_request("POST", "/extract", **body)
        small = extract_request(random_rows(200), "tower", "tail")
        with connect(live) as connection:
            connection.sendall(encode_request(request)[:-1])
            wait_until(lambda: live.engine.admission.used_bytes > 30_000)
            assert retry(post(live, extract_request(random_rows(1200), "tower", "tail"))) >= 1
        wait_idle(live)
        assert post(live, small).status_code == 200
        wait_idle(live)


def test_large_reply_of_a_large_picture(serve: Serve) -> None:
    """All layers of a picture many times the usual size are refused by what they would take, before any forward."""
    spec = replace(batch_net("residual", "Residual", InputSpec("x", (3, SIDE, SIDE))))
    with serve(configured(spec), cpu_threads=2) as live:
        model = live.engine.manager.registry.get_entry("residual").model
        assert model is not None
        module = model.module
        assert isinstance(module, Residual)
        before = len(module.forwards)
        found = problem(post(live, extract_request(np.zeros((1, 3, LARGE, LARGE), np.float32), "residual", "*")), 413)
        size, limit = (int(word) for word in found["detail"].replace(",", "").split() if word.isdigit())
        assert size > limit == live.engine.settings.max_reply_bytes
        assert len(module.forwards) == before
        assert model.catalogs.get_catalog(((3, LARGE, LARGE),)) is None
        wait_idle(live)
        usual = post(live, extract_request(np.zeros((1, 3, SIDE, SIDE), np.float32), "residual", "*", format="npz"))
        assert usual.status_code == 200
        assert len(module.forwards) == before + 1

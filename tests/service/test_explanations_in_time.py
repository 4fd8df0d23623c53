"""Explanations that can't be made in time are refused before anything runs; their costs are given, not measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

import httpx
import pytest

from layertap.models.catalog.catalog import Costs
from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.app import create_engine
from layertap.service.engine.admit.planned_work import PlannedWork, WorkPlan
from layertap.service.engine.engine import Engine
from layertap.service.errors import DeadlineError, QueueTooLongError
from layertap.service.explain.map_requests import ChangedRows
from layertap.service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import random_images
from tests.service.gated_server import TRIES, TRY_S, admitted_rows, gated_module, wait_until
from tests.service.nets_http import Gated
from tests.service.support import Json, configured, problem, tensor

HELD = ModelSpec(
    "held",
    "python:tests.service.ui.nets:Held",
    weights="random:5",
    device="cpu",
    inputs=(InputSpec("x", (3, 32, 32)),),
    preprocess="none",
)
ROW_S, DEADLINE_S = 10.0, 300.0  # what a forward of a row is said to take, and what a request may
FOUR: Json = {"method": "occlusion", "window": 16, "stride": 16}  # 40 s
SIXTEEN: Json = {"method": "occlusion", "window": 8, "stride": 8}  # 160 s
MANY: Json = {"method": "occlusion", "window": 8, "stride": 2}  # 169 windows, 1690 s


@pytest.fixture
def served(serve: Serve) -> Iterator[Live]:
    """A server of a quick model that is said to be slow; each test's own, as what runs tells how slow it is of late."""
    with serve(configured(HELD), deadline_s=DEADLINE_S, replicas=1, cpu_threads=1) as live:
        model = live.engine.manager.registry.get_entry("held").model
        assert model is not None
        model.catalogs.configured = replace(model.catalog, costs=Costs(base=0.0, per_row=ROW_S))
        yield live


def explain(live: Live, body: Json, rows: int = 1, timeout: str | None = None) -> httpx.Response:
    """The reply to a request for explanations."""
    sent = {"model": "held", "inputs": [tensor(row) for row in random_images(rows, 5)], **body}
    headers = {"x-request-timeout": timeout} if timeout is not None else {}
    return live.client.post("/explain", json=sent, headers=headers)


def refused(reply: httpx.Response) -> tuple[str, str, int]:
    """What a refusal says, what it has one type instead, and when to come again."""
    body = problem(reply, 429, seconds=True)
    assert body["type"] == "urn:layertap:problem:queue-full"
    (fault,) = body["errors"]
    return fault["detail"], fault["hint"], int(reply.headers["retry-after"])


@pytest.mark.parametrize(
    ("body", "rows", "changed", "smaller"),
    [
        (MANY, 1, 169, "a larger 'window' and 'stride'"),
        (SIXTEEN | {"classes": [0, 1]}, 12, 192, "'stride', fewer inputs"),  # classes share its forwards
        ({"method": "smoothgrad", "samples": 10, "classes": [0, 1, 2]}, 1, 30, "fewer classes"),
    ],
)
def test_never_in_time(served: Live, body: Json, rows: int, changed: int, smaller: str) -> None:
    """What would take more than twice the deadline is refused before any forward, with what to type; less runs."""
    module = gated_module(served, "held")
    module.forwards.clear()
    detail, hint, when = refused(explain(served, body, rows))
    assert module.forwards == []
    assert f"{changed} changed inputs" in detail
    assert f"this server's limit of {DEADLINE_S:g} s" in detail
    assert smaller in hint
    assert "LAYERTAP_DEADLINE_S" in hint
    assert when > 2 * DEADLINE_S
    assert explain(served, FOUR).status_code == 200
    assert module.forwards != []


def test_a_caller_with_little_time(served: Live) -> None:
    """Where the caller's own deadline is too short the hint is to allow more, as far as the server does."""
    detail, hint, _ = refused(explain(served, SIXTEEN, timeout="50"))
    assert "X-Request-Timeout of 50 s" in detail
    assert f"allow more time by X-Request-Timeout, at most {DEADLINE_S:g} s" in hint
    assert "at most 4 changed inputs" in hint  # of 16 that take 160 s
    assert "LAYERTAP_DEADLINE_S" not in hint
    assert explain(served, FOUR, timeout="50").status_code == 200


@contextmanager
def hold_explanation(live: Live, body: Json) -> Iterator[Gated]:
    """Hold an explanation up in its first forward; it is answered after the block."""
    module = gated_module(live, "held")
    module.gate.clear()
    module.entered.clear()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(explain, live, body)
        try:
            assert module.entered.wait(TRIES * TRY_S)
            yield module
        finally:
            module.gate.set()
        assert held.result().status_code == 200


def test_beside_others(served: Live) -> None:
    """What explanations that run have yet to do counts for the next one, which is refused if both can't be in time."""
    with hold_explanation(served, SIXTEEN) as module:
        module.forwards.clear()
        detail, hint, when = refused(explain(served, SIXTEEN))
        assert "160.0 s" in detail
        assert "what runs already" in detail
        assert hint.startswith("come again later")
        assert 160 <= when < DEADLINE_S
        assert module.forwards == []
        with ThreadPoolExecutor(1) as pool:
            small = pool.submit(explain, served, FOUR)  # it shares the device, and is done long before
            wait_until(lambda: admitted_rows(served) > 1 or small.done())
            module.gate.set()
            assert small.result().status_code == 200
    assert explain(served, SIXTEEN).status_code == 200  # nothing is left of the others


@pytest.mark.parametrize(
    ("shape", "has_graph", "seconds"),
    [((3, 32, 32), False, 4.0), ((3, 32, 32), True, 12.0), ((3, 16, 16), False, 1.0), ((3, 64, 64), False, 4.0)],
)
def test_what_rows_take(served: Live, shape: tuple[int, ...], has_graph: bool, seconds: float) -> None:
    """Gradients count thrice, smaller rows than the model is configured for less, larger ones no more: meant low."""
    model = served.engine.manager.registry.get_entry("held").model
    assert model is not None
    changed = ChangedRows(4, (1, *shape), has_graph)
    assert changed.estimate_seconds(model) == pytest.approx(seconds * ROW_S)


@asynccontextmanager
async def planning() -> AsyncIterator[tuple[Engine, Callable[[float], PlannedWork]]]:
    """An engine, and what makes work of so many seconds for it."""
    engine = create_engine(Settings(workers=0, cpu_threads=1), configured(HELD), warm=False)
    try:
        worker = await engine.manager.get_handle("held", time.monotonic() + DEADLINE_S)
        unit = worker.pace.estimate_seconds(1.0)
        works = WorkPlan(engine.settings, engine.metrics)
        yield engine, lambda seconds: PlannedWork(works, worker, rows=100, seconds=seconds / unit, smaller="less")
    finally:
        await engine.close()


def test_work_that_is_done() -> None:
    """The rows that an explanation has run count no more for the others."""

    async def run() -> None:
        async with planning() as (_, plan):
            deadline = time.monotonic() + 100
            first = plan(60)
            with first.count():
                with pytest.raises(QueueTooLongError):
                    plan(60).check(deadline)
                first.done += 90  # 6 s are left
                plan(60).check(deadline)
            plan(150).check(deadline)  # alone

    asyncio.run(run())


def test_turns() -> None:
    """Two explanations run at a time, those that have least to do; others wait until one is done, or their deadline."""

    async def run() -> None:
        async with planning() as (engine, plan), asyncio.TaskGroup() as group:
            deadline = time.monotonic() + DEADLINE_S
            works = {seconds: plan(seconds) for seconds in (5, 6, 7, 1)}
            held = {seconds: ExitStack() for seconds in works}
            for seconds in (5, 6, 7):
                held[seconds].enter_context(works[seconds].count())
            for seconds in (5, 6):
                await works[seconds].wait_for_turn(deadline)
            with pytest.raises(DeadlineError):
                await works[7].wait_for_turn(time.monotonic())
            last = group.create_task(works[7].wait_for_turn(deadline))
            held[1].enter_context(works[1].count())
            await works[1].wait_for_turn(deadline)  # the shortest is first, whenever it came
            await let_others_run()
            held[5].close()
            await let_others_run()
            assert not last.done()  # two are ahead of it still
            held[1].close()
            await asyncio.wait_for(last, DEADLINE_S)
            works[7].done = 50  # who is ahead stays ahead
            held[5].enter_context(works[5].count())
            await works[7].wait_for_turn(deadline)
            await engine.manager.unload("held")
            await asyncio.wait_for(works[7].wait_for_turn(deadline), DEADLINE_S / 10)  # to hear that it is gone
            for stack in held.values():
                stack.close()

    asyncio.run(run())


async def let_others_run() -> None:
    """Whatever is ready to run does."""
    for _ in range(10):
        await asyncio.sleep(0)

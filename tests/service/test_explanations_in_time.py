"""Explanations that can't be made in time are refused before anything runs; their costs are given, not measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest

from layertap.models.catalog.catalog import Costs
from layertap.models.spec import InputSpec
from layertap.service.app import create_engine
from layertap.service.engine.admit.planned_work import PlannedWork
from layertap.service.engine.engine import Engine
from layertap.service.errors import DeadlineError
from layertap.service.settings import Settings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import random_images
from tests.service.gated_server import TRIES, TRY_S, admitted_rows, gated_module, wait_until
from tests.service.support import Json, configured, net, problem, tensor

PICTURE = InputSpec("x", (3, 32, 32))
HELD = net("held", "Held", PICTURE, module="tests.service.ui.nets", weights="random:5", preprocess="none")
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


TOO_LONG: list[tuple[Json, int, int, str]] = [
    (MANY, 1, 169, "a larger 'window' and 'stride'"),
    (SIXTEEN | {"classes": [0, 1]}, 12, 192, "'stride', fewer inputs"),  # classes share its forwards
    ({"method": "smoothgrad", "samples": 10, "classes": [0, 1, 2]}, 1, 30, "fewer classes"),
]


def test_never_in_time(served: Live) -> None:
    """What would take more than twice the deadline is refused before any forward, with what to type; less runs."""
    module = gated_module(served, "held")
    module.forwards.clear()
    for body, rows, changed, smaller in TOO_LONG:
        detail, hint, when = refused(explain(served, body, rows))
        assert module.forwards == []
        assert f"{changed} changed inputs" in detail
        assert f"this server's limit of {DEADLINE_S:g} s" in detail
        assert smaller in hint
        assert "LAYERTAP_DEADLINE_S" in hint
        assert when > 2 * DEADLINE_S
    detail, hint, _ = refused(explain(served, SIXTEEN, timeout="50"))  # the caller's own deadline is too short
    assert "X-Request-Timeout of 50 s" in detail
    assert f"allow more time by X-Request-Timeout, at most {DEADLINE_S:g} s" in hint
    assert "at most 4 changed inputs" in hint  # of 16 that take 160 s
    assert "LAYERTAP_DEADLINE_S" not in hint
    assert module.forwards == []
    assert explain(served, FOUR, timeout="50").status_code == 200


def test_beside_others(served: Live) -> None:
    """What explanations that run have yet to do counts for the next one, which is refused if both can't be in time."""
    module = gated_module(served, "held")
    module.gate.clear()
    module.entered.clear()
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(explain, served, SIXTEEN)
        try:
            assert module.entered.wait(TRIES * TRY_S)
            module.forwards.clear()
            detail, hint, when = refused(explain(served, SIXTEEN))
            assert "160.0 s" in detail
            assert "what runs already" in detail
            assert hint.startswith("come again later")
            assert 160 <= when < DEADLINE_S
            assert module.forwards == []
            small = pool.submit(explain, served, FOUR)  # it shares the device, and is done long before
            wait_until(lambda: admitted_rows(served) > 1 or small.done())
        finally:
            module.gate.set()
        assert [each.result().status_code for each in (small, held)] == [200, 200]
    assert explain(served, SIXTEEN).status_code == 200  # nothing is left of the others


def test_turns() -> None:
    """Two explanations run at a time, those that have least to do; others wait until one is done, or their deadline."""

    async def run(engine: Engine) -> None:
        deadline = time.monotonic() + DEADLINE_S
        worker = await engine.manager.get_handle("held", deadline)
        unit = worker.pace.estimate_seconds(1.0)
        works = {
            seconds: PlannedWork(engine.admission, worker, rows=100, seconds=seconds / unit, hint="less")
            for seconds in (5, 6, 7, 1)
        }
        held = {seconds: ExitStack() for seconds in works}
        for seconds in (5, 6, 7):
            held[seconds].enter_context(works[seconds].count())
        for seconds in (5, 6):
            await works[seconds].wait_for_turn(deadline)
        with pytest.raises(DeadlineError):
            await works[7].wait_for_turn(time.monotonic())
        last = asyncio.create_task(works[7].wait_for_turn(deadline))
        held[1].enter_context(works[1].count())
        await works[1].wait_for_turn(deadline)  # the shortest is first, whenever it came
        held[5].close()
        await let_others_run()
        assert not last.done()  # two are ahead of it still
        held[1].close()
        await asyncio.wait_for(last, DEADLINE_S)
        await engine.manager.unload("held")
        await asyncio.wait_for(works[7].wait_for_turn(deadline), DEADLINE_S / 10)  # to hear that it is gone
        for stack in held.values():
            stack.close()

    async def run_and_close() -> None:
        engine = create_engine(Settings(workers=0, cpu_threads=1), configured(HELD), warm=False)
        try:
            await run(engine)
        finally:
            await engine.close()

    asyncio.run(run_and_close())


async def let_others_run() -> None:
    """Whatever is ready to run does."""
    for _ in range(10):
        await asyncio.sleep(0)

"""Surveys: shared by those who ask the same, ended with the last of them, and nothing that other models wait for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from layertap.service.engine.execute.model_calls import OverdueError
from layertap.service.engine.models.surveys import Surveys
from layertap.service.engine.prepare import planner
from layertap.service.errors import DeadlineError
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.gated_server import (
    TRIES,
    TRY_S,
    admitted_rows,
    connect,
    encode_request,
    gated_module,
    post_rows,
    wait_until,
)
from tests.service.nets_http import Gated
from tests.service.support import Json, net, npy, problem, raw, tensor
from tests.service.survey_nets import MAPS, SIDE

NPY = "application/x-npy"
NAMES = ("one", "other")
shared = server_of(
    *(net(name, "Maps", MAPS, module="tests.service.survey_nets") for name in NAMES),
    net("gated", "Gated"),
    cpu_threads=1,
    deadline_s=300.0,
)


class Work:
    """Work that is held up, and what became of it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.times = 0
        self.ended = False

    async def run(self) -> int:
        self.times += 1
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended = True
            raise
        return self.times


async def ask_and_leave(surveys: Surveys, key: str, run: Callable[[], Awaitable[int]], begun: asyncio.Event) -> None:
    """Ask, and be gone once the survey has begun."""
    caller = asyncio.ensure_future(surveys.ask(key, run, math.inf))
    await begun.wait()
    caller.cancel()
    await asyncio.wait([caller])


def test_shared_until_the_last_has_gone() -> None:
    """Who asks the same shares a survey, and one who leaves takes it from nobody; with the last one it ends."""

    async def run() -> None:
        surveys, work = Surveys(), Work()
        first = asyncio.ensure_future(surveys.ask("a", work.run, math.inf))
        await work.begun.wait()
        with pytest.raises(DeadlineError):
            await surveys.ask("a", work.run, time.monotonic())
        second = asyncio.ensure_future(surveys.ask("a", work.run, math.inf))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert not work.ended
        work.gate.set()
        assert await second == work.times == 1
        work.gate.clear()
        work.begun.clear()
        await ask_and_leave(surveys, "a", work.run, work.begun)
        assert (work.times, work.ended) == (2, True)

    asyncio.run(run())


def test_kept_for_the_next_try() -> None:
    """A survey that ends by itself goes on when the deadline of its last caller passes, but not when that has gone."""

    async def run() -> None:
        surveys, work = Surveys(), Work()
        late = asyncio.ensure_future(surveys.ask("a", work.run, time.monotonic() + 0.01, bounded=True))
        await work.begun.wait()
        with pytest.raises(DeadlineError):
            await late
        again = asyncio.ensure_future(surveys.ask("a", work.run, math.inf, bounded=True))
        await asyncio.sleep(0)
        work.gate.set()
        assert await again == work.times == 1
        for deadline, ended in ((time.monotonic() + 0.01, False), (math.inf, True)):
            left = Work()
            caller = asyncio.ensure_future(surveys.ask("b", left.run, deadline, bounded=True))
            await left.begun.wait()
            if ended:
                caller.cancel()
            await asyncio.wait([caller])
            left.gate.set()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
            await asyncio.sleep(0)  # for what follows their ends
            assert not surveys._surveys
            assert left.ended == ended
        work.gate.clear()
        with pytest.raises(DeadlineError):
            await surveys.ask("c", work.run, time.monotonic() + 0.01)
        assert not surveys._surveys

    asyncio.run(run())


def test_one_at_a_time() -> None:
    """The next survey begins once the one before has ended, not once its caller has gone; a dropped one never does."""

    async def run() -> None:
        surveys, slow, dropped, last = Surveys(), Work(), Work(), Work()
        may_end = asyncio.Event()

        async def end_late() -> int:
            try:
                return await slow.run()
            finally:
                await may_end.wait()

        await ask_and_leave(surveys, "slow", end_late, slow.begun)
        with pytest.raises(DeadlineError):
            await surveys.ask("dropped", dropped.run, time.monotonic())
        last.gate.set()
        waiting = asyncio.ensure_future(surveys.ask("last", last.run, math.inf))
        await asyncio.wait([waiting], timeout=0.05)
        assert slow.ended
        assert not last.times
        may_end.set()
        assert await waiting == 1
        assert not dropped.times

    asyncio.run(run())


def test_errors_are_shared() -> None:
    """Everybody who waits gets the error; who comes later has it tried again."""

    async def run() -> None:
        surveys, work = Surveys(), Work()

        async def fail() -> int:
            await work.run()
            raise ZeroDivisionError

        callers = [asyncio.ensure_future(surveys.ask("a", fail, math.inf)) for _ in range(3)]
        await work.begun.wait()
        work.gate.set()
        for caller in callers:
            with pytest.raises(ZeroDivisionError):
                await caller
        assert work.times == 1
        with pytest.raises(ZeroDivisionError):
            await surveys.ask("a", fail, math.inf)
        assert work.times == 2

    asyncio.run(run())


def build_maps_request(live: Live, model: str, width: int) -> httpx.Request:
    """A request for maps of that width."""
    maps = np.ones((1, 1, SIDE, width), np.float32)
    return live.client.build_request("POST", "/extract", **raw(npy(maps), NPY, layers="late", model=model))


def post_maps(live: Live, model: str, width: int) -> httpx.Response:
    """The reply to such a request."""
    return live.client.send(build_maps_request(live, model, width))


@contextmanager
def abandon_survey(live: Live, model: str, width: int) -> Iterator[None]:
    """Be gone from a survey that is held up until the block ends."""
    module = gated_module(live, model)
    close_gate(module)
    with connect(live) as connection:
        connection.sendall(encode_request(build_maps_request(live, model, width)))
        assert module.entered.wait(TRIES * TRY_S)
    try:
        wait_until(lambda: not admitted_rows(live))
        yield
    finally:
        module.gate.set()


def close_gate(module: Gated) -> None:
    module.gate.clear()
    module.entered.clear()
    module.ran.clear()  # type: ignore[operator]  (of Maps)


def test_other_models_answer(shared: Live) -> None:
    """With a single slot a survey keeps no other model from it; another model's survey waits for its end."""
    other = gated_module(shared, "other")
    close_gate(other)
    one = gated_module(shared, "one")
    close_gate(one)
    with ThreadPoolExecutor(2) as pool:
        reply = pool.submit(post_maps, shared, "one", SIDE + 1)
        assert one.entered.wait(TRIES * TRY_S)
        assert post_rows(shared).status_code == 200
        assert post_maps(shared, "other", SIDE).status_code == 200
        other.entered.clear()
        waiting = pool.submit(post_maps, shared, "other", SIDE + 1)
        wait_until(lambda: shared.engine.manager.scheduler._surveys._waiters)
        assert post_rows(shared).status_code == 200
        assert not other.entered.is_set()
        other.gate.set()
        one.gate.set()
        assert waiting.result().status_code == reply.result().status_code == 200
        assert other.entered.is_set()


def test_nobody_waits(shared: Live) -> None:
    """A survey whose last caller has gone ends before the next module of its forward; the model answers again."""
    module = gated_module(shared, "one")
    with abandon_survey(shared, "one", SIDE + 2):
        pass
    assert post_maps(shared, "one", SIDE).status_code == 200
    assert list(module.ran) == ["early"]  # of that request: none of the survey's has run
    assert post_maps(shared, "one", SIDE + 2).status_code == 200


def test_takes_too_long(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A survey that takes longer than it may ends with an error that says so, however much was expected."""
    handle = shared.engine.manager.handles["one"]
    with pytest.raises(OverdueError):
        shared.run(handle.survey(((1, SIDE, SIDE + 3),), time.monotonic() + 60, seconds=0.0))
    monkeypatch.setattr(planner, "limit_survey", lambda *_: 0.0)
    found = problem(post_maps(shared, "one", SIDE + 3), 413)
    assert found["detail"] == "an input of this shape takes more than 0 s to get to know, far more than expected"
    monkeypatch.undo()
    wait_until(lambda: post_maps(shared, "one", SIDE + 3).status_code == 200)


def test_a_busy_machine(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A survey of the model's own shape that takes too long is no fault of the shape: the client comes again."""
    monkeypatch.setattr(planner, "limit_survey", lambda *_: 0.0)
    body: Json = {"model": "other", "layers": ["late"], "inputs": [tensor(np.ones((1, SIDE, SIDE), np.float32))]}
    body["interventions"] = [{"layer": "late:input", "op": "zero"}]
    found = problem(shared.client.post("/extract", json=body), 503, seconds=True)
    assert found["detail"] == "model other was not surveyed within 0 s: the machine is busy"
    monkeypatch.undo()
    assert shared.client.post("/extract", json=body).status_code == 200

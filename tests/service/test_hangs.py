"""Forwards that hang in the server's own process: their model has failed, and the process where no slot is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from layertap.service.engine.batch import CPU, LastingFailure
from layertap.service.engine.execute.executor import InProcessExecutor
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.engine.test_surveys import abandon_survey, post_maps
from tests.service.gated_server import TRIES, TRY_S, gated_module, post_rows, wait_until
from tests.service.support import configured, net, picture, problem, raw
from tests.service.survey_nets import MAPS, SIDE

SLOTS = 2
GATED = ("gated", "other")
LONGEST_S = 0.1
DIGIT = raw(picture(), "image/png", layers="pool", model="digits")
HUNG = f"has failed: a forward has not ended after {LONGEST_S:g} s"


@pytest.fixture(scope="module")
def hanging(serve: Serve) -> Iterator[Live]:
    """A server of two slots."""
    maps = net("maps", "Maps", MAPS, module="tests.service.survey_nets")
    with serve(configured(*(net(name, "Gated") for name in GATED), maps), cpu_threads=SLOTS, deadline_s=300.0) as live:
        yield live


def shorten(live: Live, name: str) -> None:
    """Only quick forwards of the model do not hang from now on."""
    executor = live.engine.manager.handles[name].executor
    assert isinstance(executor, InProcessExecutor)
    executor._longest_s = LONGEST_S


def count_free(live: Live) -> int:
    """The slots without work."""
    return live.engine.manager.scheduler.batcher._devices[CPU].free


@contextmanager
def hang(live: Live, name: str = "gated") -> Iterator[Future[httpx.Response]]:
    """Have a forward hang until the block ends."""
    module = gated_module(live, name)
    shorten(live, name)
    module.gate.clear()
    module.entered.clear()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post_rows, live, model=name)
        try:
            assert module.entered.wait(TRIES * TRY_S)
            yield reply
        finally:
            module.gate.set()


def check_refused(live: Live, name: str) -> None:
    """The model has failed, and says why; the server is alive, not ready, and others answer."""
    body = live.client.get(f"/models/{name}").json()
    assert (body["state"], body["reason"]) == ("failed", f"a forward has not ended after {LONGEST_S:g} s")
    assert live.client.get("/livez").status_code == 200
    problem(live.client.get("/readyz"), 503, seconds=True)
    assert live.client.post("/extract", **DIGIT).status_code == 200


def test_failed_until_it_ends(hanging: Live) -> None:
    """Who waits for a forward that hangs, and who comes later, get 503 at once; once it has ended they are answered."""
    with hang(hanging) as reply:
        for found in (reply.result(), post_rows(hanging)):
            assert HUNG in problem(found, 503, seconds=True)["detail"]
        check_refused(hanging, "gated")
    wait_until(lambda: hanging.client.get("/readyz").status_code == 200)
    assert post_rows(hanging).status_code == 200
    assert count_free(hanging) == SLOTS


@pytest.mark.parametrize("noted_while", ["ready", "loading"])
def test_decoding_host_is_reloaded(hanging: Live, noted_while: str) -> None:
    """A model that hangs answers no sooner because its decoding host is reloaded meanwhile, and says why."""
    handle, scheduler = hanging.engine.manager.handles["other"], hanging.engine.manager.scheduler

    def fail(failure: LastingFailure) -> None:
        assert "it hangs" in str(scheduler._fail(scheduler._models[handle.key], failure))

    async def reload() -> list[str]:
        failure = LastingFailure("it hangs", ended=asyncio.get_running_loop().create_future())
        if noted_while == "ready":
            fail(failure)
        handle._set("loading")
        if noted_while == "loading":
            fail(failure)
        states: list[str] = [handle.state]
        handle._succeed()
        states.append(handle.state)
        assert failure.ended is not None
        failure.ended.set_result(None)
        await asyncio.sleep(0)
        return [*states, handle.state]

    assert hanging.run(reload()) == ["loading", "failed", "ready"]
    assert post_rows(hanging, model="other").status_code == 200


def test_unloaded_at_once(hanging: Live) -> None:
    """A model that hangs is unloaded without waiting for its thread, and may be loaded again; its slot is lost."""
    with hang(hanging) as reply:
        problem(reply.result(), 503, seconds=True)
        assert hanging.client.post("/models/gated/unload").status_code == 200
        assert hanging.client.post("/models/gated/load").status_code == 200
        assert post_rows(hanging).status_code == 200
        assert count_free(hanging) == SLOTS - 1
    wait_until(lambda: count_free(hanging) == SLOTS)
    assert post_rows(hanging).status_code == 200


def test_survey(hanging: Live) -> None:
    """A survey that nobody waits for any more, and that does not end, has its model failed, too."""
    shorten(hanging, "maps")
    with abandon_survey(hanging, "maps", SIDE + 1):
        wait_until(lambda: post_maps(hanging, "maps", SIDE).status_code == 503)
        check_refused(hanging, "maps")
    wait_until(lambda: hanging.client.get("/readyz").status_code == 200)
    assert post_maps(hanging, "maps", SIDE).status_code == 200


def test_no_slot_left(hanging: Live) -> None:
    """With all slots lost the process can't go on, and says so. The last test of its server."""
    with ExitStack() as stack:
        for reply in [stack.enter_context(hang(hanging, name)) for name in GATED]:
            problem(reply.result(), 503, seconds=True)
        wait_until(lambda: hanging.client.get("/livez").status_code == 503)
        found = problem(hanging.client.post("/extract", **DIGIT), 503, seconds=True)
        assert found["detail"] == "forwards that do not end have all slots of cpu"

"""The server as a process: asked to end under load, or brought down by what it runs."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from layertap.models.errors import LayertapError, LoadError
from layertap.models.registry import ModelEntry
from layertap.models.spec import ModelSpec, WarmSpec
from layertap.service.engine.execute.executor import Executor
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.engine.schedule.scheduler import Scheduler
from layertap.service.metrics import Metrics
from layertap.service.process import EXIT_FAILED
from layertap.service.settings import Settings
from tests.nets import INPUTS
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.fatal_models import ROWS, WAYS, mark
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT, process
from tests.service.server_process import (
    CLIENTS,
    ClientCrowd,
    build_row_request,
    descendants,
    fatal_model_spec,
    has_left,
    run_crowd,
    send_when_accepted,
)
from tests.service.support import arrays_of, configured, npy, problem, raw, rows

END_S, LOST_S = 30, 5
TIMES = 20
ONCE = [pytest.param(number, marks=pytest.mark.hard) if number else 0 for number in range(TIMES)]
FAILING = """
import asyncio
import sys
import uvicorn
from layertap.service.process import Server
from layertap.service.signals import exit_cleanly_on_signals

asked = []

async def app(scope, receive, send):
    asked.append(1)
    await send({"type": "http.response.start", "status": 503})
    await send({"type": "http.response.body", "body": b"last words", "more_body": True})
    if "hanging" in sys.argv:
        await asyncio.Event().wait()
    await send({"type": "http.response.body"})

def alive():
    return not asked

def on_end():
    print("ending", flush=True)

exit_cleanly_on_signals()
Server(uvicorn.Config(app, port=0, lifespan="off", access_log=False), alive, on_end).run_until_stopped()
"""
ASKED_AGAIN = """
import multiprocessing
import signal
import sys
import threading
import uvicorn
from layertap.service.process import Server
from layertap.service.signals import exit_cleanly_on_signals

forks = multiprocessing.get_context("fork")
ready = forks.Event()

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})

def child():
    signal.signal(signal.SIGTERM, leave)
    signal.alarm(60)  # where nobody ends it
    ready.set()
    while True:
        signal.pause()

def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("leaving", flush=True)

forks.Process(target=child, daemon=True).start()
ready.wait()  # for what it does when it is told to end
if "stuck" in sys.argv:
    threading.Thread(target=threading.Event().wait).start()
exit_cleanly_on_signals()
Server(uvicorn.Config(app, port=0, lifespan="off"), lambda: "failing" not in sys.argv, lambda: None).run_until_stopped()
"""
DEADLINE = {"LAYERTAP_DEADLINE_S": "30", "LAYERTAP_REPLICAS": "1"}


@pytest.fixture
def doomed(serve: Serve) -> Iterator[Live]:
    """A server that nothing has happened to yet."""
    with serve(configured(fatal_model_spec("Doomed")), replicas=1) as live:
        yield live


def ask(live: Live, value: float = 1.0) -> httpx.Response:
    """The reply of the model that can be brought down."""
    request = raw(npy(rows(1, value)), "application/x-npy", layers="linear", model="doomed")
    return live.client.post("/extract", **request)


@pytest.mark.parametrize("way", WAYS)
def test_failure_that_lasts(doomed: Live, way: str) -> None:
    """A device or a model that fails for good: every request gets 503 with the reason, never 200 again."""
    assert ask(doomed).status_code == 200
    assert ask(doomed, mark(way)).status_code == 503
    wait_until(lambda: ask(doomed).status_code != 200)
    for _ in range(3):
        assert "restarted" in str(problem(ask(doomed), 503, seconds=True))
    for path in ("/livez", "/readyz"):
        problem(doomed.client.get(path), 503, seconds=True)
    for name in ("doomed", "digits"):
        body = doomed.client.get(f"/models/{name}").json()
        assert (body["state"], body["hooks"]) == ("failed", 0)
        assert body["reason"]


def test_exit_while_loading(serve: Serve) -> None:
    """A model that ends its thread, of all forwards in the last of loading, is failed; the others serve on."""
    with serve(configured(fatal_model_spec("Leaving")), wait=False, fixed_batch_rows=ROWS + 1, replicas=1) as live:
        wait_until(lambda: live.client.get("/models/leaving").json()["state"] == "failed")
        reason = live.client.get("/models/leaving").json()["reason"]
        assert reason.startswith(f"a forward of {ROWS + 1} rows ended in SystemExit")
        wait_until(lambda: "are loading" not in live.client.get("/readyz").text)
        assert problem(live.client.get("/readyz"), 503, seconds=True)["detail"].endswith(" failed: forward")
        assert live.client.get("/livez").status_code == 200


def test_end_of_loading_without_a_forward() -> None:
    """Where nothing of a fixed number of rows has run, none is blamed for what ended the loading."""

    def load() -> Executor:
        raise SystemExit

    async def fail() -> LayertapError | None:
        handle = ModelHandle(entry, load, Scheduler(Metrics(), 1), Settings())
        await handle.wait_until_settled()
        return handle.error

    entry = ModelEntry(ModelSpec("leaving", "python:none:none"))
    error = asyncio.run(fail())
    assert isinstance(error, LoadError)
    assert error.detail == "loading ended in SystemExit"
    assert (entry.state, entry.reason.partition(";")[0], entry.kind) == ("failed", error.detail, "other")


@pytest.mark.slow
@pytest.mark.parametrize("number", ONCE)
def test_end_under_load(tmp_path: Path, number: int) -> None:
    """SIGTERM amid many requests: each that was accepted is answered in full, nobody else; the status is 0.

    All that the server says is in its log, in JSON.
    """
    with process([fatal_model_spec("Unhurried")], tmp_path, **DEADLINE) as server:
        request = build_row_request(server.url, "unhurried")
        reply = send_when_accepted(request)
        assert reply is not None
        wanted = arrays_of(reply)[""]
        assert httpx.get(f"{server.url}/livez", headers={"x": "a" * 100_000}).status_code == 431
        with run_crowd(request) as crowd:
            wait_until(lambda: crowd.waiting == CLIENTS and bool(crowd.replies))
            answered = len(crowd.replies)
            server.running.send_signal(signal.SIGTERM)
        assert server.running.wait(END_S) == 0
        assert crowd.waiting == 0
        assert len(crowd.replies) > answered
        for each in crowd.replies.values():
            np.testing.assert_allclose(arrays_of(each)[""], wanted, rtol=1e-5, atol=1e-6)
        said = [line["message"] for line in server.logged() if line["level"] in ("warning", "error", "critical")]
        assert [message[:16] for message in said] == ["refused with 431"]
        assert server.out.read_bytes() == b""


@pytest.mark.parametrize("hanging", [False, pytest.param(True, marks=pytest.mark.hard)])
def test_status(hanging: bool) -> None:
    """A process whose application is not alive any more ends with a status that says so, even with a reply to send."""
    words = [sys.executable, "-c", FAILING, *["hanging"][: int(hanging)]]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        url = next(line.split()[4] for line in running.stderr if "Uvicorn running on" in line)
        with httpx.stream("GET", url) as reply:
            assert next(reply.iter_text()) == "last words"
            assert running.wait(2 * LOST_S) == EXIT_FAILED
        assert running.stdout is not None
        assert running.stdout.read() == "ending\n"


@pytest.mark.parametrize(("way", "status"), [("failing", EXIT_FAILED), ("stuck", 0)])
def test_asked_again_at_the_very_end(way: str, status: int) -> None:
    """A signal while the children of a process are told to end changes neither its status nor how soon it ends."""
    words = [sys.executable, "-c", ASKED_AGAIN, way]
    with ExitStack() as ends:
        running = ends.enter_context(
            subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        ends.callback(running.kill)
        assert running.stdout is not None
        assert running.stderr is not None
        assert any("Uvicorn running on" in line for line in running.stderr)
        if way == "stuck":
            running.terminate()
        assert running.stdout.readline() == "leaving\n"
        running.terminate()
        assert running.wait(END_S) == status


@pytest.mark.hard
@pytest.mark.parametrize("way", WAYS)
def test_end_by_itself(tmp_path: Path, way: str) -> None:
    """What fails for good ends the process, with a status that is not 0, once all that wait have their 503."""
    with process([fatal_model_spec("Doomed")], tmp_path, LAYERTAP_WORKERS="0", **DEADLINE) as server:
        with run_crowd(build_row_request(server.url, "doomed")) as crowd:
            wait_until(lambda: len(crowd.replies) > CLIENTS)
            send_when_accepted(build_row_request(server.url, "doomed", mark(way)))
            wait_until(lambda: has_left(server.url))
            after = crowd.count
            assert server.running.wait(LOST_S) == EXIT_FAILED
        check_end(crowd, after)
        said = [line["message"] for line in server.logged() if line["level"] == "critical"]
        assert said == ["the server has to be restarted"]


def check_end(crowd: ClientCrowd, after: int) -> None:
    """All that were accepted have their answer; from some number on it is that nothing can be answered."""
    assert crowd.waiting == 0
    for number, reply in crowd.replies.items():
        if number >= after or reply.status_code != 200:
            assert "restarted" in str(problem(reply, 503, seconds=True))


@pytest.mark.hard
def test_end_while_loading(tmp_path: Path) -> None:
    """SIGTERM while a model loads, that somebody waits for: he gets 503, and the status is 0."""
    specs = [fatal_model_spec("Unhurried"), fatal_model_spec("Stuck", load="lazy")]
    with process(specs, tmp_path, **DEADLINE) as server, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(send_when_accepted, build_row_request(server.url, "stuck"))
        wait_until(lambda: httpx.get(f"{server.url}/models/stuck").json()["state"] == "loading")
        server.running.send_signal(signal.SIGTERM)
        assert server.running.wait(END_S) == 0
        reply = waits.result()
        assert reply is not None
        problem(reply, 503, seconds=True)


@pytest.mark.hard
@pytest.mark.parametrize("number", range(5))
def test_end_while_drawing_weights(tmp_path: Path, number: int) -> None:
    """SIGTERM while torch computes in the threads that load models: the status is 0, and nothing is aborted."""
    specs = [ModelSpec(name, f"torchvision:{name}", "random:0", "cpu") for name in ("resnet101", "vgg11")]
    with process(specs, tmp_path, wait=False, **DEADLINE) as server:
        wait_until(lambda: "loading" in httpx.get(f"{server.url}/models").text)
        server.running.send_signal(signal.SIGTERM)
        assert server.running.wait(END_S) == 0


@pytest.mark.hard
@pytest.mark.parametrize(("way", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
@pytest.mark.parametrize("workers", [0, 2])
def test_end_while_compiling(tmp_path: Path, compiler: str, workers: int, way: signal.Signals, status: int) -> None:
    """A server that ends while a warm plan is compiled, even if killed: the compiler ends too and leaves nothing."""
    warm = WarmSpec(("conv", "head"), compile=True)
    spec = ModelSpec("chain", "python:tests.nets:Chain", "random:0", "cpu", inputs=INPUTS["Chain"], warm=(warm,))
    plans = tmp_path / "cache" / "plans"
    variables = {"LAYERTAP_CACHE_DIR": str(plans.parent), "LAYERTAP_WORKERS": str(workers), **DEADLINE}
    with process([spec], tmp_path, wait=False, **variables) as server:
        wait_until(lambda: list(plans.glob("tmp*")) != [])
        children = descendants(server.running.pid)
        assert children
        server.running.send_signal(way)
        assert server.running.wait(END_S) == status
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert list(plans.glob("tmp*")) == []

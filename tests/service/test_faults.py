"""The server as a process: brought down by what it runs, or asked to end while it compiles."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys

import httpx
import pytest

from layertap.service.process import EXIT_FAILED
from tests.service.conftest import Serve
from tests.service.fatal_models import LIMIT, Refused
from tests.service.gated_server import wait_until
from tests.service.load_server import ROOT
from tests.service.queue_harness import extract_request, post
from tests.service.server_process import fatal_model_spec
from tests.service.support import configured, picture, problem, raw, rows

END_S, LOST_S = 30, 5
FAILING = """
import socket
import sys
import time

import uvicorn
from layertap.service.process import run_until_stopped

class Manager:
    alive = True

    def abort_loading(self):
        print("ending", flush=True)

async def app(scope, receive, send):
    Manager.alive = False
    await send({"type": "http.response.start", "status": 503})
    await send({"type": "http.response.body", "body": b"last words", "more_body": True})
    if "hangs" in sys.argv:
        time.sleep(1000)
    await send({"type": "http.response.body"})

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
run_until_stopped(uvicorn.Config(app, lifespan="off", log_config=None), [listener], Manager(), 0.0)
"""
DEADLINE = {"LAYERTAP_DEADLINE_S": "30", "LAYERTAP_REPLICAS": "1"}


def test_failure_that_lasts(serve: Serve) -> None:
    """A model that fails for good: its requests get 503 with the reason until it is loaded again; others answer."""
    with serve(configured(fatal_model_spec("Doomed")), replicas=1) as doomed:
        assert post(doomed, extract_request(rows(1, LIMIT + 1), "doomed", "linear")).status_code == 503
        found = problem(post(doomed, extract_request(rows(1), "doomed", "linear")), 503, seconds=True)
        assert found["detail"] == "model doomed has failed: it fails whatever it is given (RuntimeError)"
        assert found["hint"] == "POST /models/doomed/load tries again"
        assert doomed.client.get("/livez").status_code == 200
        problem(doomed.client.get("/readyz"), 503, seconds=True)
        digit = raw(picture(), "image/png", layers="pool", model="digits")
        assert doomed.client.post("/extract", **digit).status_code == 200
        assert doomed.client.post("/models/doomed/load").status_code == 200
        assert post(doomed, extract_request(rows(1), "doomed", "linear")).status_code == 200
        assert doomed.client.get("/readyz").status_code == 200


def test_a_failed_load_keeps_no_weights(serve: Serve) -> None:
    """A model that could not be loaded is out of memory once that is known, with no collector's help."""
    with serve(configured(fatal_model_spec("Refused", load="lazy"))) as live:
        logging.disable()  # pytest keeps records with their tracebacks
        gc.collect()
        gc.disable()
        try:
            found = problem(live.client.post("/models/refused/load"), 503)
            assert "ValueError" in found["detail"]
            wait_until(lambda: not Refused.made)
            problem(live.client.post("/models/refused/load"), 503)
            wait_until(lambda: not Refused.made)
        finally:
            gc.enable()
            logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "says"), [((), "ending\n"), (("hangs",), "")])
def test_status(words: tuple[str, ...], says: str) -> None:
    """A process that can't go on ends with a status that says so: after its last reply, or though its loop hangs."""
    command = [sys.executable, "-c", FAILING, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        with httpx.stream("GET", f"http://127.0.0.1:{int(running.stdout.readline())}") as reply:
            assert next(reply.iter_text()) == "last words"
            assert running.wait(2 * LOST_S) == EXIT_FAILED
        assert running.stdout.read() == says

"""Traces, as a collector gets them: a span for each request, with its steps, in the trace of whoever asks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from layertap.models.digits import spec as digits
from layertap.service.version import get_version
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.load_server import process
from tests.service.otlp_receiver import Collector, collecting, read
from tests.service.support import arrays_of, configured, image, net, npy, picture, raw, rows, text64
from tests.service.test_access_log import find

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORDED, UNRECORDED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"
TOLERANCE = 50_000_000  # the clock of the events of steps is read at the request's end, and may be set meanwhile
STEPS = ["parse", "decode", "queue", "forward", "copy", "encode"]
SOON_MS = "100"  # between two batches of spans; OpenTelemetry's own setting


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(serve: Serve, collector: Collector) -> Iterator[Live]:
    """A server that writes traces, soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", SOON_MS)
        nets = net("gated", "Gated"), net("touchy", "Touchy")
        settings = {"otlp_endpoint": collector.url, "api_keys": "secret-key # search", "replicas": 1, "cpu_threads": 1}
        with serve(configured(*nets, load="startup"), **settings) as live:
            live.client.headers.update({"x-api-key": "secret-key"})
            yield live


def wait_for(collector: Collector, reply: httpx.Response) -> Span:
    """The span of a request that was answered."""
    request_id = reply.headers["x-request-id"]
    wait_until(lambda: collector.find(request_id) is not None)
    span = collector.find(request_id)
    assert span is not None
    return span


def test_steps(traced: Live, collector: Collector) -> None:
    """A request's span has an event for each step, at its begin, within the time that the request took."""
    began = time.time_ns()
    reply = traced.client.post("/extract", json={"layers": ["block1", "head"], "inputs": [image(picture())]})
    ended = time.time_ns()
    assert reply.status_code == 200
    span = wait_for(collector, reply)
    assert (span.name, span.kind, span.parent_span_id) == ("POST /extract", Span.SPAN_KIND_SERVER, b"")
    wanted = {
        "http.request.method": "POST",
        "http.route": "/extract",
        "http.response.status_code": 200,
        "url.path": "/extract",
        "layertap.reply_bytes": len(reply.content),
        "layertap.request_id": reply.headers["x-request-id"],
        "layertap.key": "search",
        "layertap.model": "digits",
        "layertap.selectors": 2,
        "layertap.rows": 1,
        "layertap.batch_rows": 1,
    }
    assert wanted.items() <= read(span).items()
    assert [event.name for event in span.events] == STEPS
    assert began <= span.start_time_unix_nano < span.end_time_unix_nano
    moments = [event.time_unix_nano for event in span.events]
    assert moments == sorted(moments)
    assert span.start_time_unix_nano - TOLERANCE <= moments[0]
    assert moments[-1] <= ended + TOLERANCE
    for event in span.events:
        shown = float(reply.headers["server-timing"].partition(f"{event.name};dur=")[2].partition(",")[0])
        assert read(event)["layertap.ms"] == pytest.approx(shown, abs=0.02)
        assert read(event)["layertap.batch_rows"] == (event.name == "forward")
    resource = collector.resources[0]
    assert (resource["service.name"], resource["service.version"]) == ("layertap", get_version())


def test_shared_batch(traced: Live, collector: Collector) -> None:
    """Requests that share a forward each tell of it, at the same time, with all the rows that it had."""
    with ThreadPoolExecutor(2) as pool:
        with hold_model(traced):
            waiting = [pool.submit(post_rows, traced, count) for count in (2, 3)]
            wait_until(lambda: traced.engine.take_snapshot()["queue_rows"] == 5)
        replies = [each.result() for each in waiting]
    spans = [wait_for(collector, reply) for reply in replies]
    assert [read(span)["layertap.rows"] for span in spans] == [2, 3]
    first, second = (read(next(event for event in span.events if event.name == "forward")) for span in spans)
    assert first == second
    assert first["layertap.batch_rows"] == 5


def test_callers_trace(traced: Live, collector: Collector, lines: StringIO) -> None:
    """A request with ``traceparent`` is a part of that trace, and its reply and its line in the log say so.

    A trace that its caller does not record gets no spans, and its identifiers all the same.
    """
    reply = traced.client.get("/models", headers={"traceparent": UNRECORDED})
    assert reply.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert reply.headers["traceparent"].endswith("-00")
    recorded = traced.client.get("/models", headers={"traceparent": RECORDED})
    span = wait_for(collector, recorded)
    assert collector.find(reply.headers["x-request-id"]) is None
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert recorded.headers["traceparent"] == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
    assert find(lines, recorded)["trace_id"] == TRACE_ID


@pytest.mark.parametrize("header", ["", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", RECORDED + "-secret", "0" * 4000])
def test_hostile_headers(traced: Live, collector: Collector, header: str) -> None:
    """What is no ``traceparent`` is passed over: the request is a trace of its own."""
    reply = traced.client.get("/models", headers={"traceparent": header, "tracestate": header})
    span = wait_for(collector, reply)
    assert (reply.status_code, span.parent_span_id) == (200, b"")
    assert span.trace_id.hex() in reply.headers["traceparent"]


def test_errors(traced: Live, collector: Collector) -> None:
    """A bug of a model is an error, a mistake of the caller is none; both are spans, as who is not let in is.

    Whatever bytes are in a head, and whatever a query says, spans have none of it.
    """
    failing = raw(npy(rows(1, 1000)), "application/x-npy", layers=".", model="touchy")
    for reply, status, code in (
        (traced.client.post("/extract", **failing), 500, Status.STATUS_CODE_ERROR),
        (traced.client.post("/extract", json={"layers": ["nowhere"]}), 422, Status.STATUS_CODE_UNSET),
        (traced.client.get("/models", headers={"x-api-key": "wrong"}), 401, Status.STATUS_CODE_UNSET),
        (traced.client.get("/secret-%1b-path?inputs=%ff"), 404, Status.STATUS_CODE_UNSET),
        (traced.client.get("/nowhere", headers={"user-agent": b"\xff\\x"}), 404, Status.STATUS_CODE_UNSET),
    ):
        span = wait_for(collector, reply)
        assert (reply.status_code, read(span)["http.response.status_code"], span.status.code) == (status, status, code)
        assert str(read(span)["url.path"]).isprintable()
        assert "secret-key" not in str(span)
        assert "inputs" not in str(span)


DIALECTS = (
    ("/explain", {"method": "grad_cam", "inputs": [image(picture())]}, "/explain"),
    ("/v1/embeddings", {"model": "digits", "input": f"data:image/png;base64,{text64(picture())}"}, "/v1/embeddings"),
    (
        "/v2/models/gated/infer",
        {
            "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
            "outputs": [{"name": "linear"}],
        },
        "/v2/models/{name}/infer",
    ),
)


@pytest.mark.parametrize(("path", "body", "route"), DIALECTS)
def test_dialects(traced: Live, collector: Collector, path: str, body: object, route: str) -> None:
    """Other protocols, and explanations, are traced with the same steps, by their routes' templates."""
    reply = traced.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    span = wait_for(collector, reply)
    assert span.name == f"POST {route}"
    assert read(span)["layertap.rows"] == 1
    assert {"parse", "queue", "forward", "encode"} <= {event.name for event in span.events}


@pytest.mark.slow
def test_worker_processes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that ran in worker processes stand at their time in the trace; what is left is sent at the end."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pictures")
    with collecting() as collector:
        with serve(workers=2, otlp_endpoint=collector.url) as live:
            began = time.time_ns()
            reply = live.client.post("/extract", **raw(picture(), "image/png", layers="head"))
            ended = time.time_ns()
            assert arrays_of(reply)
        events = wait_for(collector, reply).events
    assert {"decode", "queue", "forward", "copy", "encode"} <= {event.name for event in events}
    for event in events:
        assert began - TOLERANCE <= event.time_unix_nano <= ended + TOLERANCE
    assert collector.resources[0]["service.name"] == "pictures"


@pytest.mark.slow
def test_collector_that_is_gone(tmp_path: Path) -> None:
    """Where nobody takes the traces requests are answered all the same, and the server ends soon."""
    with process([digits()], tmp_path, LAYERTAP_OTLP_ENDPOINT="http://127.0.0.1:9", LAYERTAP_WORKERS="0") as server:
        assert httpx.get(f"{server.url}/models").status_code == 200
        assert server.end() == 0


@pytest.mark.slow
def test_extra_is_missing(tmp_path: Path) -> None:
    """Without the extra's packages the server says in one line what to install, before torch is imported."""
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None; sys.argv = ['layertap', 'serve', '--port', '0']\n"
        "from layertap.service.cli.main import main; main()"
    )
    environment = os.environ | {"LAYERTAP_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    words = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(said)) == (2, 1)
    assert 'pip install "layertap[otel]"' in said[0]
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)

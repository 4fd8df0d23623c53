"""The line that each request leaves in the log: what it was about, and where its time went, in whatever protocol."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import httpx
import pytest

from layertap.service.access_log import AccessRecord, format_request
from layertap.service.logs import JsonFormatter, TextFormatter
from layertap.service.timings import RequestFacts, Timings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import build_row_request, connect, encode_request, hold_model, post_rows, wait_until
from tests.service.support import Json, configured, image, net, picture

ALWAYS = ["request_id", "method", "path", "status", "milliseconds"]
STEPS = {"parse_ms", "decode_ms", "queue_ms", "forward_ms", "copy_ms", "encode_ms"}
KEYS = {"api_keys": "user-key # search, other-key", "admin_keys": "admin-key"}


class Lines:
    """What the log says of requests, as ``serve`` writes it."""

    def __init__(self) -> None:
        self.stream = StringIO()

    def list_all(self) -> list[Json]:
        """Every line about a request, the oldest first."""
        return [json.loads(line) for line in self.stream.getvalue().split("\n") if line]

    def find(self, reply: httpx.Response) -> Json:
        """The line of a request that was answered."""
        return self.find_by_id(reply.headers["x-request-id"])

    def find_by_id(self, request_id: str) -> Json:
        """The line of a request: others of tests before this one may come late."""
        wait_until(lambda: any(line["request_id"] == request_id for line in self.list_all()))
        (line,) = [line for line in self.list_all() if line["request_id"] == request_id]
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines = Lines()
    handler = logging.StreamHandler(lines.stream)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("layertap.access")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)


ONE_AT_A_TIME = {"replicas": 1, "cpu_threads": 1}  # what waits, waits


@pytest.fixture(scope="module")
def single(serve: Serve) -> Iterator[Live]:
    """A server that runs one forward at a time."""
    with serve(configured(net("gated", "Gated")), **ONE_AT_A_TIME) as live:
        yield live


def infer(live: Live, model: str = "gated") -> httpx.Response:
    """A request in the Open Inference Protocol."""
    inputs = [{"name": "x", "shape": [3, 4], "datatype": "FP32", "data": [1] * 12}]
    return live.client.post(f"/v2/models/{model}/infer", json={"inputs": inputs, "outputs": [{"name": "linear"}]})


def test_extraction(live: Live, lines: Lines) -> None:
    """An extraction's line has its model, layers, rows, batch and bytes, and the time of each step as its reply has."""
    body = {"layers": ["block1", "head"], "inputs": [image(picture(seed)) for seed in range(3)]}
    reply = live.client.post("/extract", json=body, headers={"accept-encoding": "identity"})
    line = lines.find(reply)
    assert [name for name in line if name in ALWAYS] == ALWAYS
    assert (line["model"], line["selectors"], line["rows"]) == ("digits", 2, 3)
    assert 1 <= line["batch_rows"] <= 3  # rows of a request may run side by side
    assert (line["request_bytes"], line["reply_bytes"]) == (len(reply.request.read()), len(reply.content))
    assert {name for name in line if name.endswith("_ms")} - {"receive_ms", "send_ms"} == STEPS | {"other_ms"}
    for name in STEPS:
        shown = reply.headers["server-timing"].partition(f"{name.removesuffix('_ms')};dur=")[2].partition(",")[0]
        assert line[name] == pytest.approx(float(shown), abs=0.011)
    spent = sum(value for name, value in line.items() if name.endswith("_ms"))
    assert spent == pytest.approx(line["milliseconds"], abs=0.2)


def test_refusals(live: Live, limited: Live, lines: Lines) -> None:
    """Whatever is refused has a line with its status, and as much of the rest as was known by then."""
    for reply, status, known in (
        (live.client.post("/extract", json={"layers": ["nowhere"], "inputs": [image(picture())]}), 422, "digits"),
        (post_rows(live, model="zzz\x1b"), 404, "zzz\\x1b"),
        (infer(live, "zzz"), 404, "zzz"),
        (live.client.post("/extract", content=b"{", headers={"content-type": "application/json"}), 400, None),
        (live.client.get("/nowhere"), 404, None),
        (post_rows(limited, 5), 413, "gated"),
    ):
        line = lines.find(reply)
        assert (reply.status_code, line["status"], line.get("model")) == (status, status, known)
        assert "batch_rows" not in line


def test_shared_forward(single: Live, lines: Lines) -> None:
    """A request says how many rows its forward had, those of others among them."""
    with ThreadPoolExecutor(2) as pool:
        with hold_model(single):
            waiting = [pool.submit(post_rows, single, count) for count in (2, 3)]
            wait_until(lambda: single.engine.take_snapshot().queue_rows == 5)
        found = [lines.find(each.result()) for each in waiting]
    assert [(line["rows"], line["batch_rows"]) for line in found] == [(2, 5), (3, 5)]


def test_client_that_left(single: Live, lines: Lines) -> None:
    """A client that left before its reply began is told, with what it had asked for."""
    with hold_model(single):
        with connect(single) as connection:
            request = build_row_request(single, 3)
            request.headers["x-request-id"] = "left"
            connection.sendall(encode_request(request))
            wait_until(lambda: single.engine.take_snapshot().queue_rows == 3)
        line = lines.find_by_id("left")
    assert (line["status"], line["model"], line["rows"]) == (499, "gated", 3)


def test_names_of_keys(serve: Serve, lines: Lines) -> None:
    """A key's name, or its place among those without, is in the line; no key ever is."""
    with serve(**KEYS) as live:
        for key, name, status in (
            ("user-key", "search", 200),
            ("other-key", "key-2", 200),
            ("admin-key", "admin-1", 200),
            ("user-key # search", None, 401),
            ("wrong-key", None, 401),
        ):
            reply = live.client.get("/models", headers={"x-api-key": key})
            line = lines.find(reply)
            assert (reply.status_code, line["status"], line.get("key")) == (status, status, name)
    assert not [key for key in ("user-key", "other-key", "admin-key", "wrong-key") if key in lines.stream.getvalue()]


def test_slow_requests(serve: Serve, lines: Lines) -> None:
    """Only a request that takes as long as the setting says is a warning, with where the time went."""
    with serve(configured(net("gated", "Gated")), slow_request_s=0.2, **ONE_AT_A_TIME) as live:
        quick = lines.find(post_rows(live))
        with ThreadPoolExecutor(1) as pool:
            with hold_model(live):
                waiting = pool.submit(post_rows, live, 2)
                wait_until(lambda: live.engine.take_snapshot().queue_rows == 2)
                assert post_rows(live, timeout="0.3").status_code == 504  # so long at least the other one waits
            slow = lines.find(waiting.result())
    assert (slow["level"], slow["message"]) == ("warning", "slow request")
    steps = {name: value for name, value in slow.items() if name.endswith("_ms")}
    assert max(steps, key=steps.__getitem__) == "queue_ms"
    assert slow["milliseconds"] >= 200
    assert quick["message"] == "request" or quick["milliseconds"] >= 200


def make_record(**more: object) -> AccessRecord:
    timings = Timings({"queue": 1234.5, "forward": 11.25}, {"cache": "miss"})
    timings.facts = RequestFacts(model="resnet50", layers="0123abcd", selectors=2, rows=3, batch_rows=8)
    chosen = {"request_id": "7", "method": "POST", "path": "/extract", "status": 200, "seconds": 1.25, "key": "search"}
    return AccessRecord(timings=timings, **(chosen | more))  # type: ignore[arg-type]


def test_sentence() -> None:
    """For people a line says what was asked and answered, and where the time went, the longest first."""
    sentence = format_request(make_record().make_fields())
    assert sentence == (
        "POST /extract 200, 1250 ms: resnet50, 3 rows in batches of up to 8, cache miss, key search"
        " (queue 1234.5 forward 11.2 other 4.2)"
    )
    left = format_request(make_record(status=499).make_fields())
    assert left.startswith("POST /extract 499, 1250 ms: the client left, resnet50")
    record = logging.LogRecord("layertap.access", logging.WARNING, "f", 1, "slow request", (), None)
    record.fields = make_record().make_fields()
    assert TextFormatter().format(record).endswith(f"  warning: slow: {sentence}")

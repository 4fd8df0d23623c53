"""The line that each request leaves in the log: what it was about, and where its time went, in whatever protocol."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import httpx
import pytest

from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.gated_server import build_row_request, connect, encode_request, hold_model, post_rows, wait_until
from tests.service.support import Json, configured, image, net, picture

ALWAYS = ["request_id", "method", "path", "status", "milliseconds"]
STEPS = {"parse_ms", "decode_ms", "queue_ms", "forward_ms", "copy_ms", "encode_ms"}


def find(lines: StringIO, reply: httpx.Response | str) -> Json:
    """The line of a request, by its id or its reply: others of tests before this one may come late."""
    request_id = reply if isinstance(reply, str) else reply.headers["x-request-id"]

    def list_all() -> list[Json]:
        found = map(json.loads, filter(None, lines.getvalue().split("\n")))
        return [line for line in found if line["logger"] == "layertap.access" and line.get("request_id") == request_id]

    wait_until(lambda: len(list_all()) == 1)
    return list_all()[0]


ONE_AT_A_TIME = {"replicas": 1, "cpu_threads": 1}  # what waits, waits


single = server_of(net("gated", "Gated"), **ONE_AT_A_TIME)


def test_extraction(live: Live, lines: StringIO) -> None:
    """An extraction's line has its model, layers, rows, batch and bytes, and the time of each step as its reply has."""
    body = {"layers": ["block1", "head"], "inputs": [image(picture(seed)) for seed in range(3)]}
    reply = live.client.post("/extract", json=body)
    line = find(lines, reply)
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


def test_refusals(live: Live, limited: Live, lines: StringIO) -> None:
    """Whatever is refused has a line with its status, and as much of the rest as was known by then."""
    for reply, status, known in (
        (live.client.post("/extract", json={"layers": ["nowhere"], "inputs": [image(picture())]}), 422, "digits"),
        (post_rows(live, model="zzz\x1b"), 404, "zzz\\x1b"),
        (live.client.post("/extract", content=b"{", headers={"content-type": "application/json"}), 400, None),
        (post_rows(limited, 5), 413, "gated"),
    ):
        line = find(lines, reply)
        assert (reply.status_code, line["status"], line.get("model")) == (status, status, known)
        assert "batch_rows" not in line


def test_client_that_left(single: Live, lines: StringIO) -> None:
    """A client that left before its reply began is told, with what it had asked for."""
    with hold_model(single):
        with connect(single) as connection:
            request = build_row_request(single, 3)
            request.headers["x-request-id"] = "left"
            connection.sendall(encode_request(request))
            wait_until(lambda: single.engine.take_snapshot()["queue_rows"] == 3)
        line = find(lines, "left")
    assert (line["status"], line["model"], line["rows"]) == (499, "gated", 3)


def test_names_of_keys(serve: Serve, lines: StringIO) -> None:
    """A key's name, or its place among those without, is in the line; no key ever is."""
    named = (("user-key", "search"), ("other-key", "key-2"), ("admin-key", "admin-1"), ("user-key # search", None))
    with serve(api_keys="user-key # search, other-key", admin_keys="admin-key") as live:
        for key, name in named:
            status = 401 if name is None else 200
            reply = live.client.get("/models", headers={"x-api-key": key})
            line = find(lines, reply)
            assert (reply.status_code, line["status"], line.get("key")) == (status, status, name)
    assert not [key for key in ("user-key", "other-key", "admin-key") if key in lines.getvalue()]


def test_slow_requests(serve: Serve, lines: StringIO) -> None:
    """Only a request that takes as long as the setting says is a warning, with where the time went."""
    with serve(configured(net("gated", "Gated")), slow_request_s=0.1, **ONE_AT_A_TIME) as live:
        quick = find(lines, post_rows(live))
        with ThreadPoolExecutor(1) as pool:
            with hold_model(live):
                waiting = pool.submit(post_rows, live, 2)
                wait_until(lambda: live.engine.take_snapshot()["queue_rows"] == 2)
                assert post_rows(live, timeout="0.15").status_code == 504  # so long at least the other one waits
            slow = find(lines, waiting.result())
    assert (slow["level"], slow["message"]) == ("warning", "slow request")
    steps = {name: value for name, value in slow.items() if name.endswith("_ms")}
    assert max(steps, key=steps.__getitem__) == "queue_ms"
    assert slow["milliseconds"] >= 100
    assert quick["message"] == "request" or quick["milliseconds"] >= 100

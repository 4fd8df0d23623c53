"""What the client does where a server refuses, cuts, hangs, restarts; no request is done twice wrongly."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

import layertap_client as lt
from layertap_client.exchange import RetryPolicy, Session
from layertap_client.messages import Outcome, Reply, Request, Send, Wait
from tests.client.misbehaving_server import MisbehavingServer, cut, cut_reply, drip, hang, misbehaving, reply, trickle
from tests.server import serving
from tests.service.gated_server import gated_module
from tests.service.support import configured, net, npy

ROW = np.ones((1, 4), np.float32)
RESULT = save({"linear": ROW}, {"receipts": json.dumps({"linear": {"layer": "linear"}}), "rows": "1"})
GOOD = reply(200, RESULT, content_type="application/x-safetensors")
QUICK = RetryPolicy(attempts=2, backoff_s=0.001)
CALLS: dict[str, Any] = {
    "extract": lambda c: c.extract(ROW, "linear"),
    "models": lambda c: c.models(),
    "model": lambda c: c.model("digits"),
}
LIMITS = {"deadline_s": 30, "max_inputs": 256, "max_queue_rows": 1024, "max_body_bytes": 2**25}
MODELS = reply(200, json.dumps({"default": "x", "models": [], "limits": LIMITS}).encode())
MODEL = reply(200, json.dumps({"name": "digits", "state": "ready"}).encode())
ANSWERS = {"extract": GOOD, "models": MODELS, "model": MODEL}


@pytest.mark.parametrize("status", [429, 503])
def test_refusal_is_waited_out(open_client: Any, status: int) -> None:
    """What was refused with Retry-After is sent again, the same bytes, and the result says how often."""
    refusal = reply(status, b"{}", retry_after="0")
    with misbehaving(refusal, refusal, refusal, refusal, refusal, GOOD) as server:
        result = open_client(server.url, retries=QUICK).extract(ROW, "linear")
        np.testing.assert_array_equal(result.array, ROW)
        assert result.attempts == 6
        assert {(each.line, each.body) for each in server.received} == {(server.received[0].line, npy(ROW))}


PASSING = {
    "429": reply(429, retry_after="0"),
    "503": reply(503, retry_after="0"),
    "502": reply(502),
    "500-of-a-proxy": reply(500, b"Internal Server Error", content_type="text/plain"),
    "cut": cut,
    "cut-reply": cut_reply(b"12345", 3),
}


@pytest.mark.parametrize(
    ("call", "trouble"), [*(("extract", each) for each in PASSING), ("models", "cut-reply"), ("model", "503")]
)
def test_what_is_repeated(open_client: Any, call: str, trouble: str) -> None:
    """Whatever may pass is sent again."""
    with misbehaving(PASSING[trouble], ANSWERS[call]) as server:
        CALLS[call](open_client(server.url, retries=QUICK))
        assert len(server.received) == 2


@pytest.mark.parametrize("status", [500, 422, 404])
def test_what_is_not_repeated(open_client: Any, status: int) -> None:
    """What the server says of the request itself, and a failure of its own, are told at once."""
    with misbehaving(reply(status), GOOD) as server:
        with pytest.raises(lt.ProblemError):
            CALLS["extract"](open_client(server.url, retries=QUICK))
        assert len(server.received) == 1


@pytest.mark.parametrize("behaviour", [cut, reply(502)])
def test_attempts_end(open_client: Any, behaviour: Any) -> None:
    """What never comes right is an error after so many attempts."""
    with misbehaving(behaviour) as server:
        with pytest.raises(lt.LayertapError):
            open_client(server.url, retries=QUICK).models()
        assert len(server.received) == 3


@pytest.mark.parametrize(("make", "call"), [(hang, "extract"), (drip, "model")])
def test_server_that_hangs(open_client: Any, make: Any, call: str) -> None:
    """A call ends with its timeout, whether the server says nothing or goes on for ever."""
    ours: list[MisbehavingServer] = []
    with misbehaving(make(ours)) as server:
        ours.append(server)
        with pytest.raises(lt.ReplyTimeoutError) as caught:
            CALLS[call](open_client(server.url, timeout=0.3))
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.sent
        assert len(server.received) == 1


def test_silence(open_client: Any) -> None:
    """A connection on which nothing comes is given up for another one; one that is slow is not."""
    ours: list[MisbehavingServer] = []
    with misbehaving(hang(ours), trickle(RESULT)) as server:
        ours.append(server)
        client = open_client(server.url, retries=QUICK)
        getattr(client, "client", client).session.silence_s = 0.3
        np.testing.assert_array_equal(CALLS["extract"](client).array, ROW)
        assert len(server.received) == 2


def test_timeout_is_the_servers_deadline(open_client: Any) -> None:
    """Each attempt tells the server what is left, less the way of the reply."""
    with misbehaving(reply(429, retry_after="0.2"), GOOD) as server:
        open_client(server.url).extract(ROW, "linear", timeout=20)
        first, second = (float(each.headers["x-request-timeout"]) for each in server.received)
        assert 19 < first <= 19.5
        assert second <= first - 0.2


def test_restart(open_client: Any) -> None:
    """A server that answered before and is away for a while is waited for."""
    with misbehaving(MODEL) as server:
        client = open_client(server.url, retries=RetryPolicy(attempts=1, backoff_s=0.01, max_backoff_s=0.02))
        client.model("digits")
        port = int(server.url.rpartition(":")[2])
    tried = threading.Event()
    taken = socket.socket()  # keeps the port without listening: connections are refused
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", port))

    def restart() -> None:
        tried.wait(0.3)
        taken.listen()
        connection, _ = taken.accept()
        with connection:
            connection.recv(4096)
            body = json.dumps({"name": "digits", "state": "ready"}).encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    thread = threading.Thread(target=restart)
    thread.start()
    with taken:
        assert client.model("digits").state == "ready"
        thread.join()


def steps_of(session: Session, *outcomes: Outcome) -> list[float]:
    """The pauses between attempts, in seconds, until the good reply or the error."""
    exchange = session.exchange(Request("GET", "/x"))
    pauses, left = [], list(outcomes)
    step = next(exchange)
    try:
        while True:
            if isinstance(step, Wait):
                pauses.append(step.seconds)
            step = exchange.send(left.pop(0) if isinstance(step, Send) else None)
    except (StopIteration, lt.LayertapError):
        return pauses


def test_pauses() -> None:
    """Pauses double up to a bound, with some chance in them; Retry-After is never undercut."""
    session = Session(1000, retries=RetryPolicy(5, 1.0, 4.0), clock=lambda: 0.0, draw=lambda: 0.0)
    failure = lt.ConnectionFailedError("cut", sent=True)
    assert steps_of(session, *[failure] * 6) == [1, 2, 4, 4, 4]
    assert (
        steps_of(session, *[Reply(429, {"retry-after": "7"}, bytearray())] * 9, Reply(200, {}, bytearray())) == [7] * 9
    )
    late = Session(1000, retries=RetryPolicy(5, 1.0, 4.0), clock=lambda: 0.0, draw=lambda: 1.0)
    assert steps_of(late, Reply(503, {"retry-after": "8"}, bytearray()), Reply(200, {}, bytearray())) == [10]
    assert steps_of(late, failure, Reply(200, {}, bytearray())) == [0.75]


def run_clocked(policy: RetryPolicy, *outcomes: tuple[float, Outcome]) -> tuple[list[float], float, int]:
    """The deadlines that the server is told, when the call ends, and its status; each outcome comes after seconds."""
    now = 0.0
    session = Session(1e6, retries=policy, silence_s=3720.0, clock=lambda: now, draw=lambda: 0.0)
    exchange = session.exchange(Request("POST", "/x"))
    deadlines, left = [], list(outcomes)
    step = next(exchange)
    try:
        while True:
            outcome = None
            if isinstance(step, Wait):
                now += step.seconds
            elif isinstance(step, Send):
                deadlines.append(float(step.request.headers["X-Request-Timeout"]))
                seconds, outcome = left.pop(0) if len(left) > 1 else left[0]
                now += seconds
            step = exchange.send(outcome)
    except StopIteration:
        return deadlines, now, 200
    except lt.ProblemError as error:
        return deadlines, now, error.status


def test_patience() -> None:
    """Patience counts from the first failure, and cuts neither an attempt nor the deadline that the server is told."""
    policy = RetryPolicy(1, 0.5, 15.0, patience_s=600)
    good, refusal = Reply(200, {}, bytearray()), Reply(503, {"retry-after": "900"}, bytearray())
    assert run_clocked(policy, (700, good)) == ([3719.5], 700, 200)
    deadlines, end, status = run_clocked(policy, (700, refusal), (0, refusal))
    assert (set(deadlines), len(deadlines), end, status) == ({3719.5}, 40, 700 + 39 * 15, 503)
    deadlines, end, status = run_clocked(policy, *[(0, refusal)] * 39, (3000, good))
    assert (set(deadlines), end, status) == ({3719.5}, 39 * 15 + 3000, 200)
    assert run_clocked(policy, (0, Reply(502, {}, bytearray())))[1] > 580
    assert run_clocked(policy, *[(0, Reply(429, {"retry-after": "0"}, bytearray()))] * 9, (0, good))[1] == 4.5


def test_threads_share_a_client() -> None:
    """Many threads at once, each with the reply to its own request."""
    with misbehaving(GOOD) as server, lt.Client(server.url, limits=httpx.Limits(max_connections=4)) as client:
        results: list[Any] = []
        threads = [threading.Thread(target=lambda: results.append(CALLS["extract"](client))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == len(server.received) == 16


def test_deadline(open_client: Any) -> None:
    """A server that runs out of time says so itself."""
    with serving(configured(net("gated", "Gated")), deadline_s=0.5) as live:
        gate = gated_module(live).gate
        gate.clear()
        try:
            with pytest.raises(lt.DeadlineError) as caught:
                open_client(live.url, retries=RetryPolicy(attempts=0)).extract(ROW, "linear", model="gated")
        finally:
            gate.set()
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.status, caught.value.kind) == (504, "deadline")

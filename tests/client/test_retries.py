"""What the client does where a server refuses, cuts, hangs, restarts; no request is done twice wrongly."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

import layertap_client as lt
from layertap_client.exchange import RetryPolicy, Session
from layertap_client.messages import Outcome, Reply, Request, Send, Wait
from tests.client.misbehaving_server import cut, cut_reply, drip, hang, misbehaving, reply, trickle
from tests.service.support import npy

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


@pytest.mark.parametrize(("behaviour", "call"), [(hang, "extract"), (drip, "model")])
def test_server_that_hangs(open_client: Any, behaviour: Any, call: str) -> None:
    """A call ends with its timeout, whether the server says nothing or goes on for ever."""
    with misbehaving(behaviour) as server:
        with pytest.raises(lt.ReplyTimeoutError) as caught:
            CALLS[call](open_client(server.url, timeout=0.3))
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.sent
        assert len(server.received) == 1


def test_silence(open_client: Any) -> None:
    """A connection on which nothing comes is given up for another one; one that is slow is not."""
    with misbehaving(hang, trickle(RESULT)) as server:
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
    waits: list[float] = []
    with ExitStack() as stack:

        def restart_at_last(_: lt.LayertapError, seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                taken.listen()
                stack.enter_context(misbehaving(MODEL, listener=taken))

        with misbehaving(MODEL) as server:
            client = open_client(server.url, retries=RetryPolicy(1, 0.01, 0.02, on_wait=restart_at_last))
            client.model("digits")
            port = int(server.url.rpartition(":")[2])
        taken = stack.enter_context(socket.socket())  # keeps the port without listening: connections are refused
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        assert client.model("digits").state == "ready"


class Run(NamedTuple):
    """The pauses of a call in seconds, the deadlines that the server is told, when it ends, and its status."""

    pauses: list[float]
    deadlines: list[float]
    end: float
    status: int


def run_clocked(policy: RetryPolicy, *outcomes: tuple[float, Outcome], draw: float = 0.0) -> Run:
    """A call each of whose outcomes comes after so many seconds, the last one again and again."""
    now = 0.0
    session = Session(1e6, retries=policy, silence_s=3720.0, clock=lambda: now, draw=lambda: draw)
    exchange = session.exchange(Request("POST", "/x"))
    pauses, deadlines, left, status = list[float](), list[float](), list(outcomes), 200
    step = next(exchange)
    try:
        while True:
            outcome = None
            if isinstance(step, Wait):
                pauses.append(step.seconds)
                now += step.seconds
            elif isinstance(step, Send):
                deadlines.append(float(step.request.headers["X-Request-Timeout"]))
                seconds, outcome = left.pop(0) if len(left) > 1 else left[0]
                now += seconds
            step = exchange.send(outcome)
    except lt.ConnectionFailedError:
        status = 0
    except lt.ProblemError as error:
        status = error.status
    except StopIteration:
        pass
    return Run(pauses, deadlines, now, status)


GOOD_REPLY = (0.0, Reply(200, {}, bytearray()))


def refuse(retry_after: int, status: int = 503) -> Reply:
    return Reply(status, {"retry-after": str(retry_after)}, bytearray())


def test_pauses() -> None:
    """Pauses double up to a bound, with some chance in them; Retry-After is never undercut."""
    policy, failure = RetryPolicy(5, 1.0, 4.0), (0.0, lt.ConnectionFailedError("cut", sent=True))
    assert run_clocked(policy, failure).pauses == [1, 2, 4, 4, 4]
    assert run_clocked(policy, *[(0.0, refuse(7, 429))] * 9, GOOD_REPLY).pauses == [7] * 9
    assert run_clocked(policy, (0.0, refuse(8)), GOOD_REPLY, draw=1.0).pauses == [10]
    assert run_clocked(policy, failure, GOOD_REPLY, draw=1.0).pauses == [0.75]


def test_patience() -> None:
    """Patience counts from the first failure, and cuts neither an attempt nor the deadline that the server is told."""
    policy, refusal = RetryPolicy(1, 0.5, 15.0, patience_s=600), refuse(900)
    good = GOOD_REPLY[1]
    assert run_clocked(policy, (700, good)) == ([], [3719.5], 700, 200)
    _, deadlines, end, status = run_clocked(policy, (700, refusal), (0, refusal))
    assert (set(deadlines), len(deadlines), end, status) == ({3719.5}, 40, 700 + 39 * 15, 503)
    _, deadlines, end, status = run_clocked(policy, *[(0, refusal)] * 39, (3000, good))
    assert (set(deadlines), end, status) == ({3719.5}, 39 * 15 + 3000, 200)
    assert run_clocked(policy, (0, Reply(502, {}, bytearray()))).end > 580
    assert run_clocked(policy, *[(0, refuse(0, 429))] * 9, (0, good)).end == 4.5


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

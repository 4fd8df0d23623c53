"""Refusals as exceptions, with all that the server says."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import layertap_client as lt
from tests.client.misbehaving_server import misbehaving, reply
from tests.server import Live, serving
from tests.service.support import picture

PICTURE = picture()
ROW = np.ones((1, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "cls", "kind"),
    [
        (lambda c: c.extract(PICTURE, "blok3"), lt.InvalidRequestError, "invalid-request"),
        (lambda c: c.extract(b"no picture", "head"), lt.InvalidRequestError, "invalid-request"),
        (lambda c: c.extract(PICTURE, "head", model="digit"), lt.ProblemError, "unknown-model"),
        (lambda c: c.extract([PICTURE] * 257, "head"), lt.TooLargeError, "too-large"),
    ],
)
def test_refusals(client: Any, call: Any, cls: type[lt.ProblemError], kind: str) -> None:
    """Each refusal is an error of its kind, below one root."""
    with pytest.raises(lt.ProblemError) as caught:
        call(client)
    error = caught.value
    assert type(error) is cls
    assert isinstance(error, lt.LayertapError)
    assert (error.kind, error.type) == (kind, f"urn:layertap:problem:{kind}")
    assert error.detail in str(error)
    assert len(error.request_id) == 32


def test_what_a_refusal_says(client: Any, live: Live) -> None:
    """Detail, hint, faults with the input's place: what the server's own document has."""
    sent = {"layers": ["blok3", "head"], "inputs": [{"image": "eA=="}]}
    document = live.client.post("/extract", json=sent).json()
    with pytest.raises(lt.InvalidRequestError) as caught:
        client.extract(b"x", ["blok3", "head"])
    error = caught.value
    assert (error.status, error.title, error.detail) == (422, document["title"], document["detail"])
    assert error.hint == document["errors"][0]["hint"]
    assert error.hint in str(error)
    assert [fault.pointer for fault in error.faults] == [each["pointer"] for each in document["errors"]]
    with pytest.raises(lt.InvalidRequestError) as caught:
        client.extract([PICTURE, b"x"], "head")
    assert [fault.input for fault in caught.value.faults] == [1]


def test_error_goes_to_another_process(client: Any) -> None:
    """Errors survive pickling, as loaders of data in other processes need it."""
    with pytest.raises(lt.ProblemError) as caught:
        client.extract(PICTURE, "blok3")
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is lt.InvalidRequestError
    assert (str(error), error.hint, error.faults) == (str(caught.value), caught.value.hint, caught.value.faults)
    cut = pickle.loads(pickle.dumps(lt.ConnectionFailedError("cut", sent=True)))
    assert (str(cut), cut.sent) == ("cut", True)


def test_keys(open_client: Any) -> None:
    """The key goes along; without it the server refuses."""
    with serving(api_keys="user-key") as live:
        assert open_client(live.url, api_key="user-key").extract(PICTURE, "head").rows == 1
        with pytest.raises(lt.ProblemError) as caught:
            open_client(live.url).extract(PICTURE, "head")
        assert caught.value.status == 401


NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        *((NOBODY, {"api_key": key}) for key in ("", "schlüssel", "secret\nX-Other: 1")),
        *((NOBODY, {"timeout": timeout}) for timeout in (0, float("inf"), "5")),
        *((url, {}) for url in ("127.0.0.1:8000", "ftp://host", "http://[::1", "http://host:8000/v1")),
    ],
)
def test_refused_at_once(open_client: Any, url: str, options: Any) -> None:
    """Keys that no header holds, addresses of no server and timeouts of no time are not tried, and no key is shown."""
    with pytest.raises(lt.InputError) as caught:
        open_client(url, **options).extract(ROW)
    assert not options.get("api_key") or str(options["api_key"]) not in str(caught.value)


EMPTY = b"\x02" + b"\0" * 7 + b"{}"  # a safetensors file of no arrays


@pytest.mark.parametrize(
    ("status", "body", "cls"),
    [
        (200, b"<html>", lt.BadReplyError),
        (200, b"\xff" * 8 + b"{}", lt.BadReplyError),
        (301, b"", lt.BadReplyError),
        (418, b"short and stout", lt.ProblemError),
        (403, b"[1]", lt.ProblemError),
        (422, b'{"detail": "x", "errors": [3, {"detail": 4, "input": "one"}]}', lt.InvalidRequestError),
        (504, b"{}", lt.DeadlineError),
    ],
)
def test_answers_of_others(open_client: Any, status: int, body: bytes, cls: type[lt.LayertapError]) -> None:
    """What no layertap sends is an error of the tree all the same."""
    behaviour = reply(status, body, content_type="application/x-safetensors")
    with misbehaving(behaviour, behaviour, reply(200, EMPTY, content_type="application/x-safetensors")) as server:
        client = open_client(server.url, retries=lt.RetryPolicy(attempts=0))
        for call in (client.models, lambda: client.extract(ROW)):
            with pytest.raises(cls):
                call()
        assert dict(client.extract(ROW)) == {}

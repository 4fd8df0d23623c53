"""Alive and ready: when, and when not."""

from __future__ import annotations

from threading import Event
from typing import Self

import pytest

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service import nets_http
from tests.service.conftest import Serve
from tests.service.gated_server import post_rows, wait_until
from tests.service.nets_http import Gated
from tests.service.sockets import END, exchanged
from tests.service.support import configured, image, net, picture, problem


def test_alive_and_ready(live: Live) -> None:
    """A server that has loaded what it must is alive and ready; what kinds of failure it is ready without is told."""
    assert live.client.get("/livez").json() == {"status": "alive"}
    assert live.client.get("/readyz").json() == {"status": "ready", "failed": ["code"]}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/models", "/metrics", "/openapi.json", "/models/nothing"])
def test_head(live: Live, path: str) -> None:
    """Whoever only wants to know whether there is something gets the head of it, as load balancers do."""
    whole, head = (exchanged(live, f"{method} {path} HTTP/1.1\r\n".encode() + END) for method in ("GET", "HEAD"))
    assert head.status_code == whole.status_code
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert len(whole.content) > 0
    assert head.content == b""


@pytest.mark.slow
def test_not_ready_while_loading(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until every model of the start is loaded the server is alive, not ready, serves what it has, and says so at once.

    Other requests for a model of the start don't wait for it: behind a proxy another server may answer.
    """
    gate = Event()

    class Slow(Gated):
        def train(self, mode: bool = True) -> Self:  # when it is constructed
            assert gate.wait(60)
            return super().train(mode)

    monkeypatch.setattr(nets_http, "slow", Slow, raising=False)
    specs: tuple[ModelSpec, ...] = (net("slow", "slow", weights="DEFAULT"), net("gated", "Gated", weights="DEFAULT"))
    with serve(configured(*specs, load="startup"), wait=False) as live:
        try:
            wait_until(lambda: live.client.get("/models/gated").json()["state"] == "ready")
            problem(live.client.get("/readyz"), 503, seconds=True)
            assert live.client.get("/models/slow").json()["state"] == "loading"
            assert live.client.get("/livez").status_code == 200
            assert post_rows(live).status_code == 200
            found = problem(post_rows(live, model="slow"), 503, seconds=True)
            assert found["detail"] == "the server has just started, and model slow is loading"
        finally:
            gate.set()
        wait_until(lambda: live.client.get("/readyz").status_code == 200)
        assert post_rows(live, model="slow").status_code == 200


def test_not_ready_without_a_model(serve: Serve) -> None:
    """While a model wanted from the start has failed the server is not ready, and says what kind of failure it is.

    Whoever asks has no key: neither names nor reasons are told. The others serve, and a load that goes well mends it.
    """
    gone = net("gone", "Gated", weights="/secret/gone.safetensors")
    specs = (gone, net("never", "Never"), net("other", "Gated", load="lazy"))
    with serve(configured(*specs, load="startup"), wait=False) as live:
        wait_until(lambda: "loading" not in live.client.get("/readyz").text)
        body = problem(live.client.get("/readyz"), 503, seconds=True)
        assert "2 of the models" in body["detail"]
        assert "weights, code" in body["detail"]
        assert "gone" not in str(body)
        assert live.client.get("/livez").status_code == 200
        assert live.client.post("/extract", json={"inputs": [image(picture())], "layers": ["head"]}).status_code == 200


def test_not_ready_while_nothing_answers(serve: Serve) -> None:
    """A server none of whose models can answer is not ready, also later, until one can."""
    with serve(Configuration((net("only", "Gated"),), "only")) as live:
        for way, ready in (("unload", 503), ("load", 200)):
            assert live.client.post(f"/models/only/{way}").status_code == 200
            assert live.client.get("/readyz").status_code == ready


def test_ready_without_what_is_not_wanted_at_first(serve: Serve) -> None:
    """A model that is loaded when it is asked for keeps nobody away when it has failed."""
    with serve(configured(net("lazy", "Never", load="lazy"), load="startup")) as live:
        problem(post_rows(live, model="lazy"), 503)
        assert live.client.get("/readyz").status_code == 200

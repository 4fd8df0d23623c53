"""What meets while a configuration is taken over: the next one, an exchange, an alias whose new model is broken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from torch import nn

from tests.server import Live
from tests.service import nets_http
from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, Versions, entry, make_versions
from tests.service.gated_server import wait_until
from tests.service.nets_http import Gated
from tests.service.support import arrays_of, npy, problem, raw

WAITING = "python:tests.service.nets_http:waiting"
LATE = "python:tests.service.nets_http:wait_for_file"
ROWS = np.ones((1, 4), np.float32)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return make_versions(tmp_path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lets the factory ``nets_http:waiting`` go on."""
    opened = threading.Event()

    def waiting() -> nn.Module:
        assert opened.wait(60)
        return Gated()

    monkeypatch.setattr(nets_http, "waiting", waiting, raising=False)
    yield opened
    opened.set()


def ask(live: Live, model: str | None = None) -> httpx.Response:
    query = {} if model is None else {"model": model}
    return live.client.post("/extract", **raw(npy(ROWS), "application/x-npy", **query, layers="linear"))


def states(live: Live) -> dict[str, str]:
    return {each["name"]: each["state"] for each in live.client.get("/models").json()["models"]}


def test_alias_of_a_model_that_goes(serve: Serve, versions: Versions) -> None:
    """Where an alias stays, for its new model can't be loaded, the model that it means stays too, until it is freed."""
    (versions.folder / "weights" / "broken.safetensors").write_bytes(b"nothing")
    models = [entry("a", "first"), entry("a", "one")]
    with serve(versions.write(*models, aliases={"prod": "one"}), config=versions.file) as live:
        versions.write(entry("a", "first"), entry("broken", "two"), aliases={"prod": "two"})
        assert live.client.post("/models/reload").status_code == 200
        assert ask(live, "prod").json()["model"] == "one"
        versions.write(entry("a", "first"), entry("b", "two"), aliases={"prod": "two"})
        assert live.client.post("/models/reload").status_code == 200
        assert ask(live, "prod").json()["model"] == "two"
        assert states(live) == {"first": "ready", "two": "ready"}


def test_what_failed_is_tried_again(serve: Serve, versions: Versions) -> None:
    """A file that is read again has models that failed loaded again, though nothing in it has changed."""
    broken = versions.folder / "weights" / "broken.safetensors"
    broken.write_bytes(b"nothing")
    with serve(versions.write(entry("a", "one"), aliases={"prod": "one"}), config=versions.file) as live:
        versions.write(entry("a", "one"), entry("broken", "two"), aliases={"prod": "two"})
        assert live.client.post("/models/reload").status_code == 200
        assert states(live) == {"one": "ready", "two": "failed"}
        broken.write_bytes((versions.folder / "weights" / "b.safetensors").read_bytes())
        assert live.client.post("/models/reload").status_code == 200
        assert states(live) == {"one": "ready", "two": "ready"}
        assert ask(live, "prod").json()["model"] == "two"


def test_two_readings(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """While models of one reading load the next one waits, no longer than its deadline; then it is in effect, whole."""
    first = entry("a", "first")
    with serve(versions.write(first, entry("a", "goes")), config=versions.file, deadline_s=2.0) as live:
        versions.write(first, entry("a", "slow", source=WAITING), aliases={"prod": "slow"}, defaults={"model": "slow"})
        assert live.client.post("/models/reload").status_code == 202
        versions.write(first, entry("b", "last"), aliases={"prod": "last"}, defaults={"model": "last"})
        problem(live.client.post("/models/reload"), 504, seconds=True)
        assert states(live) == {"first": "ready", "goes": "ready", "slow": "loading"}
        gate.set()
        wait_until(lambda: "goes" not in states(live))
        assert live.client.post("/models/reload").status_code in (200, 202)
        wait_until(lambda: states(live) == {"first": "ready", "last": "ready"})
        assert live.client.get("/models").json()["aliases"] == {"prod": "last"}
        assert ask(live).json()["model"] == ask(live, "prod").json()["model"] == "last"


def test_exchange_of_a_model_that_goes(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """A model that the file has no more is not exchanged while it still answers: it would come back."""
    models = [entry("a", "first"), entry("a", "goes")]
    with serve(versions.write(*models, allow=ALLOW), config=versions.file, deadline_s=2.0) as live:
        versions.write(models[0], entry("a", "slow", source=WAITING), allow=ALLOW)
        assert live.client.post("/models/reload").status_code == 202
        assert "goes" in states(live)
        refused = problem(live.client.put("/models/goes", json=entry("b", "goes")), 409)
        assert "configuration" in refused["detail"]
        gate.set()
        wait_until(lambda: states(live) == {"first": "ready", "slow": "ready"})


def test_exchange_between_two_readings(serve: Serve, versions: Versions, gate: threading.Event, tmp_path: Path) -> None:
    """A reading that waits for the former one waits for what is exchanged meanwhile too, and then is taken whole."""
    models, opened = [entry("a", "first"), entry("a", "other")], tmp_path / "opened"
    allow = {**ALLOW, "sources": [LATE], "args": ["path"]}
    with (
        serve(versions.write(*models, allow=allow), config=versions.file) as live,
        ThreadPoolExecutor(3) as pool,
        httpx.Client(base_url=live.url, timeout=120) as client,
    ):
        versions.write(*models, entry("a", "slow", source=WAITING), allow=allow)
        former = pool.submit(client.post, "/models/reload")
        wait_until(lambda: states(live).get("slow") == "loading")
        versions.write(entry("b", "first"), entry("b", "other"), allow=allow, aliases={"prod": "other"})
        reading = pool.submit(client.post, "/models/reload")
        late = entry("c", "first", source=LATE, args={"path": str(opened)})
        exchange = pool.submit(client.put, "/models/first", json=late)
        wait_until(lambda: live.client.get("/models/first").json().get("replacement") is not None)
        gate.set()
        assert former.result().status_code == 200
        opened.touch()
        assert exchange.result().status_code == 200
        assert reading.result().status_code == 200
        np.testing.assert_allclose(
            arrays_of(ask(live, "first"))["linear"], versions.answer("b", ROWS), rtol=1e-4, atol=1e-4
        )
        assert ask(live, "prod").json()["model"] == "other"

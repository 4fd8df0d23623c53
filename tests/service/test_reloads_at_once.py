"""What meets while a configuration is taken over: the next one, an exchange, an alias whose new model is broken."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, GATED_BYTES, WAITING, WIDE, WIDE_BYTES, Versions, entry
from tests.service.gated_server import wait_until
from tests.service.support import arrays_of, npy, problem, raw

LATE = "python:tests.service.nets_http:wait_for_file"
ROWS = np.ones((1, 4), np.float32)


def ask(live: Live, model: str | None = None) -> httpx.Response:
    query = {} if model is None else {"model": model}
    return live.client.post("/extract", **raw(npy(ROWS), "application/x-npy", **query, layers="linear"))


def workers(live: Live) -> list[str]:
    return sorted(worker.name for worker in live.engine.manager.list_handles())


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


def test_names_of_a_model_that_fails(serve: Serve, versions: Versions) -> None:
    """The default, aliases and names that become or were aliases mean what they did until the new model is there."""
    for letter in ("broken", "worse"):
        (versions.folder / "weights" / f"{letter}.safetensors").write_bytes(b"nothing")
    before = [entry("a", "one"), entry("a", "other")]
    with serve(versions.write(*before, aliases={"prod": "one"}), config=versions.file) as live:
        for letter in ("broken", "broken", "worse"):
            after = [entry(letter, "two"), entry(letter, "prod")]
            versions.write(*after, aliases={"other": "two"}, defaults={"model": "two"})
            assert live.client.post("/models/reload").json()["default"] == "two"
            assert states(live) == {"one": "ready", "other": "ready", "two": "failed", "prod": "failed"}
            assert live.client.get("/models").json()["default"] == "one"
            for name, model in ((None, "one"), ("prod", "one"), ("other", "other")):
                assert ask(live, name).json()["model"] == model
        versions.write(entry("b", "two"), entry("b", "prod"), aliases={"other": "two"}, defaults={"model": "two"})
        assert live.client.post("/models/reload").status_code == 200
        assert states(live) == {"two": "ready", "prod": "ready"}
        for name, model in ((None, "two"), ("prod", "prod"), ("other", "two")):
            assert ask(live, name).json()["model"] == model


def test_a_default_that_never_was(serve: Serve, versions: Versions) -> None:
    """A default that stays, for it changes nothing, is not said to be another, though its model fails."""
    (versions.folder / "weights" / "broken.safetensors").write_bytes(b"nothing")
    models = [entry("broken", "one", required=False), entry("a", "two")]
    with serve(versions.write(*models), config=versions.file) as live:
        assert live.client.post("/models/reload").json()["default"] is None
        assert live.client.get("/models").json()["default"] == "one"


def test_an_alias_becomes_a_model(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """Until all of the file has loaded an alias means what it did, and the model of that name is kept apart from it."""
    first = entry("a", "first")
    before = [first, entry("b", "one", load="lazy", idle_timeout_s=0.1)]
    with serve(versions.write(*before, aliases={"prod": "one"}), config=versions.file) as live:
        wide = entry("a", "prod", source=WIDE, weights="random:0")
        versions.write(first, wide, entry("a", "slow", source=WAITING))
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(live.client.post, "/models/reload")
            try:
                wait_until(lambda: states(live).get("prod") == "ready")
                assert ask(live, "prod").json()["model"] == "one"
                wait_until(lambda: workers(live) == ["first", "prod", "slow"])  # the lazy one has gone
                assert states(live) == {"first": "ready", "one": "available", "prod": "ready", "slow": "loading"}
                assert live.engine.manager.used_bytes == GATED_BYTES + WIDE_BYTES
                assert ask(live, "prod").json()["model"] == "one"
            finally:
                gate.set()
            assert reply.result().status_code == 200
        assert states(live) == {"first": "ready", "prod": "ready", "slow": "ready"}
        assert ask(live, "prod").json()["model"] == "prod"


def test_an_alias_becomes_a_model_under_load(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """Of requests by a name that was an alias and becomes a model none fails: each is answered by one of the two."""
    first = entry("a", "first")
    with serve(versions.write(first, entry("b", "one"), aliases={"prod": "one"}), config=versions.file) as live:
        replies, stop = list[httpx.Response](), threading.Event()

        def work() -> None:
            while not stop.is_set():
                replies.append(ask(live, "prod"))

        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(work)
            try:
                versions.write(first, entry("c", "prod"), entry("a", "slow", source=WAITING))
                reply = pool.submit(live.client.post, "/models/reload")
                wait_until(lambda: states(live).get("prod") == "ready")
                seen = len(replies)
                wait_until(lambda: len(replies) >= seen + 10)
                gate.set()
                assert reply.result().status_code == 200
                wait_until(lambda: replies[-1].json().get("model") == "prod")
            finally:
                gate.set()
                stop.set()
            running.result()
        assert {each.status_code for each in replies} == {200}
        assert {each.json()["model"] for each in replies} == {"one", "prod"}
        assert len({each.json()["fingerprint"] for each in replies}) == 2


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

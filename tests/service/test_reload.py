"""The configuration file is read anew while the server answers: by an administrator's request, or by SIGHUP."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.exchanged_models import WAITING, Versions, entry, states
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.load_server import process
from tests.service.server_process import fatal_model_spec
from tests.service.support import Json, arrays_of, npy, problem, raw

ROWS = np.ones((1, 4), np.float32)


def reload(live: Live) -> Json:
    reply = live.client.post("/models/reload")
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(client: httpx.Client, model: str | None) -> httpx.Response:
    query = {} if model is None else {"model": model}
    return client.post("/extract", **raw(npy(ROWS), "application/x-npy", layers="linear", **query))


def test_reload(serve: Serve, versions: Versions) -> None:
    """Models come, go and change as the file says, and so do the default and aliases; the reply tells which."""
    models = [entry("a", "stays"), entry("a", "changes"), entry("a", "goes"), entry("a", "lazy", load="lazy")]
    with serve(versions.write(*models, aliases={"old": "goes", "prod": "goes"}), config=versions.file) as live:
        assert ask(live.client, None).json()["model"] == "stays"
        before = {name: ask(live.client, name).json()["fingerprint"] for name in ("stays", "changes")}
        models = [entry("b", "comes"), entry("a", "stays", required=False), entry("b", "changes")]
        models.append(entry("b", "lazy", load="lazy"))
        versions.write(*models, aliases={"prod": "comes"}, defaults={"model": "changes"})
        assert reload(live) == {
            "added": ["comes"],
            "removed": ["goes"],
            "changed": {"stays": ["required"], "changes": ["weights"], "lazy": ["weights"]},
            "aliases": {"old": None, "prod": "comes"},
            "default": "changes",
        }
        assert states(live) == {"comes": "ready", "stays": "ready", "changes": "ready", "lazy": "available"}
        assert ask(live.client, None).json()["model"] == "changes"
        assert ask(live.client, "prod").json()["model"] == "comes"
        after = {name: ask(live.client, name).json()["fingerprint"] for name in ("stays", "changes")}
        assert (after["stays"] == before["stays"], after["changes"] == before["changes"]) == (True, False)
        for name in ("goes", "old"):
            problem(ask(live.client, name), 404)
        np.testing.assert_allclose(
            arrays_of(ask(live.client, "lazy"))["linear"], versions.answer("b", ROWS), rtol=1e-4, atol=1e-4
        )
        assert reload(live) == {"added": [], "removed": [], "changed": {}, "aliases": {}, "default": None}


def test_a_file_with_new_contents(serve: Serve, versions: Versions) -> None:
    """A checkpoint that was written over is read again, although the entry is the same."""
    with serve(versions.write(entry("c", "own")), config=versions.file) as live:
        before = ask(live.client, "own").json()["fingerprint"]
        assert reload(live)["changed"] == {}
        weights = versions.folder / "weights"
        (weights / "b.safetensors").replace(weights / "c.safetensors")
        assert reload(live)["changed"] == {"own": ["weights"]}
        reply = ask(live.client, "own")
        assert reply.json()["fingerprint"] != before
        np.testing.assert_allclose(arrays_of(reply)["linear"], versions.answer("b", ROWS), rtol=1e-4, atol=1e-4)


def test_removed_model_answers_what_it_has(serve: Serve, versions: Versions) -> None:
    """A model that the file has no more answers what it was asked before, and is not found any more."""
    with serve(versions.write(entry("a", "gated"), entry("b", "other")), config=versions.file) as live:
        with ThreadPoolExecutor(1) as pool, hold_model(live):
            waits = pool.submit(post_rows, live, 2)
            wait_until(lambda: live.engine.take_snapshot()["queue_rows"] == 2)
            versions.write(entry("b", "other"))
            assert reload(live)["removed"] == ["gated"]
            problem(post_rows(live), 404)
            assert not waits.done()
        assert waits.result().status_code == 200
        wait_until(lambda: len(live.engine.manager.list_handles()) == 1)


def test_aliases(serve: Serve, versions: Versions) -> None:
    """Every protocol takes an alias, answers say the model's own name, and figures know that alone."""
    with serve(versions.write(entry("a", "own"), aliases={"prod": "own"}), config=versions.file) as live:
        client = live.client
        assert client.get("/models").json()["aliases"] == {"prod": "own"}
        assert client.get("/models/prod").json()["name"] == "own"
        assert client.get("/models/prod/layers").json()["model"] == "own"
        assert client.get("/v1/models/prod").json()["fingerprint"]
        tensors = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]
        inferred = client.post("/v2/models/prod/infer", json={"inputs": tensors, "outputs": [{"name": "linear"}]})
        assert inferred.json()["model_name"] == "own"
        assert client.post("/models/prod/unload").json() | {"state": "available"} == client.get("/models/own").json()
        assert client.post("/models/prod/load").json()["state"] == "ready"
        assert ask(client, "prod").json()["fingerprint"] == ask(client, "own").json()["fingerprint"]
        assert 'model="prod"' not in client.get("/metrics").text
        assert "did you mean 'prod'" in problem(ask(client, "pord"), 404)["errors"][0]["hint"]


BROKEN = {
    "models: [": "line 1",
    "models:\n- {name: a, source: python:m:f, wieghts: x}": "line 2: models.0.wieghts",
    "models:\n- {name: a, source: torchvision:resnet18, weights: gone.safetensors}": "line 2: models.0.weights",
}


def test_broken_file(serve: Serve, versions: Versions) -> None:
    """No file, or one that makes no sense, changes nothing: its places are told, without values and paths."""
    configuration = versions.write(entry("a", "own"))
    with serve(configuration) as live:
        assert "no configuration file" in problem(live.client.post("/models/reload"), 409)["detail"]
    with serve(configuration, config=versions.file) as live:
        fingerprint = ask(live.client, "own").json()["fingerprint"]
        for text, place in BROKEN.items():
            versions.file.write_text(text)
            found = problem(live.client.post("/models/reload"), 422)
            assert any(each["detail"].startswith(place) for each in found["errors"]), text
            assert "log" in found["detail"]
        assert ask(live.client, "own").json()["fingerprint"] == fingerprint


def test_a_change_that_fails(serve: Serve, versions: Versions) -> None:
    """A model whose new entry can't be loaded keeps its version, the default and an alias of one that failed stay.

    What the file says is tried again when it is read again.
    """
    models = [entry("a", "own"), entry("a", "other")]
    broken = versions.folder / "weights" / "broken.safetensors"
    broken.write_bytes(b"nothing")
    with serve(versions.write(*models, aliases={"prod": "other"}), config=versions.file) as live:
        fingerprint = ask(live.client, "own").json()["fingerprint"]
        models = [entry("broken", "own"), entry("a", "other"), entry("broken", "new")]
        versions.write(*models, aliases={"prod": "new"}, defaults={"model": "new"})
        assert (reload(live)["default"], live.client.get("/models").json()["default"]) == ("new", "own")
        assert states(live) == {"own": "ready", "other": "ready", "new": "failed"}
        assert ask(live.client, "own").json()["fingerprint"] == fingerprint
        assert ask(live.client, "prod").json()["model"] == "other"
        assert ask(live.client, None).json()["model"] == "own"
        assert live.client.get("/readyz").status_code == 200
        broken.write_bytes((versions.folder / "weights" / "b.safetensors").read_bytes())
        models[2]["weights"] = "weights/c.safetensors"
        versions.write(*models, aliases={"prod": "new"}, defaults={"model": "new"})
        assert reload(live)["changed"] == {"own": ["weights"], "new": ["weights"]}
        assert ask(live.client, "own").json()["fingerprint"] != fingerprint
        assert ask(live.client, "prod").json()["model"] == ask(live.client, None).json()["model"] == "new"


def test_two_readings(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """While models of one reading load the next one waits, no longer than its deadline; then it is in effect, whole."""
    first = entry("a", "first")
    with serve(versions.write(first, entry("a", "goes")), config=versions.file) as live:
        versions.write(first, entry("a", "slow", source=WAITING), aliases={"prod": "slow"}, defaults={"model": "slow"})
        assert live.client.post("/models/reload", headers={"x-request-timeout": "0.5"}).status_code == 202
        versions.write(first, entry("b", "last"), aliases={"prod": "last"}, defaults={"model": "last"})
        problem(live.client.post("/models/reload", headers={"x-request-timeout": "0.2"}), 504, seconds=True)
        assert states(live) == {"first": "ready", "goes": "ready", "slow": "loading"}
        gate.set()
        wait_until(lambda: "goes" not in states(live))
        assert live.client.post("/models/reload").status_code in (200, 202)
        wait_until(lambda: states(live) == {"first": "ready", "last": "ready"})
        assert live.client.get("/models").json()["aliases"] == {"prod": "last"}
        assert ask(live.client, None).json()["model"] == ask(live.client, "prod").json()["model"] == "last"


@pytest.mark.slow
def test_hangup(tmp_path: Path) -> None:
    """SIGHUP has the file read: the log has what changes, by names; of a broken file what is wrong, and all goes on."""
    spec = fatal_model_spec("Unhurried")
    with process([spec], tmp_path) as server:
        file = tmp_path / "models.json"

        def hang_up(message: str) -> Json:
            before = len(server.logged())
            server.running.send_signal(signal.SIGHUP)
            wait_until(lambda: any(each["message"] == message for each in server.logged()[before:]))
            return next(each for each in server.logged()[before:] if each["message"] == message)

        entries = [asdict(spec), asdict(spec) | {"name": "more"}]
        file.write_text(json.dumps({"models": entries, "aliases": {"prod": "more"}}))
        logged = hang_up("the configuration is read anew")
        assert (logged["added"], logged["removed"], logged["aliases"]) == (["more"], [], {"prod": "more"})
        wait_until(lambda: httpx.get(f"{server.url}/models/prod").status_code == 200)
        file.write_text("{")
        assert "models.json" in hang_up("the configuration is not read anew")["reason"]
        assert httpx.get(f"{server.url}/models/prod").json()["state"] == "ready"
        assert server.end() == 0

"""A model gets another version while it answers: no request fails, and each is answered by one version."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import save_file

from tests.marks import slow
from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, WAITING, Versions, entry, fingerprint, make_state, put
from tests.service.gated_server import wait_until
from tests.service.support import Array, arrays_of, npy, problem, raw

CLIENTS = 4
EXCHANGES = "bca"
ADMIN, USER = {"x-api-key": "admin"}, {"x-api-key": "user"}


def ask(client: httpx.Client, rows: Array, model: str = "gated", **query: Any) -> httpx.Response:
    return client.post("/extract", **raw(npy(rows), "application/x-npy", layers="linear", model=model, **query))


@pytest.mark.parametrize("workers", [0, slow(2)])
def test_exchanged_under_load(serve: Serve, versions: Versions, workers: int) -> None:
    """Of requests that come all the time none fails, and each answer is by its fingerprint just one version's own."""
    configuration = versions.write(entry("a"), allow=ALLOW)
    with serve(configuration, config=versions.file, workers=workers) as live:
        letters = {fingerprint(live): "a"}
        stop, replies = threading.Event(), list[tuple[Array, httpx.Response]]()

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            while not stop.is_set():
                # Few different rows, so that all versions answer the same ones.
                rows = np.full((int(random.integers(1, 4)), 4), random.integers(1, 5), np.float32)
                query = {"probe": "true"} if random.random() < 0.2 else {}
                replies.append((rows, ask(live.client, rows, **query)))

        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(work, seed) for seed in range(CLIENTS)]
            try:
                for letter in EXCHANGES:
                    reply = put(live, letter)
                    assert reply.status_code == 200, reply.text
                    letters[fingerprint(live)] = letter
                    goal = len(replies) + 3 * CLIENTS
                    wait_until(lambda goal=goal: len(replies) >= goal)  # type: ignore[misc]
            finally:
                stop.set()
            for each in running:
                each.result()
        assert {reply.status_code for _, reply in replies} == {200}
        assert sorted(letters.values()) == ["a", "b", "c"]
        answered = set()
        for rows, reply in replies:
            letter = letters[reply.headers["x-layertap-fingerprint"]]
            np.testing.assert_allclose(arrays_of(reply)["linear"], versions.answer(letter, rows), rtol=1e-4, atol=1e-4)
            answered.add(letter)
        assert answered == {"a", "b", "c"}
        wait_until(lambda: len(live.engine.manager.list_handles()) == 1)


def test_a_version_that_fails(serve: Serve, versions: Versions) -> None:
    """What can't be loaded is refused with the reason, and the former version goes on; the list has the reason too."""
    (versions.folder / "weights" / "broken.safetensors").write_bytes(b"nothing")
    with serve(versions.write(entry("a"), allow=ALLOW), config=versions.file) as live:
        first = fingerprint(live)
        assert "could not be loaded" in problem(put(live, "broken"), 422)["detail"]
        shown = live.client.get("/models/gated").json()
        assert (shown["state"], shown["replacement"]["state"]) == ("ready", "failed")
        assert shown["replacement"]["reason"]
        assert str(versions.folder) not in str(shown)
        assert fingerprint(live) == first
        assert live.client.get("/readyz").status_code == 200
        save_file(make_state("c"), versions.folder / "weights" / "a.safetensors")
        assert put(live, "a").json()["state"] == "ready"  # the same entry reads its file again
        assert fingerprint(live) != first
        assert "replacement" not in live.client.get("/models/gated").json()


def test_a_version_that_takes_long(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """Where loading takes longer than a request may, 202 says so, and the version answers once it is there.

    Meanwhile the former one answers, another exchange is refused, and other models load and are exchanged.
    """
    configuration = versions.write(
        entry("a"), entry("a", "other"), entry("a", "lazy", load="lazy"), allow={**ALLOW, "sources": [WAITING]}
    )
    with serve(configuration, config=versions.file, deadline_s=0.5) as live:
        first = fingerprint(live)
        reply = put(live, "b", source=WAITING)
        assert reply.status_code == 202
        assert reply.json()["replacement"] == {"state": "loading"}
        assert "is being exchanged" in problem(put(live, "c"), 409)["detail"]
        assert fingerprint(live) == first
        assert live.client.put("/models/other", json=entry("b", "other")).status_code in (200, 202)
        wait_until(lambda: "replacement" not in live.client.get("/models/other").json())
        wait_until(lambda: ask(live.client, np.ones((1, 4), np.float32), model="lazy").status_code == 200)
        assert live.client.get("/readyz").status_code == 200
        gate.set()
        wait_until(lambda: "replacement" not in live.client.get("/models/gated").json())
        assert fingerprint(live) != first


def test_keys(serve: Serve, versions: Versions) -> None:
    """Only administrators exchange models, and have the file read."""
    keys = {"api_keys": ("user",), "admin_keys": ("admin",)}
    with serve(versions.write(entry("a"), allow=ALLOW), config=versions.file, **keys) as live:
        problem(put(live, "b"), 401)
        problem(put(live, "b", headers=USER), 403)
        problem(live.client.post("/models/reload", headers=USER), 403)
        assert put(live, "b", headers=ADMIN).status_code == 200
        assert live.client.post("/models/reload", headers=ADMIN).status_code == 200


BAD: dict[str, tuple[Any, int, str]] = {
    "no object": ([1], 400, "no JSON object"),
    "another name": (entry("b", "other"), 422, "by the name in the path"),
    "a field that there is not": (entry("b", wieghts="b"), 422, "the nearest is 'weights'"),
}


def test_bad_entries(serve: Serve, versions: Versions) -> None:
    """An entry that makes no sense is refused as in the file, with the place."""
    with serve(versions.write(entry("a"), allow=ALLOW), config=versions.file) as live:
        for what, (body, status, words) in BAD.items():
            assert words in str(problem(live.client.put("/models/gated", json=body), status)), what
        problem(live.client.put("/models/gated", content=b"{"), 400)
        problem(live.client.put("/models/nothing", json=entry("b", "nothing")), 404)

"""A model's next version has room beside it within the budget, or is refused; what loads at one moment counts too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.exchanged_models import (
    ALLOW,
    GATED_BYTES,
    WAITING,
    WIDE,
    WIDE_BYTES,
    Versions,
    entry,
    fingerprint,
    put,
)
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.support import Json, problem

ALLOWED = {**ALLOW, "weights": ["weights/", "random:0"], "sources": [WAITING, WIDE]}


def show(live: Live, name: str = "gated") -> Json:
    body: Json = live.client.get(f"/models/{name}").json()
    return body


def unload(live: Live, name: str = "gated") -> None:
    assert live.client.post(f"/models/{name}/unload").json()["state"] == "available"


def states(live: Live) -> dict[str, str]:
    return {each["name"]: each["state"] for each in live.client.get("/models").json()["models"]}


def count_workers(live: Live) -> int:
    return len(live.engine.manager.list_handles())


def wide(name: str = "gated", **fields: Any) -> Json:
    return entry(name=name, **{"source": WIDE, "weights": "random:0", **fields})


def test_no_room(serve: Serve, versions: Versions) -> None:
    """A version without room beside the model is refused, and all stays as it was; once that is unloaded it comes."""
    budget = 2 * GATED_BYTES - 1
    configuration = versions.write(entry("a"), allow=ALLOW)
    with serve(configuration, config=versions.file, model_memory_bytes=budget) as live:
        first = fingerprint(live)
        refused = problem(put(live, "b"), 503, seconds=True)
        assert f"models in use have {GATED_BYTES} of {budget} bytes" in refused["detail"]
        assert "POST /models/gated/unload" in refused["errors"][0]["hint"]
        assert show(live)["replacement"] == {"state": "failed", "reason": refused["detail"]}
        assert fingerprint(live) == first
        unload(live)
        assert put(live, "b").status_code == 200
        assert fingerprint(live) != first
        assert "replacement" not in show(live)


def test_lazy_models_make_room(serve: Serve, versions: Versions) -> None:
    """For a version lazy models go that nobody uses, and no other."""
    configuration = versions.write(entry("a"), entry("a", "spare", load="lazy"), allow=ALLOW)
    with serve(configuration, config=versions.file, model_memory_bytes=2 * GATED_BYTES) as live:
        assert post_rows(live, model="spare").status_code == 200
        with hold_model(live, "spare"):
            problem(put(live, "b"), 503, seconds=True)
            assert states(live) == {"gated": "ready", "spare": "ready"}
        assert put(live, "b").status_code == 200
        assert states(live) == {"gated": "ready", "spare": "available"}


def test_nobody_goes_in_vain(serve: Serve, versions: Versions) -> None:
    """Where even the lazy models that nobody uses would not make room, they stay."""
    configuration = versions.write(wide(), entry("a", "spare", load="lazy"), allow=ALLOWED)
    with serve(configuration, config=versions.file, model_memory_bytes=2 * WIDE_BYTES - 1) as live:
        assert post_rows(live, model="spare").status_code == 200
        problem(put(live, "a", source=WIDE, weights="random:0"), 503, seconds=True)
        assert states(live) == {"gated": "ready", "spare": "ready"}


def test_a_lazy_model_waits_for_its_version(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """A lazy model that nobody uses stays while its next version loads, whoever wants room."""
    models = [entry("a", load="lazy"), entry("a", "other", load="lazy")]
    configuration = versions.write(*models, allow=ALLOWED)
    budget = 2 * GATED_BYTES
    with (
        serve(configuration, config=versions.file, model_memory_bytes=budget) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        assert post_rows(live, model="other").status_code == 200
        unload(live, "other")
        first = fingerprint(live)
        reply = pool.submit(put, live, "b", source=WAITING, load="lazy")
        try:
            wait_until(lambda: show(live).get("replacement") == {"state": "loading"})
            problem(post_rows(live, model="other"), 503, seconds=True)
            assert states(live) == {"gated": "ready", "other": "available"}
            assert fingerprint(live) == first
        finally:
            gate.set()
        assert reply.result().status_code == 200


def test_versions_at_once(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """Versions of several models that load at one moment count together, and former ones until they have finished."""
    configuration = versions.write(entry("a"), entry("a", "other"), allow=ALLOWED)
    budget = 3 * GATED_BYTES
    with (
        serve(configuration, config=versions.file, model_memory_bytes=budget) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        reply = pool.submit(put, live, "b", source=WAITING)
        try:
            wait_until(lambda: show(live).get("replacement") == {"state": "loading"})
            problem(put(live, "b", "other"), 503, seconds=True)
            with hold_model(live):
                gate.set()
                assert reply.result().status_code == 200
                problem(put(live, "b", "other"), 503, seconds=True)
        finally:
            gate.set()
        wait_until(lambda: count_workers(live) == 2)
        assert put(live, "b", "other").status_code == 200


def test_lazy_models_at_once(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """Two models that begin to be loaded at one moment do not both see room that there is for one."""
    models = [entry("a", "slow", source=WAITING, load="lazy"), entry("a", load="lazy")]
    with serve(versions.write(*models), model_memory_bytes=2 * GATED_BYTES - 1) as live, ThreadPoolExecutor(1) as pool:
        gate.set()
        for name in ("slow", "gated"):  # what they take is known from now on
            assert post_rows(live, model=name).status_code == 200
            unload(live, name)
        gate.clear()
        slow = pool.submit(post_rows, live, model="slow")
        try:
            wait_until(lambda: states(live)["slow"] == "loading")
            problem(post_rows(live), 503, seconds=True)
        finally:
            gate.set()
        assert slow.result().status_code == 200
        assert post_rows(live).status_code == 200
        assert states(live) == {"slow": "available", "gated": "ready"}


def test_larger_than_thought(serve: Serve, versions: Versions) -> None:
    """A version that turns out to take more than the former one answers, and lazy models that nobody uses go."""
    configuration = versions.write(entry("a"), entry("a", "spare", load="lazy"), allow=ALLOWED)
    with serve(configuration, config=versions.file, model_memory_bytes=WIDE_BYTES + GATED_BYTES - 1) as live:
        assert post_rows(live, model="spare").status_code == 200
        assert put(live, "a", source=WIDE, weights="random:0").status_code == 200
        wait_until(lambda: states(live) == {"gated": "ready", "spare": "available"})
        assert show(live)["memory_bytes"] == WIDE_BYTES


def test_larger_than_there_is_room(serve: Serve, versions: Versions, caplog: pytest.LogCaptureFixture) -> None:
    """Where no other may go for it a larger version stays, the log has it, and nothing else is loaded meanwhile.

    A version of another architecture than the one that was unloaded is thought to take nothing, so that there is a
    way back.
    """
    models = [entry("a"), entry("a", "start"), entry("a", "spare", load="lazy")]
    configuration = versions.write(*models, allow=ALLOWED)
    with serve(configuration, config=versions.file, model_memory_bytes=WIDE_BYTES + GATED_BYTES - 1) as live:
        assert put(live, "a", source=WIDE, weights="random:0").status_code == 200
        wait_until(lambda: any("take more than all may" in message for message in caplog.messages))
        problem(post_rows(live, model="spare"), 503, seconds=True)
        problem(put(live, "b"), 503, seconds=True)
        assert states(live) == {"gated": "ready", "start": "ready", "spare": "available"}
        unload(live)
        assert put(live, "b").status_code == 200
        assert post_rows(live, model="spare").status_code == 200


def test_changes_without_room_for_all(serve: Serve, versions: Versions) -> None:
    """Of models that a file changes those keep their version that have no room; they get it when it is read again."""
    names = ("one", "two")
    models = [entry("a", name) for name in names]
    with serve(versions.write(*models), config=versions.file, model_memory_bytes=3 * GATED_BYTES) as live:
        before = {name: fingerprint(live, name) for name in names}
        versions.write(*(entry("b", name) for name in names))
        for left in (["two"], []):
            assert live.client.post("/models/reload").status_code == 200
            assert [name for name in names if fingerprint(live, name) == before[name]] == left
            failed = [name for name in names if show(live, name).get("replacement", {}).get("state") == "failed"]
            assert failed == left
            wait_until(lambda: count_workers(live) == 2)


def test_a_version_is_no_further_model(serve: Serve, versions: Versions) -> None:
    """As many models as may be loaded get new versions; one more is not loaded as its next version either."""
    configuration = versions.write(entry("a"), entry("a", "more", load="lazy"), allow=ALLOW)
    with serve(configuration, config=versions.file, max_loaded_models=1) as live:
        assert put(live, "b").status_code == 200
        assert "as many as may be" in problem(put(live, "b", "more", load="lazy"), 503, seconds=True)["detail"]

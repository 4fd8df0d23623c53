"""Which models stay in memory: within a budget of bytes, and as long as they are asked for."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from layertap.service.config.configuration import Configuration
from layertap.service.engine.models import model_manager
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.exchanged_models import ALLOW, GATED_BYTES, WAITING, Versions, entry, fingerprint, put, states
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.support import Json, configured, net, problem

LARGE, OVERHEAD_BYTES = 400_000, 200 * 2**20


@pytest.fixture(autouse=True)
def _tidy_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to go goes soon."""
    monkeypatch.setattr(model_manager, "TIDY_INTERVAL_S", 0.05)


def lazy(*names: str, **fields: Any) -> Configuration:
    """Models that are loaded when asked for."""
    return Configuration(tuple(net(name, "Gated", load="lazy", **fields) for name in names), names[0])


def show(live: Live, name: str) -> Json:
    return live.client.get(f"/models/{name}").json()


def ready(live: Live) -> list[str]:
    return [name for name, state in states(live).items() if state == "ready"]


def test_budget(serve: Serve) -> None:
    """No more bytes of models stay than may be: the one that was unused for the longest time goes, and comes again."""
    with serve(lazy("a", "b", "c"), model_memory_bytes=2 * GATED_BYTES + 1) as live:
        for name in ("a", "b", "a", "c"):
            assert post_rows(live, model=name).status_code == 200
            assert show(live, name)["memory_bytes"] == GATED_BYTES
        wait_until(lambda: ready(live) == ["a", "c"])
        assert f'layertap_model_memory_bytes{{model="c"}} {GATED_BYTES:.1f}' in live.client.get("/metrics").text
        for name, left in (("b", ["b", "c"]), ("a", ["a", "b"]), ("a", ["a", "b"]), ("c", ["a", "c"])):
            assert post_rows(live, model=name).status_code == 200
            assert ready(live) == left  # at once: what each takes is known by now


def test_busy_models_stay(serve: Serve) -> None:
    """A model that answers does not go: who wants another one is told when to come again."""
    with serve(lazy("a", "b"), model_memory_bytes=GATED_BYTES + 1) as live:
        assert post_rows(live, model="b").status_code == 200
        assert post_rows(live, model="a").status_code == 200
        wait_until(lambda: ready(live) == ["a"])
        with hold_model(live, "a"):
            found = problem(post_rows(live, model="b"), 503, seconds=True)
            assert f"{GATED_BYTES} bytes" in found["detail"]
            assert ready(live) == ["a"]
        assert post_rows(live, model="b").status_code == 200
        assert ready(live) == ["b"]


def test_larger_than_the_budget(serve: Serve) -> None:
    """A model that alone takes more than all may has failed, and says both figures."""
    with serve(lazy("a"), model_memory_bytes=GATED_BYTES - 1) as live:
        found = problem(post_rows(live, model="a"), 503)
        assert f"it takes {GATED_BYTES} bytes, and all models together may have {GATED_BYTES - 1}" in found["detail"]
        assert states(live) == {"a": "failed"}


def test_larger_than_what_is_free(serve: Serve) -> None:
    """A model that took more memory than is free now is refused before it is loaded again."""
    with serve(lazy("a")) as live:
        assert post_rows(live, model="a").status_code == 200
        assert live.client.post("/models/a/unload").status_code == 200
        live.engine.manager.registry.get_entry("a").memory_bytes = 2**60
        assert f"took {2**60} bytes" in problem(post_rows(live, model="a"), 503, seconds=True)["detail"]
        assert states(live) == {"a": "available"}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_measured(serve: Serve, workers: int) -> None:
    """What a model takes is measured: its weights, and with processes of its own what these have for themselves."""
    size = {"in_features": 4, "out_features": LARGE}
    spec = net("large", "Linear", module="torch.nn", args=size)
    with serve(Configuration((spec,), "large"), workers=workers) as live:
        body, weights = show(live, "large"), 4 * 5 * LARGE
        measured = body["total_memory_bytes"]
        assert body["memory_bytes"] == weights
        assert weights <= measured <= weights + OVERHEAD_BYTES * (workers > 0)


def test_idle_timeout(serve: Serve) -> None:
    """A lazy model that nobody asks goes after a while, and comes again; one of the start only by its own time-out."""
    specs = (
        net("lazy", "Gated", load="lazy"),
        net("patient", "Gated", load="lazy", idle_timeout_s=3600),
        net("own", "Gated", idle_timeout_s=0.1),
        net("start", "Gated"),
    )
    with serve(configured(*specs, load="startup"), model_idle_timeout_s=0.1) as live:
        for name in ("patient", "lazy", "own"):
            assert post_rows(live, model=name).status_code == 200
        wait_until(lambda: states(live)["lazy"] == states(live)["own"] == "available")
        assert [states(live)[name] for name in ("patient", "start", "digits")] == ["ready"] * 3
        assert live.client.get("/readyz").json() == {"status": "ready"}
        assert post_rows(live, model="lazy").status_code == 200


@pytest.mark.parametrize(
    ("setting", "required", "status"), [("required", True, 503), ("all", False, 503), ("any", True, 200)]
)
def test_ready_when(serve: Serve, setting: str, required: bool, status: int) -> None:
    """A setting decides what a model means that failed at the start, required or not; ``/readyz`` tells its kind."""
    specs = (net("good", "Gated"), net("never", "Never", required=required))
    with serve(Configuration(specs, "good"), wait=False, ready_when=setting) as live:
        wait_until(lambda: "are loading" not in live.client.get("/readyz").text)
        reply = live.client.get("/readyz")
        assert reply.status_code == status
        assert "code" in (reply.json()["failed"] if status == 200 else reply.json()["detail"])


def test_no_room_for_a_version(serve: Serve, versions: Versions) -> None:
    """A version without room beside the model is refused, and all stays as it was; once that is unloaded it comes."""
    budget = 2 * GATED_BYTES - 1
    configuration = versions.write(entry("a"), allow=ALLOW)
    with serve(configuration, config=versions.file, model_memory_bytes=budget) as live:
        first = fingerprint(live)
        refused = problem(put(live, "b"), 503, seconds=True)
        assert f"models in use have {GATED_BYTES} of {budget} bytes" in refused["detail"]
        assert "POST /models/gated/unload" in refused["errors"][0]["hint"]
        assert show(live, "gated")["replacement"] == {"state": "failed", "reason": refused["detail"]}
        assert fingerprint(live) == first
        assert live.client.post("/models/gated/unload").json()["state"] == "available"
        assert put(live, "b").status_code == 200
        assert fingerprint(live) != first
        assert "replacement" not in show(live, "gated")


def test_versions_at_once(serve: Serve, versions: Versions, gate: threading.Event) -> None:
    """Versions of several models that load at one moment count together, and former ones until they have finished."""
    configuration = versions.write(entry("a"), entry("a", "other"), allow={**ALLOW, "sources": [WAITING]})
    budget = 3 * GATED_BYTES
    with serve(configuration, config=versions.file, model_memory_bytes=budget) as live, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(put, live, "b", source=WAITING)
        try:
            wait_until(lambda: show(live, "gated").get("replacement") == {"state": "loading"})
            problem(put(live, "b", "other"), 503, seconds=True)
            with hold_model(live):
                gate.set()
                assert reply.result().status_code == 200
                problem(put(live, "b", "other"), 503, seconds=True)
        finally:
            gate.set()
        wait_until(lambda: len(live.engine.manager.list_handles()) == 2)
        assert put(live, "b", "other").status_code == 200


WAYS: dict[str, Callable[[httpx.Client], httpx.Response]] = {
    "unloaded": lambda client: client.post("/models/gated/unload"),
    "exchanged": lambda client: client.put("/models/gated", json=entry("b")),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What refers to itself stays, as it does for hours in a server that is idle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", WAYS)
def test_freed(serve: Serve, versions: Versions, way: str) -> None:
    """Nothing holds the module of a model that answered and is gone."""
    configuration = versions.write(entry("a"), allow=ALLOW)
    with serve(configuration) as live:
        assert post_rows(live).status_code == 200
        module = weakref.ref(live.engine.manager.handles["gated"].model.module)
        assert module() is not None
        assert WAYS[way](live.client).status_code == 200
        wait_until(lambda: module() is None)

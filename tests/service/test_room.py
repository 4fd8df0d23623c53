"""Which models stay in memory: within a budget of bytes, and as long as they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.exchanged_models import GATED_BYTES
from tests.service.gated_server import hold_model, post_rows, wait_until
from tests.service.support import Json, configured, net, problem

LARGE, OVERHEAD_BYTES = 400_000, 200 * 2**20


def lazy(*names: str, **fields: Any) -> Configuration:
    """Models that are loaded when asked for."""
    return Configuration(tuple(net(name, "Gated", load="lazy", **fields) for name in names), names[0])


def show(live: Live, name: str) -> Json:
    body: Json = live.client.get(f"/models/{name}").json()
    return body


def states(live: Live) -> dict[str, str]:
    return {each["name"]: each["state"] for each in live.client.get("/models").json()["models"]}


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


def test_models_of_the_start_stay(serve: Serve) -> None:
    """Models that are loaded at the start count, and do not make room."""
    specs = (net("a", "Gated"), net("b", "Gated", load="lazy"), net("c", "Gated", load="lazy"))
    with serve(Configuration(specs, "a"), model_memory_bytes=2 * GATED_BYTES + 1) as live:
        for name in ("b", "c", "b"):
            assert post_rows(live, model=name).status_code == 200
            wait_until(lambda name=name: ready(live) == ["a", name])  # type: ignore[misc]


def test_larger_than_the_budget(serve: Serve) -> None:
    """A model that alone takes more than all may has failed, and says both figures."""
    with serve(lazy("a"), model_memory_bytes=GATED_BYTES - 1) as live:
        found = problem(post_rows(live, model="a"), 503, seconds=True)
        assert f"it takes {GATED_BYTES} bytes, and all models together may have {GATED_BYTES - 1}" in found["detail"]
        assert states(live) == {"a": "failed"}


@pytest.mark.parametrize("workers", [0, 2])
def test_measured(serve: Serve, workers: int) -> None:
    """What a model takes is measured: its weights, and with processes of its own what these have for themselves."""
    spec = ModelSpec(
        "large",
        "python:torch.nn:Linear",
        args={"in_features": 4, "out_features": LARGE},
        weights="random:0",
        device="cpu",
        inputs=(InputSpec("x", (4,)),),
    )
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
    with serve(configured(*specs), model_idle_timeout_s=0.1) as live:
        for _ in range(2):
            for name in ("patient", "lazy", "own"):
                assert post_rows(live, model=name).status_code == 200
            wait_until(lambda: states(live)["lazy"] == states(live)["own"] == "available")
            assert [states(live)[name] for name in ("patient", "start", "digits")] == ["ready"] * 3
            assert live.client.get("/readyz").json() == {"status": "ready"}


def test_busy_models_have_no_timeout(serve: Serve) -> None:
    """As long as a request runs its model is not idle, however long that takes."""
    with serve(lazy("a", "b"), model_idle_timeout_s=0.1, cpu_threads=2) as live:
        assert post_rows(live, model="a").status_code == 200
        with hold_model(live, "a"):
            assert post_rows(live, model="b").status_code == 200
            wait_until(lambda: states(live)["b"] == "available")
            assert states(live)["a"] == "ready"
        wait_until(lambda: states(live)["a"] == "available")


READY_WHEN = {
    # setting: with one that failed and is required; one that is not; all that failed
    "required": (503, 200, 503),
    "all": (503, 503, 503),
    "any": (200, 200, 503),
}


def _wait_until_settled(live: Live) -> None:
    wait_until(lambda: "are loading" not in live.client.get("/readyz").text)


@pytest.mark.parametrize("setting", READY_WHEN)
def test_ready_when(serve: Serve, setting: str) -> None:
    """A setting decides what models mean that failed at the start; ``/readyz`` tells of each kind, also when ready."""
    good, never = net("good", "Gated"), net("never", "Never")
    optional = net("never", "Never", required=False)
    cases = ((good, never), (good, optional), (never,))
    for specs, status in zip(cases, READY_WHEN[setting], strict=True):
        with serve(Configuration(specs, specs[0].name), wait=False, ready_when=setting) as live:
            _wait_until_settled(live)
            reply = live.client.get("/readyz")
            assert reply.status_code == status
            assert "code" in (reply.json()["failed"] if status == 200 else reply.json()["detail"])


def test_loading_beside_a_slow_host(serve: Serve, tmp_path: Path) -> None:
    """A model whose factory waits, in a process of its own, keeps no other from being loaded there, and answering."""
    gate = tmp_path / "gate"
    slow = net("slow", "wait_for_file", args={"path": str(gate)})
    with serve(configured(slow, net("quick", "Gated", load="lazy")), wait=False, workers=1) as live:
        try:
            wait_until(lambda: states(live)["digits"] == "ready")
            assert post_rows(live, model="quick").status_code == 200
            assert states(live)["slow"] == "loading"
            assert live.client.post("/models/quick/unload").status_code == 200
            assert post_rows(live, model="quick").status_code == 200
        finally:
            gate.touch()
        wait_until(lambda: live.client.get("/readyz").status_code == 200)
        assert post_rows(live, model="slow").status_code == 200

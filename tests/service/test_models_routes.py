"""What models and layers there are, and how models come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx
import pytest
from torch import nn

from models.digits import WEIGHTS
from models.weights import digest
from tests.server import Live, serving
from tests.service import nets_http
from tests.service.conftest import Serve
from tests.service.nets_http import Gated
from tests.service.support import (
    Json,
    ask,
    blocked,
    configured,
    gated,
    image,
    net,
    picture,
    problem,
    until,
)


@dataclass
class Maker:
    """A factory that a test can hold up, and that remembers what it made."""

    gate: Event = field(default_factory=Event)
    entered: Event = field(default_factory=Event)
    made: list[nn.Module] = field(default_factory=list)

    def __call__(self) -> nn.Module:
        self.entered.set()
        assert self.gate.wait(60)
        self.made.append(Gated())
        return self.made[-1]


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """The factory ``nets_http:made``, open until a test closes it."""
    made = Maker()
    made.gate.set()
    monkeypatch.setattr(nets_http, "made", made, raising=False)
    yield made
    made.gate.set()


def state(live: Live, name: str) -> str:
    return str(live.client.get(f"/models/{name}").json()["state"])


def test_embedded() -> None:
    """Without a configuration there are ``digits``, ready, and torchvision's classifiers, to be had when asked for."""
    with serving() as live:
        body = live.client.get("/models").json()
        states = {model["name"]: model["state"] for model in body["models"]}
        assert body["default"] == "digits"
        assert states.pop("digits") == "ready"
        assert {"resnet50", "vit_b_16", "convnext_tiny"} <= set(states)
        assert set(states.values()) == {"available"}


def test_shown(live: Live) -> None:
    """A model says what it is, what it takes, where it runs and that no hook is on it."""
    body = live.client.get("/models/digits").json()
    assert body == {
        "name": "digits",
        "state": "ready",
        "source": "python:models.digits:digits",
        "dtype": "float32",
        "device": body["device"],
        "inputs": [{"name": "image", "shape": [3, 32, 32], "dtype": "float32"}],
        "preprocess": {
            "resize": 32,
            "crop": 32,
            "mean": [0.5] * 3,
            "std": [0.5] * 3,
            "interpolation": "bilinear",
        },
        "weights": WEIGHTS.name,
        "weights_digest": body["weights_digest"],
        "embedding": "pool",
        "layers": 22,
        "hooks": 0,
    }
    model = live.engine.fleet.registry.entry("digits").model
    assert model is not None
    assert body["weights_digest"] == digest(model.module)
    assert live.client.get("/models").json()["models"][0] == body


def test_failed(live: Live) -> None:
    """A model that can't be had is listed with the reason, which shows no path; the others serve."""
    body = live.client.get("/models/never").json()
    assert body["state"] == "failed"
    assert "RuntimeError" in body["reason"]
    assert "secret" not in body["reason"]
    assert body["hooks"] == 0
    found = problem(ask(live, model="never"), 503, seconds=True)
    assert body["reason"] in found["detail"]
    problem(live.client.get("/models/never/layers"), 503, seconds=True)
    problem(live.client.post("/models/never/load"), 503, seconds=True)
    assert live.client.get("/readyz").status_code == 200
    assert ask(live).status_code == 200


@pytest.mark.parametrize(
    "path", ["/models/digit", "/models/digit/layers", "/models/digit/load", "/models/digit/unload"]
)
def test_unknown(live: Live, path: str) -> None:
    """A model that is not configured is 404 on every route, with near names."""
    method = "POST" if path.endswith("load") else "GET"
    assert "'digits'" in problem(live.client.request(method, path), 404)["errors"][0]["hint"]


def layers(live: Live, model: str = "digits", **query: Any) -> list[Json]:
    found: list[Json] = live.client.get(f"/models/{model}/layers", params=query).json()["layers"]
    return found


def test_layers(live: Live) -> None:
    """Layers come in execution order with class, calls, shapes, parameters, layout and share of the cost."""
    found = layers(live)
    names = [layer["name"] for layer in found]
    assert names[:4] == [".", "block1", "block1.0", "block1.1"]
    assert names[-3:] == ["pool", "flatten", "head"]
    by_name = dict(zip(names, found, strict=True))
    relu = by_name["block2.relu"]
    assert (relu["type"], relu["leaf"], relu["calls"], relu["parameters"]) == ("ReLU", True, 2, 0)
    assert [leaf["call"] for leaf in relu["outputs"]] == [0, 1]
    assert relu["layout"] == "NCHW"
    assert "inplace" in relu["hazards"]
    head = by_name["head"]
    assert head["outputs"] == [{"call": 0, "path": "", "shape": [1, 10], "dtype": "float32", "layout": "NC"}]
    assert head["inputs"] == [{"call": 0, "path": "", "shape": [1, 64], "dtype": "float32", "layout": "NC"}]
    assert head["parameters"] == 650
    leaves = [layer["cost"] for layer in found if layer["leaf"] and layer["calls"] == 1]
    assert leaves == sorted(leaves)
    assert all(0 <= cost <= 1 for cost in leaves)


def test_layers_of_structured_outputs(live: Live) -> None:
    """Outputs that are structured are listed path by path, as a selector names them."""
    nested = next(layer for layer in layers(live, "structured") if layer["name"] == "nested")
    paths = [leaf["path"] for leaf in nested["outputs"]]
    assert {"[pair][left]", "[card][more][0]", "[list][0][0]", "[index]"} <= set(paths)
    request = {"model": "structured", "layers": [f"nested{path}" for path in paths]}
    assert list(live.client.post("/extract?dry_run=true", json=request).json()["features"]) == request["layers"]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"match": "block?"}, ["block1", "block2", "block3"]),
        ({"match": "*.relu"}, ["block2.relu", "block3.relu"]),
        ({"type": "Linear"}, ["head"]),
        ({"type": "Residual", "leaf": "false"}, ["block2", "block3"]),
        ({"match": "block1*", "leaf": "true"}, ["block1.0", "block1.1", "block1.2"]),
        ({"match": "."}, ["."]),
        ({"match": "nothing"}, []),
        ({"match": ".*[0-9]("}, []),
    ],
)
def test_filters(live: Live, query: Json, names: list[str]) -> None:
    """Layers can be chosen by glob, by class, and by whether they have parts."""
    assert [layer["name"] for layer in layers(live, **query)] == names


def test_lazy(serve: Serve, maker: Maker) -> None:
    """A lazy model is loaded by the first request for it, once, however many come at once."""
    with serve(configured(net("lazy", "made", load="lazy"))) as live:
        assert state(live, "lazy") == "available"
        maker.gate.clear()
        with ThreadPoolExecutor(5) as pool:
            replies = [pool.submit(ask, live, model="lazy") for _ in range(4)]
            replies.append(pool.submit(live.client.get, "/models/lazy/layers"))
            assert maker.entered.wait(30)
            assert state(live, "lazy") == "loading"
            assert live.client.get("/readyz").status_code == 200
            found = problem(ask(live, model="lazy", **{"x-request-timeout": "0.1"}), 503, seconds=True)
            assert "loading" in found["detail"]
            maker.gate.set()
            assert [reply.result().status_code for reply in replies] == [200] * 5
        assert len(maker.made) == 1
        assert state(live, "lazy") == "ready"


def test_load_and_unload(serve: Serve, maker: Maker) -> None:
    """A model can be loaded before it is asked for, and unloaded; the next request loads it again."""
    with serve(configured(net("lazy", "made", load="lazy"))) as live:
        for number in (1, 2):
            assert live.client.post("/models/lazy/load").json()["state"] == "ready"
            assert live.client.post("/models/lazy/load").json()["state"] == "ready"
            assert len(maker.made) == number
            assert ask(live, model="lazy").status_code == 200
            assert live.client.post("/models/lazy/unload").json()["state"] == "available"
            assert live.client.post("/models/lazy/unload").json()["state"] == "available"
        assert ask(live, model="lazy").status_code == 200
        assert len(maker.made) == 3


def test_load_after_failure(serve: Serve, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that failed stays failed until an administrator asks for it again."""
    factories: list[Callable[[], nn.Module]] = [nets_http.Never, maker]
    monkeypatch.setattr(nets_http, "moody", lambda: factories.pop(0)(), raising=False)
    with serve(configured(net("moody", "moody"))) as live:
        for _ in range(2):
            problem(ask(live, model="moody"), 503, seconds=True)
        assert state(live, "moody") == "failed"
        body = live.client.post("/models/moody/load").json()
        assert (body["state"], "reason" in body) == ("ready", False)
        assert ask(live, model="moody").status_code == 200


def test_unload_finishes_the_queue(serve: Serve, maker: Maker) -> None:
    """Unloading lets the model finish what was asked of it; whoever comes meanwhile is told when to come again."""
    with serve(configured(net("gated", "made"))) as live, ThreadPoolExecutor(2) as pool:
        with blocked(live) as module:
            waits = pool.submit(ask, live, 2)
            until(lambda: live.engine.fleet._workers["gated"].rows == 3)
            unloading = pool.submit(live.client.post, "/models/gated/unload")
            until(lambda: ask(live, 3, **{"x-request-timeout": "0.1"}).status_code == 503)
            problem(ask(live, 3), 503, seconds=True)
            assert live.client.get("/livez").status_code == 200
        assert waits.result().status_code == 200
        assert unloading.result().json()["state"] == "available"
        assert module.forwards == [2]
        assert ask(live, 4).status_code == 200
        assert gated(live) is not module
        assert state(live, "gated") == "ready"
        assert len(maker.made) == 2


def test_room(serve: Serve) -> None:
    """No more models are loaded than may be: the lazy one that was not used for the longest time makes room."""
    names = ("a", "b", "c")
    specs = [net(name, "Gated", load="lazy") for name in names]
    with serve(configured(*specs), max_loaded_models=3) as live:

        def states() -> str:
            return "".join(name for name in names if state(live, name) == "ready")

        for name, expected in (
            ("a", "a"),
            ("b", "ab"),
            ("a", "ab"),
            ("c", "ac"),
            ("b", "bc"),
            ("c", "bc"),
            ("a", "ac"),
        ):
            assert ask(live, model=name).status_code == 200
            assert states() == expected
        assert state(live, "digits") == "ready"


def test_no_room(serve: Serve) -> None:
    """A model that is busy does not make room: the request for another is told when to come again."""
    specs = [net(name, "Gated", load="lazy") for name in ("a", "b")]
    with serve(configured(*specs), max_loaded_models=2) as live:
        assert ask(live, model="a").status_code == 200
        with blocked(live, "a"):
            problem(ask(live, model="b"), 503, seconds=True)
        assert ask(live, model="b").status_code == 200


def test_failed_models_take_no_room(serve: Serve) -> None:
    """Models that failed take nobody's place."""
    specs = [net(f"never{number}", "Never") for number in range(3)]
    with serve(configured(*specs, net("a", "Gated", load="lazy")), max_loaded_models=2) as live:
        assert ask(live, model="a").status_code == 200


def test_more_at_startup_than_room(serve: Serve) -> None:
    """Models wanted from the start are all loaded, also where they are more than the bound for lazy ones."""
    with serve(configured(*(net(name, "Gated") for name in "abc")), max_loaded_models=2) as live:
        assert [ask(live, model=name).status_code for name in "abc"] == [200] * 3


def test_read_only_routes_take_no_body(live: Live) -> None:
    """Bodies where none is wanted do no harm."""
    data = image(picture())
    reply: httpx.Response = live.client.request("GET", "/models", json=data)
    assert reply.status_code == 200

"""What models and layers there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from layertap.models.digits import WEIGHTS
from layertap.models.sources.state_dict import digest_weights
from layertap.models.spec import InputSpec
from tests.conftest import net_spec
from tests.server import Live, serving
from tests.service.conftest import Serve
from tests.service.gated_server import post_rows
from tests.service.support import Json, configured, copy_module, image, net, picture, problem


def test_embedded() -> None:
    """Without a configuration there are ``digits``, ready, and torchvision's classifiers, to be had when asked for."""
    with serving() as live:
        body = live.client.get("/models").json()
        states = {model["name"]: model["state"] for model in body["models"]}
        assert body["default"] == "digits"
        assert states.pop("digits") == "ready"
        assert {"resnet50", "vit_b_16", "convnext_tiny"} <= set(states)
        assert set(states.values()) == {"available"}
        assert len(states) > 50


def test_limits(limited: Live) -> None:
    """What clients must keep within is told, as it is configured."""
    assert limited.client.get("/models").json()["limits"] == {
        "max_inputs": 4,
        "max_body_bytes": 2_000_000,
        "body_timeout_s": 15,
        "max_pixels": 10_000,
        "max_resized_pixels": 40_000,
        "max_sound_s": 300,
        "max_samples": 50_000_000,
        "max_video_s": 120.0,
        "max_video_frames": 4096,
        "max_results": 8,
        "max_changed_inputs": 16_384,
        "max_reply_bytes": 400_000,
        "max_json_numbers": 60_000,
        "max_queue_rows": 6,
        "max_queue_bytes": 2**30,
        "deadline_s": 30,
    }


def test_shown(live: Live) -> None:
    """A model says what it is, what it takes, where it runs and that no hook is on it."""
    body = live.client.get("/models/digits").json()
    assert body == {
        "name": "digits",
        "state": "ready",
        "source": "python:layertap.models.digits:digits",
        "dtype": "float32",
        "device": body["device"],
        "inputs": [{"name": "image", "shape": [3, 32, 32], "dtype": "float32"}],
        "preprocess": {
            "resize": 32,
            "crop": 32,
            "mean": [0.5] * 3,
            "std": [0.5] * 3,
            "interpolation": "bilinear",
            "decode": "exact",
        },
        "weights": WEIGHTS.name,
        "weights_digest": body["weights_digest"],
        "embedding": "pool",
        "embedding_choice": {"pool": "mean", "normalize": False, "reason": "the configuration names it"},
        "labels": None,
        "layers": 22,
        "hooks": 0,
        "deterministic": True,
        "memory_bytes": body["memory_bytes"],
        "total_memory_bytes": body["memory_bytes"],
    }
    model = live.engine.manager.registry.get_entry("digits").model
    assert model is not None
    assert body["weights_digest"] == digest_weights(model.module)
    weights = (*model.module.parameters(), *model.module.buffers())
    assert body["memory_bytes"] == sum(each.nbytes for each in weights)
    assert live.client.get("/models").json()["models"][0] == body


def test_failed(live: Live) -> None:
    """A model that can't be had is listed with the reason, which shows no path; the others serve."""
    body = live.client.get("/models/never").json()
    assert body["state"] == "failed"
    assert "RuntimeError" in body["reason"]
    assert "secret" not in body["reason"]
    assert body["hooks"] == 0
    found = problem(post_rows(live, model="never"), 503)
    assert body["reason"] in found["detail"]
    assert "POST /models/never/load" in found["errors"][0]["hint"]  # it does not become well by itself
    problem(live.client.get("/models/never/layers"), 503)
    problem(live.client.post("/models/never/load"), 503)
    assert live.client.get("/readyz").status_code == 200
    assert post_rows(live).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/models/digit", "/models/digit/layers", "/models/digit/labels", "/models/digit/load", "/models/digit/unload"],
)
def test_unknown(live: Live, path: str) -> None:
    """A model that is not configured is 404 on every route, with near names."""
    method = "POST" if path.endswith("load") else "GET"
    assert "'digits'" in problem(live.client.request(method, path), 404)["errors"][0]["hint"]


def layers(live: Live, model: str = "digits", **query: Any) -> list[Json]:
    return live.client.get(f"/models/{model}/layers", params=query).json()["layers"]


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
    (given,), (returned,) = head["inputs"], head["outputs"]
    tensor = {"call": 0, "path": "", "dtype": "float32", "layout": "NC"}
    assert returned == {**tensor, "order": given["order"] + 1, "shape": [1, 10]}
    assert given == {**tensor, "order": given["order"], "shape": [1, 64]}
    assert head["parameters"] == 650
    leaves = [layer["cost"] for layer in found if layer["leaf"] and layer["calls"] == 1]
    assert leaves == sorted(leaves)
    assert all(0 <= cost <= 1 for cost in leaves)


@pytest.mark.parametrize("name", ["digits", "encoder", "tied"])
def test_order_of_hooks(serve: Serve, name: str) -> None:
    """Sorted by their order, calls of layers stand as plain hooks on all modules run; those of a tied one together."""
    encoder = net("encoder", "Encoder", InputSpec("x", (5, 8)), module="tests.nets")
    with serve(configured(encoder, replace(net_spec("Tied"), name="tied"))) as live:
        live.client.post("/extract", json={"model": name, "layers": ["."]}, params={"dry_run": "true"})  # loads it
        module, found = copy_module(live, name), layers(live, name)
        (spec,) = live.client.get(f"/models/{name}").json()["inputs"]
    wanted, names = [], {part: set() for part in module.modules()}
    for key, part in module.named_modules(remove_duplicate=False):
        names[part].add(key or ".")
    for part in module.modules():
        begun, ended = count(), count()
        part.register_forward_pre_hook(
            lambda part, *_, begun=begun: wanted.append((names[part], next(begun), "inputs")), with_kwargs=True
        )
        part.register_forward_hook(
            lambda part, *_, ended=ended: wanted.append((names[part], next(ended), "outputs")), with_kwargs=True
        )
    with torch.no_grad():
        module(torch.zeros(1, *spec["shape"]))
    listed = {
        (layer["name"], tensor["call"], side): tensor["order"]
        for layer in found
        for side in ("inputs", "outputs")
        for tensor in layer[side]
    }
    in_order = [(key, call, side) for keys, call, side in wanted for key in sorted(keys) if (key, call, side) in listed]
    assert len(in_order) == len(listed) > 5
    assert sorted(listed, key=lambda each: (listed[each], each[0])) == in_order


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
        ({"match": "head", "type": "ReLU"}, []),
        ({"match": ".*[0-9]("}, []),
    ],
)
def test_filters(live: Live, query: Json, names: list[str]) -> None:
    """Layers can be chosen by glob, by class, and by whether they have parts."""
    assert [layer["name"] for layer in layers(live, **query)] == names


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        *((None, "application/json"), ("*/*", "application/json"), ("text/*", "text/plain")),
        ("application/json, text/plain, */*", "application/json"),
    ],
)
def test_form_of_a_listing(live: Live, accept: str | None, media_type: str) -> None:
    """JSON is what whoever takes anything gets; what is asked for is chosen as elsewhere."""
    headers = {"accept": accept} if accept is not None else {}
    request = live.client.build_request("GET", "/models/digits/layers?match=head", headers=headers)
    if accept is None:
        del request.headers["accept"]
    assert live.client.send(request).headers["content-type"].startswith(media_type)


def test_slips_of_a_filter(live: Live) -> None:
    """A type that no layer has is 422 with those that there are, the likeliest first, as ``POST /extract`` says it.

    So is a filter that would be passed over.
    """
    found = problem(live.client.get("/models/digits/layers?type=relu"), 422)
    assert "'relu'" in found["detail"]
    hint = found["errors"][0]["hint"]
    types = sorted({layer["type"] for layer in layers(live)})
    assert hint == f"did you mean 'ReLU'? types here: {', '.join(types)}"
    asked = {"layers": [{"type": "relu"}], "inputs": [image(picture())]}
    assert problem(live.client.post("/extract", json=asked), 422)["errors"][0]["hint"] == hint
    far = problem(live.client.get("/models/digits/layers?type=zzz"), 422)["errors"][0]["hint"]
    assert far == f"types here: {', '.join(types)}"
    for query, says in (("match=head&match=pool", "'match' is given 2 times"), ("typ=ReLU", "'typ' is not taken")):
        assert says in problem(live.client.get(f"/models/digits/layers?{query}"), 422)["detail"]

"""Explanations by changed inputs: how many there may be, what runs for them and where, and when it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captum.attr import Occlusion

from layertap.models.catalog.catalog import Costs
from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.digits_reference import random_images
from tests.service.gated_server import wait_until
from tests.service.queue_harness import read_figure
from tests.service.support import Json, arrays_of, configured, net, problem, tensor
from tests.service.test_explain_methods import ask, assert_close, module_of

PICTURE = InputSpec("x", (3, 32, 32))
LIMIT = 60
CNN, BLUNT = (
    net(name, factory, PICTURE, weights="random:5", preprocess="none")
    for name, factory in (("cnn", "Cnn"), ("blunt", "Undifferentiable"))
)
RESNET = ModelSpec("resnet", "python:tests.nets:resnet", weights="random:5", inputs=(PICTURE,), preprocess="none")


served = server_of(CNN, BLUNT, max_changed_inputs=LIMIT)


def count_rows(live: Live, model: str) -> float:
    """How many rows a model's forwards have answered."""
    return read_figure(live, "layertap_rows_total", model=model)


SMOOTH: Json = {"method": "smoothgrad", "samples": 20}
WINDOWS: Json = {"method": "occlusion", "window": 8, "stride": 8}  # 16 windows
TOO_MANY: dict[str, tuple[Json, int, int, str]] = {
    "inputs": (SMOOTH, 4, 80, "at most 3 inputs"),
    "methods": (
        WINDOWS | {"method": ["integrated_gradients", "occlusion"], "steps": 5, "classes": [0, 1]},
        3,
        78,
        "at most 2 inputs",
    ),
}


@pytest.mark.parametrize("kind", TOO_MANY)
def test_too_many_in_all(served: Live, kind: str) -> None:
    """What a request would run in all is counted before any forward, and named with the limit and what to type."""
    body, rows, count, hint = TOO_MANY[kind]
    before = count_rows(served, "cnn")
    told = problem(ask(served, random_images(rows, 5), model="cnn", **body), 413)
    assert f"{count} changed inputs, the limit is {LIMIT}" in told["detail"]
    assert hint in str(told)
    assert count_rows(served, "cnn") == before


def test_just_as_many_as_may_be(served: Live) -> None:
    """At the limit a request is answered, and its changed inputs are those that were counted."""
    before = count_rows(served, "cnn")
    body: Json = {"method": ["smoothgrad", "occlusion"], "samples": 12, "window": 8, "stride": 7, "classes": [0, 1]}
    assert ask(served, random_images(1, 5), model="cnn", **body).status_code == 200
    changed = 2 * 12 + 25
    assert count_rows(served, "cnn") - before == changed + 2 + 1  # and the row itself, of each class and for all


def test_classes_share_forwards(served: Live) -> None:
    """Occlusion runs each window once, however many classes are asked for; each map is captum's."""
    x, classes = random_images(2, 3), [0, 1, 2, 3, "top"]
    before = count_rows(served, "cnn")
    found = arrays_of(ask(served, x, model="cnn", classes=classes, **WINDOWS))
    assert count_rows(served, "cnn") - before == 2 * 16 + 2
    module = module_of(served, "cnn")
    pictures = torch.from_numpy(x)
    for klass in classes:
        target = module(pictures).argmax(1) if klass == "top" else klass
        wanted = Occlusion(module).attribute(pictures, (3, 8, 8), (3, 8, 8), baselines=0, target=target)
        assert_close(found[f"occlusion.{klass}"], wanted[:, 0])


def test_occlusion_needs_no_backward(served: Live) -> None:
    """Scores alone make the map: of a model that can't be differentiated too."""
    x = random_images(2, 4)
    problem(ask(served, x, model="blunt", method="saliency"), 422)
    receipt = ask(served, x, model="blunt", **WINDOWS).json()["receipts"]["occlusion"]
    assert receipt["classes"] == module_of(served, "blunt")(torch.from_numpy(x)).argmax(1).tolist()
    assert (receipt["layer"], receipt["site"]) == (".", "input")


def test_deadlines_that_pass(serve: Serve) -> None:
    """Deadlines end the work between batches, where it was expected to be quicker."""
    with serve(configured(RESNET)) as live:
        model = live.engine.manager.registry.get_entry("resnet").model
        assert model is not None
        model.catalogs.configured = replace(model.catalog, costs=Costs(base=0.0, per_row=1e-9))
        body = {"model": "resnet", "method": ["occlusion", "smoothgrad"], "stride": 1, "samples": 512}
        sent = {**body, "inputs": [tensor(row) for row in random_images(4, 5)]}
        problem(live.client.post("/explain", json=sent, headers={"X-Request-Timeout": "0.2"}), 504, seconds=True)
        wait_until(lambda: not any(live.engine.take_snapshot()["model_hooks"].values()))
        assert count_rows(live, "resnet") < 4 * (29**2 + 512)

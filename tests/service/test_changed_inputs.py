"""Explanations by changed inputs: how many there may be, what runs for them and where, and when it ends."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from captum.attr import Occlusion

from layertap.models.catalog.catalog import Costs
from layertap.models.explanations.perturbations import IntegratedGradients, PerturbationSettings
from layertap.models.gradients.resolve_objective import resolve_objective
from layertap.models.selection.hook_points import Explanation, Objective, Selector
from layertap.models.spec import InputSpec, ModelSpec
from layertap.service.app import create_engine
from layertap.service.engine.admit.planned_work import PlannedWork, WorkPlan
from layertap.service.engine.request import ExtractRequest
from layertap.service.explain.explanation_methods import METHODS
from layertap.service.explain.map_requests import MapRequest
from layertap.service.explain.perturbing import PerturbedMethod, perturb
from layertap.service.inputs.items import ArraysItem
from layertap.service.settings import Settings as ServiceSettings
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import random_images
from tests.service.gated_server import wait_until
from tests.service.support import Array, Json, arrays_of, configured, npy, problem, raw, tensor
from tests.service.test_explain_methods import ask, assert_close, module_of

PICTURE = InputSpec("x", (3, 32, 32))
LIMIT = 60
CNN = ModelSpec("cnn", "python:tests.service.nets_http:Cnn", weights="random:5", inputs=(PICTURE,), preprocess="none")
BLUNT = ModelSpec(
    "blunt", "python:tests.service.nets_http:Undifferentiable", weights="random:5", inputs=(PICTURE,), preprocess="none"
)
RESNET = ModelSpec("resnet", "torchvision:resnet18", weights="random:5", inputs=(PICTURE,), preprocess="none")


@pytest.fixture(scope="module")
def served(serve: Serve) -> Iterator[Live]:
    """A server that lets few inputs be changed."""
    with serve(configured(CNN, BLUNT), max_changed_inputs=LIMIT) as live:
        yield live


@pytest.fixture(scope="module")
def patient(serve: Serve) -> Iterator[Live]:
    """A server of a model that takes a while."""
    with serve(configured(RESNET)) as live:
        yield live


def count_rows(live: Live, model: str) -> int:
    """How many rows a model's forwards have answered."""
    found = re.search(
        rf'^layertap_rows_total{{model="{model}"}} (\S+)$', live.client.get("/metrics").text, re.MULTILINE
    )
    return int(float(found[1])) if found is not None else 0


SMOOTH: Json = {"method": "smoothgrad", "samples": 20}
WINDOWS: Json = {"method": "occlusion", "window": 8, "stride": 8}  # 16 windows
TOO_MANY: dict[str, tuple[Json, int, int, str]] = {
    "one method": (SMOOTH | {"samples": 61}, 1, 61, "or 'samples'"),
    "inputs": (SMOOTH, 4, 80, "at most 3 inputs"),
    "classes": (SMOOTH | {"classes": [0, 1, 2, "top"]}, 1, 80, "fewer methods, classes"),
    "methods": (
        WINDOWS | {"method": ["smoothgrad", "integrated_gradients", "occlusion"], "samples": 20, "steps": 30},
        1,
        66,
        "a larger 'stride'",
    ),
    "windows": (WINDOWS | {"window": 4, "stride": 4}, 1, 64, "a larger 'stride'"),
    "all of it": (
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


def test_a_batch_in_one_body(served: Live) -> None:
    """The rows of a batch that is one input of the request all count."""
    query = {"model": "cnn", "method": "smoothgrad", "samples": "20", "format": "npz"}
    before = count_rows(served, "cnn")
    reply = served.client.post("/explain", **raw(npy(random_images(4, 5)), "application/x-npy", **query))
    assert "80 changed inputs" in problem(reply, 413)["detail"]
    assert count_rows(served, "cnn") == before
    reply = served.client.post("/explain", **raw(npy(random_images(3, 5)), "application/x-npy", **query))
    assert reply.status_code == 200


def test_just_as_many_as_may_be(served: Live) -> None:
    """At the limit a request is answered, and its changed inputs are those that were counted."""
    before = count_rows(served, "cnn")
    body: Json = {"method": ["smoothgrad", "occlusion"], "samples": 12, "window": 8, "stride": 7, "classes": [0, 1]}
    assert ask(served, random_images(1, 5), model="cnn", **body).status_code == 200
    changed = 2 * 12 + 25
    assert count_rows(served, "cnn") - before == changed + 2 + 1  # and the row itself, of each class and for all


def test_inputs_of_several_shapes(served: Live) -> None:
    """Each counts by its own shape."""
    shapes = [(3, 32, 32), (3, 64, 32)]
    x = [np.random.default_rng(row).standard_normal(shape).astype(np.float32) for row, shape in enumerate(shapes)]
    body = {"model": "cnn", **WINDOWS, "inputs": [tensor(row) for row in x]}
    assert served.client.post("/explain", json=body).status_code == 200  # 16 + 32
    told = problem(served.client.post("/explain", json=body | {"inputs": [*body["inputs"], tensor(x[0])]}), 413)
    assert "64 changed inputs" in told["detail"]


@pytest.mark.parametrize("classes", [[0, 1, 2, 3, "top"], ["top"]])
def test_classes_share_forwards(served: Live, classes: list[Any]) -> None:
    """Occlusion runs each window once, however many classes are asked for; each map is captum's."""
    x = random_images(2, 3)
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
    module = module_of(served, "blunt")
    pictures = torch.from_numpy(x)
    top = module(pictures).argmax(1)
    wanted = Occlusion(module).attribute(pictures, (3, 8, 8), (3, 8, 8), baselines=0, target=top)
    reply = ask(served, x, model="blunt", **WINDOWS)
    assert_close(arrays_of(reply)["occlusion"], wanted[:, 0])
    receipt = reply.json()["receipts"]["occlusion"]
    assert receipt["classes"] == top.tolist()
    assert (receipt["layer"], receipt["site"]) == (".", "input")


def test_a_class_of_an_input_that_is_none(served: Live) -> None:
    """A class that the model does not have is refused where it was said."""
    inputs = [tensor(row) | {"class": klass} for row, klass in zip(random_images(2, 7), (1, 5), strict=True)]
    before = count_rows(served, "cnn")
    told = problem(served.client.post("/explain", json={"model": "cnn", **WINDOWS, "inputs": inputs}), 422)
    assert told["errors"][0]["pointer"] == "/inputs/1/objective"
    assert count_rows(served, "cnn") == before


def test_fingerprints_of_occlusion(served: Live) -> None:
    """What decides a map changes its fingerprint: class, kind of score, window; how it was asked for does not."""
    x = random_images(1, 3)

    def get_print(key: str = "occlusion", **body: Any) -> str:
        receipts = ask(served, x, model="cnn", **WINDOWS | body).json()["receipts"]
        fingerprint: str = receipts[key]["fingerprint"]
        return fingerprint

    of_class = get_print(objective={"class": 2})
    assert of_class == get_print("occlusion.2", classes=[1, 2])
    others = [
        get_print(),
        get_print(objective={"class": 1}),
        get_print(objective={"kind": "probability", "class": 2}),
        get_print(objective={"class": 2}, window=9),
    ]
    assert len({of_class, *others}) == 5


def test_clients_that_leave(patient: Live) -> None:
    """No further batch runs once nobody waits."""
    inputs = [tensor(row) for row in random_images(4, 5)]
    body = {"model": "resnet", "method": "occlusion", "stride": 1, "inputs": inputs}
    before = count_rows(patient, "resnet")
    with pytest.raises(httpx.ReadTimeout):
        patient.client.post("/explain", json=body, timeout=0.3)
    wait_until(lambda: patient.engine.admission.used_bytes == 0)
    wait_until(lambda: not any(patient.engine.take_snapshot().hooks.values()))
    assert count_rows(patient, "resnet") - before < 4 * 29**2


def test_deadlines_that_pass(patient: Live) -> None:
    """Deadlines end the work between batches, where it was expected to be quicker."""
    model = patient.engine.manager.registry.get_entry("resnet").model
    assert model is not None
    model.catalogs.configured = replace(model.catalog, costs=Costs(base=0.0, per_row=1e-9))
    body = {"model": "resnet", "method": ["occlusion", "smoothgrad"], "stride": 1, "samples": 512}
    before = count_rows(patient, "resnet")
    sent = {**body, "inputs": [tensor(row) for row in random_images(4, 5)]}
    problem(patient.client.post("/explain", json=sent, headers={"X-Request-Timeout": "0.3"}), 504, seconds=True)
    wait_until(lambda: not any(patient.engine.take_snapshot().hooks.values()))
    assert count_rows(patient, "resnet") - before < 4 * (29**2 + 512)


class Watched(IntegratedGradients):
    """Notes in which threads anything of it runs."""

    threads: set[str]

    def __init__(self, row: Array, info: Any, settings: PerturbationSettings, score: float) -> None:
        type(self).threads.add(threading.current_thread().name)
        super().__init__(row, info, settings, score)

    def make_rows(self, numbers: range) -> Array:
        type(self).threads.add(threading.current_thread().name)
        return super().make_rows(numbers)

    def add(self, numbers: range, measured: Array) -> None:
        type(self).threads.add(threading.current_thread().name)
        super().add(numbers, measured)

    def finish(self) -> Array:
        type(self).threads.add(threading.current_thread().name)
        return super().finish()


def test_numbers_are_made_off_the_event_loop() -> None:
    """Weights, changed rows, sums and maps are computed in other threads than the loop's; each row is told as done."""
    Watched.threads = set()
    explanation = Explanation(("integrated_gradients",), steps=40)
    items = ((0, ArraysItem({None: random_images(1, 2)[0]})),)

    async def run() -> tuple[str, Array]:
        engine = create_engine(ServiceSettings(workers=0, cpu_threads=1), configured(CNN), warm=False)
        try:
            with engine.admission.admit(time.monotonic() + 120) as ticket:
                worker = await engine.manager.get_handle("cnn", ticket.deadline)
                tap = METHODS["integrated_gradients"].find_taps(explanation, worker.model)[0]
                objective = Objective(klass=1)
                selectors = tuple(
                    Selector(".", ".", 0, tap.point.path, site, alias=alias)
                    for alias, site in (("values0", "input"), ("gradients0", "grad_input"))
                )
                request = ExtractRequest(model="cnn", items=items, selectors=selectors, objective=objective)
                asked = MapRequest("integrated_gradients", explanation, {"map": request})
                resolved = resolve_objective(objective, worker.model.catalog)
                method = PerturbedMethod(asked, Watched, tap, resolved, worker.model)
                (part,) = await engine.extract_parts(method.prepare(request), ticket)
                plan = WorkPlan(engine.settings, engine.metrics)
                work = PlannedWork(plan, worker, rows=40, seconds=1.0, smaller="less")
                with work.count(ticket.deadline):
                    made = await perturb(engine, method, ticket, part, work)
                assert (work.done, work.begun) == (40, True)
            return threading.current_thread().name, made.arrays["map"]
        finally:
            await engine.close()

    loop, found = asyncio.run(run())
    assert np.abs(found).max() > 0
    assert Watched.threads
    assert loop not in Watched.threads

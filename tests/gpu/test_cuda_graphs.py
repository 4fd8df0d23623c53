"""CUDA graphs of warm plans: what is replayed is what hooks give, alone, in company, and from several streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.compiled.graphs import CudaGraph, capture_cuda_graphs, export_graph
from layertap.models.compiled.prepare import check_against_hooks, prepare_warm_plans
from layertap.models.devices import transfer
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.compiled_plan import PlanGraphs, WarmError
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import ModelSpec, WarmSpec
from layertap.service.config.configuration import Configuration
from tests.gpu.accelerator import on_cuda
from tests.loading import load_model
from tests.nets import batch
from tests.server import serving
from tests.service.support import arrays_of, npy, raw

pytestmark = on_cuda
SIZES = (1, 4, 8)
LAYERS = ("layer1.0.relu#0", "layer3", "avgpool")
SPEC = ModelSpec("net", "torchvision:resnet18", weights="random:0", device="cuda")


class Plain:
    """An exported graph run by PyTorch, as what runs a compiled one: nothing is compiled."""

    def __init__(self, program: Any) -> None:
        self._module = program.module()

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        return list(self._module(*inputs))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    found = load_model(SPEC, 1, 1, 2)
    assert len(found.replicas) == 2
    return found


@pytest.fixture(scope="module")
def plan(model: LoadedModel) -> Plan:
    return make_plan([parse_selector(text) for text in LAYERS], model.catalog)


@pytest.fixture(scope="module")
def runners(model: LoadedModel, plan: Plan) -> dict[str, Plain]:
    captures = tuple(result.capture for result in plan.results)
    rows = {kind: batch(model.inputs, count) for kind, count in (("one", 1), ("several", 3))}
    placed = {kind: {name: value.cuda() for name, value in each.items()} for kind, each in rows.items()}
    return {kind: Plain(export_graph(model, captures, each)) for kind, each in placed.items()}


@pytest.fixture(scope="module")
def graphs(model: LoadedModel, plan: Plan, runners: dict[str, Plain]) -> PlanGraphs:
    captures = tuple(result.capture for result in plan.results)
    names = tuple(spec.name for spec in model.inputs)
    made = PlanGraphs(captures, names, runners["one"], runners["several"])
    found = replace(made, cuda_graphs=capture_cuda_graphs(model, made, SIZES, runners))
    transfer.synchronize(model.device)
    return found


def test_captured(model: LoadedModel, plan: Plan, graphs: PlanGraphs) -> None:
    """For each replica and number of rows, one after the other, what hooks give; nothing gives what it gave before."""
    for own in model.replicas:
        check_against_hooks(model, plan, graphs, own, (1, 2, 3, 4, 5, 8, 9, 1, 8))
        assert [graphs.get_padded_rows(rows, own) for rows in (1, 2, 5, 9)] == [1, 4, 8, 9]


def test_what_is_replayed_is_what_was_captured(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, runners: dict[str, Plain]
) -> None:
    """Numbers come from the replay: a graph that was captured of another plan is found out."""
    captures = graphs.captures[:1] * len(graphs.captures)
    other = Plain(export_graph(model, captures, {name: value.cuda() for name, value in batch(model.inputs, 3).items()}))
    wrong = capture_cuda_graphs(model, graphs, (4,), {"several": other})
    with pytest.raises(WarmError):
        check_against_hooks(model, plan, replace(graphs, cuda_graphs=wrong), model.replicas[0], (3,))


def test_from_two_streams(model: LoadedModel, plan: Plan, graphs: PlanGraphs) -> None:
    """Two threads, each with its replica and stream, replay at once and get their own."""
    parts = [batch(model.inputs, 1 + number % 8, seed=number) for number in range(40)]

    def ask(lane: int) -> list[Any]:
        transfer.use_own_stream(model.device)
        found = []
        for part in parts[lane::2]:
            share = RequestSlice(0, len(next(iter(part.values()))), plan.captures)
            taken = model.run(model.replicas[lane], [part], [share], graphs=graphs).select(share)
            transfer.synchronize_stream(model.device)
            found.append((part, share, {capture: value.values.cpu() for capture, value in taken.items()}))
        return found

    with ThreadPoolExecutor(2) as pool:
        answers = [each for lane in pool.map(ask, range(2)) for each in lane]
    for part, share, found in answers:
        wanted = model.run(model.replicas[0], [part], [share]).select(share)
        for capture, values in found.items():
            expected = wanted[capture].values.cpu()
            torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_a_capture_that_fails(model: LoadedModel, graphs: PlanGraphs, plan: Plan) -> None:
    """A graph that asks the device for a number can't be captured; the device answers on."""

    class Asking:
        def run(self, inputs: list[Tensor]) -> list[Tensor]:
            return [inputs[0] * float(inputs[0].sum())]

    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever torch makes of it)
        capture_cuda_graphs(model, graphs, (4,), {"several": Asking()})
    assert model.probe(model.replicas[0]) is None
    check_against_hooks(model, plan, graphs, model.replicas[0], (1, 4))


def test_served(tmp_path: Path) -> None:
    """Compiled and captured over HTTP: the numbers of a model with hooks, whoever asks beside."""
    warm = WarmSpec(("avgpool", "layer3"), pool="mean", compile="always", cuda_graphs=SIZES)
    place = tmp_path / "plans"
    ready = prepare_warm_plans(load_model(replace(SPEC, warm=(warm,)), 1, 1), place, compiles=True)
    (made,) = ready.graphs
    if made is None:
        pytest.skip("no graph can be compiled on this machine: the log says why")
    assert isinstance(made.cuda_graphs[ready.replicas[0]][SIZES[0]], CudaGraph)
    hooked, replayed = replace(SPEC, name="hooked"), replace(SPEC, name="replayed", warm=(warm,))
    rows = np.random.default_rng(0).normal(size=(24, 3, 224, 224)).astype(np.float32)

    def ask(name: str, place: int) -> dict[str, Any]:
        body = npy(rows[place : place + 1 + place % 3])
        query = {"model": name, "layers": "avgpool,layer3", "pool": "mean", "format": "npz"}
        return arrays_of(live.client.post("/extract", **raw(body, "application/x-npy", **query)))

    with serving(Configuration((hooked, replayed), "hooked"), cache_dir=tmp_path, gpu_streams=2) as live:
        wanted = [ask("hooked", place) for place in range(21)]
        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(lambda place: ask("replayed", place), range(21)))
    for ours, expected in zip(found, wanted, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=1e-4 * float(np.abs(value).max()))

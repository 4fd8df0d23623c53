"""Warm plans: graphs exported with hooks on, compiled, kept on disk; each answer beside that of hooks and copies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layertap.models.compiled import prepare
from layertap.models.compiled.graphs import compute_key, export_graph
from layertap.models.compiled.prepare import list_captures, make_warm_plan, prepare_warm_plans
from layertap.models.plan.plan import Capture, Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Objective, Reduction
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.compiled_plan import CompiledPlan, PlanGraphs, find_compiled_plan
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import Compile, WarmSpec
from tests.conftest import WARM, net_spec
from tests.loading import load_model
from tests.marks import slow
from tests.models.extraction import extract_plan
from tests.nets import batch

Lines = Callable[[], list[Any]]
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


@pytest.fixture(scope="module")
def loaded() -> Callable[..., LoadedModel]:
    """Each model once."""
    return cache(lambda net: load_model(net_spec(net), 2, 1))


@pytest.fixture(scope="module")
def warmed(plans: Path) -> LoadedModel:
    """A small model with its compiled graph."""
    return prepare_warm_plans(load_model(net_spec("Chain", warm=(WARM,)), 2, 1), plans)


def get_plan(model: LoadedModel) -> CompiledPlan:
    """The model's only warm plan."""
    (made,) = model.compiled
    assert made is not None
    return made


def get_graphs(model: LoadedModel) -> PlanGraphs:
    """Those of the model's only warm plan."""
    (made,) = model.graphs
    assert made is not None
    return made


def plan_for(model: LoadedModel, *texts: str, **how: Any) -> Plan:
    return make_plan([replace(parse_selector(text), reduction=Reduction(**how)) for text in texts], model.catalog)


def hooked(model: LoadedModel, rows: Mapping[str, Tensor], plan: Plan) -> dict[Capture, Any]:
    return extract_plan(model, rows, plan, model.catalog, 64)


def graph(model: LoadedModel, plan: Plan, rows: int) -> tuple[Any, tuple[Capture, ...]]:
    """A plan as an exported graph, run by PyTorch and not compiled."""
    captures = tuple(result.capture for result in plan.results)
    made = export_graph(model, captures, batch(model.inputs, max(rows, 1), seed=3))
    return made, captures


class Plain:
    """An exported graph, as what runs a compiled one."""

    def __init__(self, program: Any) -> None:
        self._module = program.module()

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        return list(self._module(*inputs))


CASES = [
    ("Chain", ["conv", "relu#0", "conv:input"], {"pool": "mean", "normalize": True}),
    slow("resnet", ["layer1.0.bn2", "layer1.0.relu#0", "layer2", "layer2.0.conv1:input", "."], {}),
    slow("vit", ["encoder.layers.encoder_layer_0", "encoder.ln"], {"pool": "cls"}),
    slow("Structured", ["nested[pair][left]", "nested[list][0][0]", "."], {}),
]


@pytest.mark.parametrize(("net", "layers", "how"), CASES)
def test_exported(loaded: Callable[..., LoadedModel], net: str, layers: list[str], how: dict[str, Any]) -> None:
    """A graph gives what hooks give, for any number of rows; it holds no row count of its own."""
    model = loaded(net)
    plan = plan_for(model, *layers, **how)
    several, captures = graph(model, plan, 3)
    one, _ = graph(model, plan, 1)
    names = tuple(spec.name for spec in model.inputs)
    made = PlanGraphs(captures, names, Plain(one), Plain(several))
    for count in (1, 2, 5):
        rows = batch(model.inputs, count, seed=4)
        share = RequestSlice(0, count, plan.captures)
        found = made.run({name: value.clone() for name, value in rows.items()}, [share], count).select(share)
        for capture, wanted in hooked(model, rows, plan).items():
            torch.testing.assert_close(found[capture].values, wanted.values, rtol=1e-4, atol=1e-5)
    assert model.hooks == 0


@pytest.mark.slow
def test_cut_off_after_the_last(loaded: Callable[..., LoadedModel]) -> None:
    """Nothing that only later layers need is in the graph."""
    model = loaded("resnet")

    def convolutions(*layers: str) -> int:
        made, _ = graph(model, plan_for(model, *layers), 2)
        return sum("conv" in str(node.target) for node in made.graph.nodes if node.op == "call_function")

    assert (convolutions("layer1"), convolutions("layer2")) == (3, 6)


@pytest.mark.slow
def test_second_start(warmed: LoadedModel, plans: Path) -> None:
    """What is on disk is not compiled again; it answers any part of its layers, reduced as they are there."""
    before = {path.name: path.stat().st_mtime_ns for path in plans.iterdir()}
    again = prepare_warm_plans(load_model(warmed.spec, 1, 1), plans)
    assert get_graphs(again)
    assert {path.name: path.stat().st_mtime_ns for path in plans.iterdir()} == before
    assert sorted(Path(name).suffix for name in before if not name.startswith("runner")) == [".pt2", ".pt2"]
    known = (get_plan(again), None)
    assert find_compiled_plan(known, plan_for(again, "conv", "head")) is known[0]
    assert find_compiled_plan(known, plan_for(again, ".")) is None
    assert find_compiled_plan(known, plan_for(again, "conv", pool="mean")) is None
    graded = make_plan([parse_selector("conv:grad_output")], again.catalog, (), Objective("sum"))
    assert find_compiled_plan(known, graded) is None


def test_keys(loaded: Callable[..., LoadedModel]) -> None:
    """Another layer, reduction, number of rows, precision or memory format is another graph."""
    model = loaded("Chain")
    others = [load_model(net_spec("Chain", **how)) for how in ({"tf32": True}, {"memory_format": "channels_last"})]
    conv, *captures = (
        tuple(plan_for(model, layer, **how).captures)
        for layer, how in (("conv", {}), ("relu", {}), ("conv", {"pool": "mean"}), ("relu#0", {}))
    )
    keys = {compute_key(model, each, kind) for each in (conv, *captures) for kind in ("one", "several")}
    keys |= {compute_key(other, conv, "one") for other in others}
    assert len(keys) == 10


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The fields of what was logged so far."""
    return lambda: [vars(each)["fields"] for each in caplog.records if "fields" in vars(each)]


@pytest.mark.parametrize(
    ("net", "layers", "says"),
    [
        ("vit", ("encoder.layers.encoder_layer_0.self_attention:attention",), "does not give"),
        ("BatchCentred", (".",), "one at a time"),
    ],
)
def test_runs_with_hooks(
    loaded: Callable[..., LoadedModel], tmp_path: Path, lines: Lines, net: str, layers: tuple[str, ...], says: str
) -> None:
    """What no graph gives is answered as ever, and one line says so."""
    model = loaded(net)
    spec = replace(model.spec, warm=(WarmSpec(layers, compile=True), WarmSpec(layers)))
    found = prepare_warm_plans(replace(model, spec=spec), tmp_path)
    assert found.compiled == (None, None)
    assert len(lines()) == 1
    assert says in lines()[0]["reason"]


@pytest.mark.slow
def test_damaged_file(warmed: LoadedModel, plans: Path, tmp_path: Path, lines: Lines) -> None:
    """A graph that does not load is not run, and the log says so."""
    for path in plans.glob("*.pt2"):
        (tmp_path / path.name).write_bytes(b"no graph")
    tmp_path.chmod(0o700)
    assert prepare_warm_plans(load_model(warmed.spec, 1, 1), tmp_path).compiled == (None,)
    assert "does not load" in lines()[0]["reason"]


@pytest.mark.parametrize(
    ("mode", "user", "group", "says"),
    [
        (0o702, -1, -1, "chmod o-w"),
        pytest.param(0o770, -1, 54321, "chmod g-w", marks=AS_ROOT),
        pytest.param(0o700, 54321, -1, "chown", marks=AS_ROOT),
    ],
)
def test_folder_of_others(
    loaded: Callable[..., LoadedModel], tmp_path: Path, lines: Lines, mode: int, user: int, group: int, says: str
) -> None:
    """A folder that others may write to is not used; the log names it, and what to type."""
    place = tmp_path / "shared"
    place.mkdir()
    os.chown(place, user, group)
    place.chmod(mode)
    model = loaded("Chain")
    assert prepare_warm_plans(replace(model, spec=replace(model.spec, warm=(WARM,))), place).compiled == (None,)
    assert says in lines()[0]["reason"]
    assert str(place) in lines()[0]["reason"]


def test_without_a_compiler(
    loaded: Callable[..., LoadedModel], tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be compiled here runs with hooks; one line says what is missing."""
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    model = loaded("Chain")
    model = replace(model, spec=replace(model.spec, warm=(WARM,)))
    for compiles in (True, False):
        assert prepare_warm_plans(model, tmp_path, compiles=compiles).compiled == (None,)
    assert [line["reason"].partition(":")[0] for line in lines()] == ["there is no C++ compiler", "it is not compiled"]


class Slow:
    """A graph that gives what another one gives, after a while; it stands for all that are on disk."""

    def __init__(self, program: Any, seconds: float) -> None:
        self._graph, self._seconds = Plain(program), seconds

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        time.sleep(self._seconds)
        return self._graph.run(inputs)


@pytest.mark.parametrize(("compile_", "used"), [(True, False), ("always", True)])
def test_hooks_that_are_quicker(
    loaded: Callable[..., LoadedModel],
    tmp_path: Path,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    compile_: Compile,
    used: bool,
) -> None:
    """A graph that is slower than hooks is not run unless it always is; a later load of the model does the same."""
    model = loaded("Chain")
    model = replace(model, spec=replace(model.spec, warm=(replace(WARM, compile=compile_),)))
    plan = make_warm_plan(model, model.spec.warm[0])
    captures = list_captures(model, plan)
    programs = {rows: export_graph(model, captures, batch(model.inputs, rows)) for rows in (1, 3)}
    for kind in prepare.KINDS:
        (tmp_path / f"{compute_key(model, captures, kind)}.pt2").touch()
    seconds = 0.05
    slow = cycle([Slow(programs[1], seconds), Slow(programs[3], seconds)])
    monkeypatch.setattr(prepare, "open_graph", lambda *_: next(slow))
    prepared = prepare_warm_plans(model, tmp_path)
    assert [each is not None for each in (*prepared.compiled, *prepared.graphs)] == [used, used]
    assert [line["reason"].startswith("its graph takes ") for line in lines()] == ([] if used else [True])
    monkeypatch.setattr(prepare, "measure_plan", None)
    assert prepare_warm_plans(model, tmp_path, earlier=prepared.compiled).compiled == prepared.compiled
    if used:
        (made,) = prepared.compiled
        assert made is not None
        assert made.costs.estimate_seconds(1) > seconds > made.hooked_costs.estimate_seconds(1)

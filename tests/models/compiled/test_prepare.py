"""Warm plans: graphs exported with hooks on, compiled, kept on disk; each answer beside that of hooks and copies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layertap.models.compiled.benchmark import (
    MAX_PAIRS,
    PAIRS_S,
    keep_benchmark,
    locate_benchmark,
    measure_plan,
    read_benchmark,
)
from layertap.models.compiled.compile import compute_key, export_graph
from layertap.models.compiled.prepare import make_warm_plan, prepare_warm_plans
from layertap.models.plan.plan import Capture, Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Objective, Reduction
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.compiled_plan import (
    BATCH_ROWS,
    CompiledPlan,
    PairedSeconds,
    PlanBenchmark,
    PlanGraphs,
    find_compiled_plan,
)
from layertap.models.run.costs import ForwardSeconds
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import WarmSpec
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
    """A small model with a graph that was compiled in a process of its own."""
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
        found = made.run({name: value.clone() for name, value in rows.items()}, count).select(share)
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
    assert sorted(Path(name).suffix for name in before if not name.startswith("runner")) == [".json", ".pt2", ".pt2"]
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


def keep(model: LoadedModel, folder: Path, benchmark: PlanBenchmark) -> Path:
    """The file of what an earlier start has measured."""
    captures = tuple(result.capture for result in make_warm_plan(model, WARM).results)
    paths = [folder / f"{compute_key(model, captures, kind)}.pt2" for kind in ("one", "several")]
    path = locate_benchmark(paths, (), model.threads, model.device)
    path.write_text(json.dumps(asdict(benchmark)))
    return path


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The fields of what was logged so far."""
    return lambda: [vars(each)["fields"] for each in caplog.records if "fields" in vars(each)]


def test_hooks_that_are_quicker(loaded: Callable[..., LoadedModel], tmp_path: Path, lines: Lines) -> None:
    """What the first start has found slower than hooks is not run, nor compiled, by any other; one line says so."""
    model = loaded("Chain")
    model = replace(model, spec=replace(model.spec, warm=(replace(WARM, compile=True),)))
    path = keep(model, tmp_path, SLOW)
    for _ in range(2):
        prepared = prepare_warm_plans(model, tmp_path)
        assert (prepared.compiled, prepared.benchmarks) == ((None,), (SLOW,))
    assert lines() == [{"model": "Chain", "reason": "its graph takes 2.00 times as long as hooks"}] * 2
    assert list(tmp_path.iterdir()) == [path]


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


QUICK = PlanBenchmark(PairedSeconds(0.5, 0.25, 2.0), PairedSeconds(4.0, 1.0, 4.0), ForwardSeconds(0.25, 0.125, 1.5))
SLOW = replace(QUICK, one=PairedSeconds(0.25, 0.5, 0.5), several=None)
WHOLE: dict[str, Any] = asdict(QUICK)


def test_kept(tmp_path: Path) -> None:
    """What was measured once is what every later start reads, whatever that measures."""
    path = tmp_path / "benchmark.json"
    assert read_benchmark(path) is None
    assert keep_benchmark(path, SLOW) == keep_benchmark(path, QUICK) == read_benchmark(path) == SLOW
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        *("", "\xff", "[1]", "[" * 100_000, json.dumps(WHOLE)[:-1], json.dumps(WHOLE | {"more": 1})),
        *(json.dumps(WHOLE | {"one": WHOLE["one"] | {"speedup": x}}) for x in (-1, "x", float("nan"), 10**400)),
    ],
    ids=lambda text: text[:60],
)
def test_damaged_benchmark(tmp_path: Path, text: str) -> None:
    """What is no benchmark counts for nothing, and is put right."""
    path = tmp_path / "benchmark.json"
    path.write_text(text, encoding="latin-1")
    assert read_benchmark(path) is None
    assert keep_benchmark(path, QUICK) == read_benchmark(path) == QUICK


def test_where_nothing_can_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model loads all the same, waits for nobody who would write to a pipe, and the log says what follows."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "nowhere" / "benchmark.json"):
        assert keep_benchmark(path, SLOW) == SLOW
    assert "the next start may decide otherwise" in caplog.text


@dataclass
class Clock:
    """Moves on by what a forward takes; every seventh forward of any kind takes ``disturbance`` times as long."""

    hooks: float
    graph: float
    disturbance: float = 1.0
    now: float = 0.0
    runs: list[str] = field(default_factory=list)

    def tick(self, kind: str) -> None:
        self.runs.append(kind)
        seconds = self.hooks if kind == "hooks" else self.graph
        self.now += seconds * (1.0 if len(self.runs) % 7 else self.disturbance)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Be a graph."""
        self.tick("graph")
        return [torch.zeros(len(inputs[0]), 5)]


@pytest.fixture(scope="module")
def chain() -> LoadedModel:
    return load_model(net_spec("Chain"), 1, 1)


@pytest.fixture
def plan(chain: LoadedModel) -> Plan:
    return make_plan([parse_selector("head")], chain.catalog)


def measure(model: LoadedModel, plan: Plan, clock: Clock) -> PlanBenchmark:
    """The benchmark, but for the graph's own costs, which are of real time."""
    captures, names = tuple(plan.captures), tuple(spec.name for spec in model.inputs)
    graphs = PlanGraphs(captures, names, clock, clock)
    with model.module.register_forward_pre_hook(lambda *_: clock.tick("hooks")):
        return measure_plan(model, plan, graphs, lambda: clock.now)


@pytest.mark.parametrize(("hooks", "graph"), [(0.25, 0.125), (0.125, 0.25)])
@pytest.mark.parametrize("disturbance", [1.0, 16.0])
def test_seconds(chain: LoadedModel, plan: Plan, hooks: float, graph: float, disturbance: float) -> None:
    """Forwards that something disturbs change nothing."""
    benchmark = measure(chain, plan, Clock(hooks, graph, disturbance))
    assert list(benchmark.by_rows) == [1, BATCH_ROWS]
    for pairs in benchmark.by_rows.values():
        assert (pairs.hooks, pairs.graph, pairs.speedup) == (hooks, graph, hooks / graph)
    assert benchmark.speedup == pytest.approx(hooks / graph)
    assert benchmark.pays == (graph < hooks)


@pytest.mark.parametrize("seconds", [0.001, 0.1, 0.5, 20.0])
def test_bounded(chain: LoadedModel, plan: Plan, seconds: float) -> None:
    """A start does not wait for long: pairs end by number and by time, and a batch that would take long is left out."""
    clock = Clock(seconds, seconds)
    benchmark = measure(chain, plan, clock)
    assert clock.runs.count("hooks") <= 2 * (MAX_PAIRS + 1)
    # Only hooks, for the graph is measured alone as well: half of the time of pairs.
    assert clock.runs.count("hooks") * seconds <= 2 * (PAIRS_S / 2 + 2 * seconds)
    assert (benchmark.several is None) == (seconds > 0.4)

"""Hooks and graphs measured in turn, by a clock that only forwards move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from layertap.models.compiled.benchmark import BATCH_ROWS, MAX_PAIRS, PAIRS_S, PlanBenchmark, measure_plan
from layertap.models.compiled.compiled_plan import PlanGraphs
from layertap.models.devices.costs import MAX_FORWARD_S
from layertap.models.loaded_model import LoadedModel
from layertap.models.planner import make_plan
from layertap.models.selection.plan import Plan
from layertap.models.selection.selectors import parse_selector
from tests.conftest import net_spec
from tests.loading import load_model


@dataclass
class Clock:
    """Moves on by what a forward takes; every seventh forward of any kind takes ``disturbance`` times as long."""

    hooks: float
    graph: float
    disturbance: float = 1.0
    now: float = 0.0
    runs: list[str] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)  # of batches that graphs ran

    def run(self, kind: str) -> None:
        self.runs.append(kind)
        seconds = {"hooks": self.hooks, "graph": self.graph}[kind]
        self.now += seconds * (1.0 if len(self.runs) % 7 else self.disturbance)


class Ticking:
    """A graph that moves a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self._clock.run("graph")
        self._clock.rows.add(len(inputs[0]))
        return [torch.zeros(len(inputs[0]), 5)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(net_spec("Chain"), 1, 1)


@pytest.fixture
def plan(model: LoadedModel) -> Plan:
    return make_plan([parse_selector("head")], model.catalog)


def measure(model: LoadedModel, plan: Plan, clock: Clock) -> PlanBenchmark:
    """The benchmark, but for the graph's own costs, which are of real time."""
    captures, names = tuple(plan.captures), tuple(spec.name for spec in model.inputs)
    graphs = PlanGraphs(captures, names, Ticking(clock), Ticking(clock))
    with model.module.register_forward_pre_hook(lambda *_: clock.run("hooks")):
        return measure_plan(model, plan, graphs, lambda: clock.now)


@pytest.mark.parametrize(("hooks", "graph"), [(0.25, 0.125), (0.125, 0.25), (2**-10, 2**-11)])
@pytest.mark.parametrize("disturbance", [1.0, 16.0])
def test_seconds(model: LoadedModel, plan: Plan, hooks: float, graph: float, disturbance: float) -> None:
    """Forwards that something disturbs change nothing."""
    benchmark = measure(model, plan, Clock(hooks, graph, disturbance))
    assert list(benchmark.by_rows) == [1, BATCH_ROWS]
    for pairs in benchmark.by_rows.values():
        assert (pairs.hooks, pairs.graph, pairs.speedup) == (hooks, graph, hooks / graph)
    assert benchmark.speedup == pytest.approx(hooks / graph)
    assert benchmark.pays == (graph < hooks)


def test_costs_are_of_several_rows_too(model: LoadedModel, plan: Plan) -> None:
    """What a row more costs is measured, also where no pairs of larger batches are: rows of a graph never meet."""
    clock = Clock(MAX_FORWARD_S, MAX_FORWARD_S)
    assert list(measure(model, plan, clock).by_rows) == [1]
    assert max(clock.rows) > 1


def test_in_turn(model: LoadedModel, plan: Plan) -> None:
    """Each pair has one of both, and every other pair begins with the graph, so that neither always comes second."""
    clock = Clock(0.25, 0.125)
    measure(model, plan, clock)
    pairs = list(_list_pairs(clock.runs))
    assert pairs[:5] == [("hooks", "graph")] * 2 + [("graph", "hooks"), ("hooks", "graph"), ("graph", "hooks")]


def _list_pairs(runs: list[str]) -> Iterator[tuple[str, str]]:
    return zip(runs[::2], runs[1::2], strict=False)


@pytest.mark.parametrize("seconds", [0.001, 0.1, 0.5, 20.0])
def test_bounded(model: LoadedModel, plan: Plan, seconds: float) -> None:
    """A start does not wait for long: pairs end by number and by time, and a batch that would take long is left out."""
    clock = Clock(seconds, seconds)
    benchmark = measure(model, plan, clock)
    assert clock.runs.count("hooks") <= 2 * (MAX_PAIRS + 1)
    # Only hooks, for the graph is measured alone as well: half of the time of pairs.
    assert clock.runs.count("hooks") * seconds <= 2 * (PAIRS_S / 2 + 2 * seconds)
    assert (benchmark.several is None) == (seconds > 0.4)

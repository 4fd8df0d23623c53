"""Benchmarks of warm plans that are kept from start to start."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layertap.models.compiled.benchmark import (
    BATCH_ROWS,
    MAX_PAIRS,
    PAIRS_S,
    PairedSeconds,
    PlanBenchmark,
    keep_benchmark,
    measure_plan,
    read_benchmark,
)
from layertap.models.compiled.compiled_plan import PlanGraphs
from layertap.models.devices.costs import ForwardSeconds
from layertap.models.loaded_model import LoadedModel
from layertap.models.planner import make_plan
from layertap.models.selection.plan import Plan
from layertap.models.selection.selectors import parse_selector
from tests.conftest import net_spec
from tests.loading import load_model

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
def test_damaged_file(tmp_path: Path, text: str) -> None:
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
def model() -> LoadedModel:
    return load_model(net_spec("Chain"), 1, 1)


@pytest.fixture
def plan(model: LoadedModel) -> Plan:
    return make_plan([parse_selector("head")], model.catalog)


def measure(model: LoadedModel, plan: Plan, clock: Clock) -> PlanBenchmark:
    """The benchmark, but for the graph's own costs, which are of real time."""
    captures, names = tuple(plan.captures), tuple(spec.name for spec in model.inputs)
    graphs = PlanGraphs(captures, names, clock, clock)
    with model.module.register_forward_pre_hook(lambda *_: clock.tick("hooks")):
        return measure_plan(model, plan, graphs, lambda: clock.now)


@pytest.mark.parametrize(("hooks", "graph"), [(0.25, 0.125), (0.125, 0.25)])
@pytest.mark.parametrize("disturbance", [1.0, 16.0])
def test_seconds(model: LoadedModel, plan: Plan, hooks: float, graph: float, disturbance: float) -> None:
    """Forwards that something disturbs change nothing."""
    benchmark = measure(model, plan, Clock(hooks, graph, disturbance))
    assert list(benchmark.by_rows) == [1, BATCH_ROWS]
    for pairs in benchmark.by_rows.values():
        assert (pairs.hooks, pairs.graph, pairs.speedup) == (hooks, graph, hooks / graph)
    assert benchmark.speedup == pytest.approx(hooks / graph)
    assert benchmark.pays == (graph < hooks)


@pytest.mark.parametrize("seconds", [0.001, 0.1, 0.5, 20.0])
def test_bounded(model: LoadedModel, plan: Plan, seconds: float) -> None:
    """A start does not wait for long: pairs end by number and by time, and a batch that would take long is left out."""
    clock = Clock(seconds, seconds)
    benchmark = measure(model, plan, clock)
    assert clock.runs.count("hooks") <= 2 * (MAX_PAIRS + 1)
    # Only hooks, for the graph is measured alone as well: half of the time of pairs.
    assert clock.runs.count("hooks") * seconds <= 2 * (PAIRS_S / 2 + 2 * seconds)
    assert (benchmark.several is None) == (seconds > 0.4)

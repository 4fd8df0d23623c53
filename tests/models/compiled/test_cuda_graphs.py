"""Batches filled up to a kept size and replayed: everyone's rows, in memory that lasts; on the CPU.

What a GPU would keep is made here by running the graph again on the same memory: all but ``torch.cuda`` is the real
thing. ``tests/gpu`` captures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from layertap.models.compiled.graphs import CudaGraph
from layertap.models.compiled.prepare import check_against_hooks
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.compiled_plan import PlanGraphs, WarmError
from layertap.models.run.loaded_model import LoadedModel
from tests.conftest import net_spec
from tests.loading import load_model
from tests.nets import batch
from tests.oracle import record

SIZES = (1, 4, 8)
LAYERS = ("conv", "relu#0", "head")


class Counted:
    """A graph that counts what it runs."""

    def __init__(self, run: Callable[[Tensor], list[Tensor]]) -> None:
        self.rows: list[int] = []
        self._run = run

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self.rows.append(len(inputs[0]))
        return self._run(*inputs)


class Again:
    """Runs a graph on the memory it was made for and writes to the memory that came of it, as a CUDA graph does."""

    def __init__(self, graph: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        self._graph, self._inputs, self._outputs = graph, inputs, outputs

    def replay(self) -> None:
        for place, value in zip(self._outputs, self._graph.run(list(self._inputs)), strict=True):
            place.copy_(value)


def kept(graph: Any, shape: tuple[int, ...], rows: int, pool: Tensor | None = None) -> CudaGraph:
    """A replay of so many rows."""
    inputs = (torch.full((rows, *shape), torch.nan),)
    outputs = tuple(torch.full_like(value, torch.nan) for value in graph.run(list(inputs)))
    return CudaGraph(inputs, outputs, Again(graph, inputs, outputs).replay, pool)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(net_spec("Chain"), 2, 1)


@pytest.fixture
def plan(model: LoadedModel) -> Plan:
    return make_plan([parse_selector(text) for text in LAYERS], model.catalog)


@pytest.fixture
def graphs(model: LoadedModel, plan: Plan) -> PlanGraphs:
    """Graphs that run the model with hooks of their own, and replays of them for each replica."""
    captures = tuple(result.capture for result in plan.results)

    def run(rows: Tensor) -> list[Tensor]:
        seen = record(model.module, rows)
        return [seen[each.point.layer, each.point.call, each.point.path, each.point.site] for each in captures]

    one, several = Counted(run), Counted(run)
    made = PlanGraphs(captures, tuple(spec.name for spec in model.inputs), one, several)
    known = {
        own: {size: kept(one if size == 1 else several, model.shapes[0], size) for size in reversed(SIZES)}
        for own in model.replicas
    }
    one.rows.clear()
    several.rows.clear()
    return replace(made, cuda_graphs=known)


def ran(graphs: PlanGraphs) -> list[int]:
    assert isinstance(graphs.single_row, Counted)
    assert isinstance(graphs.batch, Counted)
    return [*graphs.single_row.rows, *graphs.batch.rows]


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 4), (4, 4), (9, 9)])
def test_filled_up(model: LoadedModel, plan: Plan, graphs: PlanGraphs, rows: int, size: int) -> None:
    """A batch runs in the next size, one that is larger than all as it is; its rows are those of hooks."""
    part = batch(model.inputs, rows, seed=rows)
    share = RequestSlice(0, rows, plan.captures)
    found = model.run(model.replicas[0], [part], [share], graphs=graphs).select(share)
    assert ran(graphs) == [size]
    seen = record(model.module, *part.values())
    for capture in graphs.captures:
        expected = seen[capture.point.layer, capture.point.call, capture.point.path, capture.point.site]
        torch.testing.assert_close(found[capture].values, expected)


def test_results_last(model: LoadedModel, plan: Plan, graphs: PlanGraphs) -> None:
    """What one batch gave is not overwritten by the next of its size, nor is what was sent."""
    parts = [batch(model.inputs, 3, seed=seed) for seed in (1, 2)]
    sent = [{name: value.clone() for name, value in part.items()} for part in parts]
    share = RequestSlice(0, 3, plan.captures)
    one, other = [model.run(model.replicas[0], [part], [share], graphs=graphs).select(share) for part in parts]
    (again,) = [model.run(model.replicas[0], [part], [share], graphs=graphs).select(share) for part in parts[:1]]
    for capture in plan.captures:
        assert torch.equal(one[capture].values, again[capture].values)
        assert not torch.equal(one[capture].values, other[capture].values)
    assert all(torch.equal(part[name], kept[name]) for part, kept in zip(parts, sent, strict=True) for name in part)


def test_rows_of_several_requests(model: LoadedModel, plan: Plan, graphs: PlanGraphs) -> None:
    """Each gets its own rows of a batch that was filled up."""
    pieces = [batch(model.inputs, count, seed=count) for count in (1, 3, 2)]
    shares = [RequestSlice(0, 1, plan.captures), RequestSlice(1, 4, plan.captures), RequestSlice(4, 6, plan.captures)]
    taken = model.run(model.replicas[1], pieces, shares, graphs=graphs)
    assert ran(graphs) == [8]
    for piece, share in zip(pieces, shares, strict=True):
        seen = record(model.module, *piece.values())
        for capture, found in taken.select(share).items():
            expected = seen[capture.point.layer, capture.point.call, capture.point.path, capture.point.site]
            torch.testing.assert_close(found.values, expected)


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_compared_with_hooks(model: LoadedModel, plan: Plan, graphs: PlanGraphs, shift: float) -> None:
    """Replays are compared with the hooked forward: one that gives other numbers is found, for any of its sizes."""
    wrong = Counted(lambda rows: [value + shift for value in graphs.batch.run([rows])])
    own = model.replicas[0]
    known = {size: kept(wrong if size == 8 else graphs.batch, model.shapes[0], size) for size in SIZES}
    changed = replace(graphs, cuda_graphs={own: known})
    check_against_hooks(model, plan, changed, own, (1, 2, 4))
    if not shift:
        check_against_hooks(model, plan, changed, own, (5, 8))
        return
    with pytest.raises(WarmError, match="other numbers"):
        check_against_hooks(model, plan, changed, own, (1, 2, 5))

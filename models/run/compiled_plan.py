"""A warm plan with compiled graphs. ``CompiledPlan`` is plain data and may be sent to another process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from layertap.models.catalog.catalog import Costs
from layertap.models.catalog.row_tensor import RowTensor, Span
from layertap.models.errors import LayertapError
from layertap.models.plan.plan import Capture, Plan
from layertap.models.run.batch_slices import BatchActivations, RequestSlice
from layertap.models.run.reduction import Reduced, ReducedTensor, own_memory
from layertap.models.run.replica import Replica


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """One of a model's warm plans that graphs answer."""

    index: int  # among the model's warm plans
    captures: tuple[Capture, ...]  # what its graphs return
    costs: Costs  # of a forward by a graph
    hooked_costs: Costs  # of a forward with hooks, for the same captures

    def covers(self, plan: Plan) -> bool:
        """Whether its graphs return every capture of a plan that has no interventions or objective."""
        return not plan.resolved_interventions and plan.objective is None and plan.captures <= frozenset(self.captures)


def find_compiled_plan(compiled: Iterable[CompiledPlan | None], plan: Plan) -> CompiledPlan | None:
    """The cheapest compiled plan that covers a plan; None if the model itself has to run."""
    covering = [each for each in compiled if each is not None and each.covers(plan)]
    return min(covering, key=lambda each: each.costs.estimate_seconds(1), default=None)


class WarmError(LayertapError):
    """There is no graph; ``detail`` says why."""


class Graph(Protocol):
    """A loaded graph; several threads may run it, unless it was captured for one replica."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The graph's outputs for its inputs."""


@dataclass(frozen=True, eq=False)
class PlanGraphs:
    """Graphs that return ``captures``, in order, for a model's ``inputs``, by name."""

    captures: tuple[Capture, ...]
    inputs: tuple[str, ...]
    single_row: Graph
    batch: Graph
    cuda_graphs: Mapping[Replica, Mapping[int, Graph]] = field(default_factory=dict)  # captured, by number of rows

    def get_padded_rows(self, rows: int, replica: Replica) -> int:
        """The number of rows to pad a replica's batch to: the smallest size with a CUDA graph; its own if none fits."""
        return min((size for size in self.cuda_graphs.get(replica, ()) if size >= rows), default=rows)

    def run(
        self, batch: Mapping[str, Tensor], slices: Iterable[RequestSlice], rows: int, replica: Replica | None = None
    ) -> BatchActivations:
        """The captures of the requests in a batch of ``rows`` rows, on the device; raises what the graph raises."""
        captured = self.cuda_graphs.get(replica, {}) if replica else {}
        graph = captured.get(rows) or (self.single_row if rows == 1 else self.batch)
        with torch.no_grad():
            tensors = iter(graph.run([batch[name] for name in self.inputs]))
        results = {each: Reduced(next(tensors), next(tensors) if each.is_scaled else None) for each in self.captures}
        return BatchActivations(
            {
                (capture, each.span): own_memory(select_rows(results[capture], capture, each.span))
                for each in slices
                for capture in each.captures
            }
        )


def select_rows(reduced: ReducedTensor, capture: Capture, span: Span) -> ReducedTensor:
    """Some rows of a batch's result; a view where its rows are on axis 0."""
    values = RowTensor(reduced.values, capture.reduced_info).select(span).value.contiguous()
    entries, (start, stop) = capture.reduced_info.entries_per_row, span
    return Reduced(values, None if reduced.scale is None else reduced.scale[start * entries : stop * entries])

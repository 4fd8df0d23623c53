"""A warm plan with compiled graphs. ``CompiledPlan`` is plain data and may be sent to another process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from layertap.models.catalog.catalog import Costs
from layertap.models.errors import LayertapError
from layertap.models.plan.plan import Capture, Plan
from layertap.models.run.batch_slices import BatchActivations
from layertap.models.run.costs import ONLY_FIGURES, Figure, ForwardSeconds
from layertap.models.run.reduction import ReducedTensor, own_memory
from layertap.models.run.replica import Replica

if TYPE_CHECKING:
    from layertap.models.compiled.cuda_graphs import CudaGraphs

BATCH_ROWS = 8  # rows of the larger batch


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """One of a model's warm plans, by index: the captures that its graphs return, and their costs."""

    index: int
    captures: tuple[Capture, ...]
    costs: Costs

    def covers(self, plan: Plan) -> bool:
        """Whether its graphs return every capture of a plan that has no interventions or objective."""
        return not plan.resolved_interventions and plan.objective is None and plan.captures <= frozenset(self.captures)


def find_compiled_plan(compiled: Iterable[CompiledPlan | None], plan: Plan) -> CompiledPlan | None:
    """The cheapest compiled plan that covers a plan; None if the model itself has to run."""
    covering = [each for each in compiled if each is not None and each.covers(plan)]
    return min(covering, key=lambda each: each.costs.estimate_seconds(1), default=None)


@dataclass(frozen=True)
class PairedSeconds:
    """Seconds of a batch with hooks and by a graph, run in pairs: the medians of many pairs.

    ``speedup`` is the median of the pairs' ratios, hooks over graph.
    """

    __pydantic_config__ = ONLY_FIGURES

    hooks: Figure
    graph: Figure
    speedup: Figure


@dataclass(frozen=True)
class PlanBenchmark:
    """The times of one row and of ``BATCH_ROWS`` rows (None if these would take too long), on one thread.

    ``costs`` is a reading of the graph alone.
    """

    __pydantic_config__ = ONLY_FIGURES

    one: PairedSeconds
    several: PairedSeconds | None
    costs: ForwardSeconds

    @property
    def by_rows(self) -> dict[int, PairedSeconds]:
        """The measured pairs, by batch size."""
        return {rows: pairs for rows, pairs in ((1, self.one), (BATCH_ROWS, self.several)) if pairs}

    @property
    def speedup(self) -> float:
        """The graph's speedup over hooks: the geometric mean over both batch sizes."""
        return geometric_mean(pairs.speedup for pairs in self.by_rows.values())

    @property
    def pays(self) -> bool:
        """Whether the graph is faster than hooks."""
        return self.speedup > 1


class WarmError(LayertapError):
    """There is no graph; ``detail`` says why."""


class Graph(Protocol):
    """A loaded graph; several threads may run it."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The graph's outputs for its inputs."""


@dataclass(frozen=True, eq=False)
class PlanGraphs:
    """Graphs that return ``captures``, in order, for a model's ``inputs``, by name.

    ``cuda_graphs``: CUDA graphs of them for some batch sizes, by replica.
    """

    captures: tuple[Capture, ...]
    inputs: tuple[str, ...]
    single_row: Graph
    batch: Graph
    cuda_graphs: Mapping[Replica, CudaGraphs] = field(default_factory=dict)

    def get_padded_rows(self, rows: int, replica: Replica) -> int:
        """The number of rows to pad a replica's batch to."""
        graphs = self.cuda_graphs.get(replica)
        return graphs.get_padded_rows(rows) if graphs else rows

    def run(self, batch: Mapping[str, Tensor], rows: int, replica: Replica | None = None) -> BatchActivations:
        """All captures of a batch of ``rows`` rows, on the device; raises what the graph raises."""
        inputs = [batch[name] for name in self.inputs]
        cuda_graphs = self.cuda_graphs.get(replica) if replica else None
        graph = self.single_row if rows == 1 else self.batch
        with torch.no_grad():
            tensors = iter(cuda_graphs.run(inputs) if cuda_graphs and rows in cuda_graphs else graph.run(inputs))
        results = (ReducedTensor(next(tensors), next(tensors) if each.is_scaled else None) for each in self.captures)
        return BatchActivations(
            {(capture, (0, rows)): own_memory(each) for capture, each in zip(self.captures, results, strict=True)}
        )

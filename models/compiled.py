"""A plan's captures as compiled graphs: run in place of a hooked forward, with no hook on the model.

Made by ``layertap.models.warm``; here they only run. One graph takes a single row, another any number of rows above
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from layertap.models.catalog import Costs
from layertap.models.plan import Capture, Plan
from layertap.models.pooling import Reduced, owned
from layertap.models.replays import Replays
from layertap.models.replica import Replica
from layertap.models.union import Taken

Rows = Mapping[str, Tensor]


class Graph(Protocol):
    """What runs a compiled graph; several threads may."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The graph's outputs for its inputs."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """Graphs that give captures, in their order, for the inputs of a model by name; ``costs`` are a graph's own.

    ``replays``: what a GPU keeps of them for some sizes of batches, by replica.
    """

    captures: tuple[Capture, ...]
    inputs: tuple[str, ...]
    one: Graph
    several: Graph
    costs: Costs
    replays: Mapping[Replica, Replays] = field(default_factory=dict)

    def covers(self, plan: Plan) -> bool:
        """Whether it gives all that a plan wants."""
        return not plan.edits and plan.goal is None and plan.captures <= frozenset(self.captures)

    def size(self, rows: int, own: Replica) -> int:
        """To how many rows a replica's batch is best filled up."""
        known = self.replays.get(own)
        return known.size(rows) if known else rows

    def taken(self, batch: Rows, rows: int, own: Replica | None = None) -> Taken:
        """All captures of a batch of so many rows, on the device; raises what the graph does."""
        inputs = [batch[name] for name in self.inputs]
        known = self.replays.get(own) if own else None
        graph = self.one if rows == 1 else self.several
        with torch.no_grad():
            tensors = iter(known.run(inputs) if known and rows in known else graph.run(inputs))
        return Taken({(capture, (0, rows)): _next(tensors, capture) for capture in self.captures})


def _next(tensors: Iterator[Tensor], capture: Capture) -> Reduced:
    values = next(tensors)
    found = Reduced(values, next(tensors) if capture.is_scaled else None)
    return owned(found, values.new_empty(0))


def graph_for(known: Iterable[Compiled | None], plan: Plan) -> Compiled | None:
    """The cheapest that gives what a plan wants; None where the model itself has to run."""
    fitting = [each for each in known if each is not None and each.covers(plan)]
    return min(fitting, key=lambda each: each.costs.seconds(1), default=None)

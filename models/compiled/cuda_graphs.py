"""What a compiled graph starts on a GPU for a batch of one size, kept and started again in one go (a CUDA graph).

Made by ``layertap.models.compiled.cuda_graph_capture``; here it only runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from torch import Tensor


class Replayable(Protocol):
    """What reads memory where it was when this was made, and writes there."""

    def replay(self) -> None:
        """Begin it all again."""


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """A batch of so many rows: the memory it is read from, and that of what comes of it.

    ``keep_alive`` is anything else that must stay where it is, the graph's weights for one.
    """

    rows: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    graph: Replayable
    keep_alive: object = None


class CudaGraphs:
    """A replica's, by size. What they compute with is the same memory, so that one runs at a time."""

    def __init__(self, graphs: Iterable[CudaGraph]) -> None:
        self._graphs = {each.rows: each for each in sorted(graphs, key=lambda each: each.rows)}
        self._lock = Lock()

    def __contains__(self, rows: int) -> bool:
        return rows in self._graphs

    def get_padded_rows(self, rows: int) -> int:
        """To how many rows such a batch is filled up; as many as it has where it is larger than all."""
        return next((size for size in self._graphs if size >= rows), rows)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for a batch of a known size, in memory that no later one overwrites."""
        graph = self._graphs[len(inputs[0])]
        with self._lock:
            for place, given in zip(graph.inputs, inputs, strict=True):
                place.copy_(given)
            graph.graph.replay()
            return [output.clone() for output in graph.outputs]

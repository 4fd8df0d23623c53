"""CUDA graphs of a warm plan: captured for some batch sizes, compared with the hooked forward, or left out.

Made where an entry of ``warm`` has ``cuda_graphs``; what is known of it stands in docs/explanation/gpu.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from layertap.models.compiled.benchmark import check_against_hooks
from layertap.models.compiled.compile import open_graph
from layertap.models.compiled.compiled_plan import Graph, PlanGraphs, WarmError
from layertap.models.devices import devices, transfer
from layertap.models.errors import LayertapError
from layertap.models.inputs.noise import make_noise
from layertap.models.loaded_model import LoadedModel
from layertap.models.replica import Replica
from layertap.models.selection.plan import Plan

log = logging.getLogger("layertap")
WARMUP_ROUNDS = 3  # forwards before one is captured: what is done once only, tuning and loading, must not be in it


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """A batch of so many rows: the memory it is read from, that of what comes of it, and what computes it again.

    ``keep_alive`` is anything else that must stay where it is, the graph's weights for one.
    """

    rows: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], object]
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
            for memory, given in zip(graph.inputs, inputs, strict=True):
                memory.copy_(given)
            graph.replay()
            return [output.clone() for output in graph.outputs]


def attach_cuda_graphs(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, sizes: Sequence[int], paths: Mapping[str, Path]
) -> PlanGraphs:
    """Graphs with CUDA graphs for batches of so many rows, for each replica; without them where that fails.

    One line says why, then. ``paths`` are the compiled files, of a single row and of several.
    """
    try:
        if model.device.type != "cuda":
            raise WarmError("there is no GPU")
        # Runners of their own: others ask events whether earlier runs are over, which a stream that captures may not.
        # Their weights are in memory once more.
        runners = {
            kind: open_graph(paths[kind], 1, model.device, single=True) for kind in {get_kind(rows) for rows in sizes}
        }
        attached = replace(graphs, cuda_graphs=capture_cuda_graphs(model, graphs, sizes, runners))
        for replica in model.replicas:
            check_against_hooks(model, plan, attached, replica, _list_checked_rows(sorted(set(sizes))))
    except Exception as error:  # a capture may end in anything; graphs run without it as well
        reason = error.detail if isinstance(error, LayertapError) else type(error).__name__
        fields = {"model": model.spec.name, "reason": reason}
        log.warning("a warm plan runs without CUDA graphs", extra={"fields": fields})
        return graphs
    return attached


def _list_checked_rows(sizes: Sequence[int]) -> list[int]:
    """Numbers of rows to be compared: those that fill a size, and those that leave most of it empty."""
    return sorted({*sizes, *(below + 1 for below in (0, *sizes[:-1]))})


def capture_cuda_graphs(
    model: LoadedModel, graphs: PlanGraphs, sizes: Sequence[int], runners: Mapping[str, Graph]
) -> dict[Replica, CudaGraphs]:
    """CUDA graphs of what runners do, of a single row and of several, for each replica; raises what a capture does."""
    cuda_graphs = {}
    with devices.use_device(model.device), torch.no_grad():
        for replica in model.replicas:
            pool, stream = torch.cuda.graph_pool_handle(), transfer.create_stream(model.device)
            captured = [
                _capture_graph(runners[get_kind(rows)], _make_inputs(model, graphs, rows), pool, stream)
                for rows in sorted(set(sizes), reverse=True)  # the largest first: others then find memory in the pool
            ]
            cuda_graphs[replica] = CudaGraphs(captured)
    return cuda_graphs


def get_kind(rows: int) -> str:
    """Which of a plan's graphs takes so many rows."""
    return "one" if rows == 1 else "several"


def _make_inputs(model: LoadedModel, graphs: PlanGraphs, rows: int) -> tuple[Tensor, ...]:
    """So many rows in memory of their own, which every replay will read."""
    batch = make_noise(model.inputs, model.device, model.dtype, rows)
    return tuple(batch[name] for name in graphs.inputs)


def _capture_graph(runner: Graph, inputs: tuple[Tensor, ...], pool: Any, stream: torch.cuda.Stream) -> CudaGraph:
    stream.wait_stream(torch.cuda.current_stream())  # what the inputs were written by
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_ROUNDS):
            runner.run(list(inputs))
        stream.synchronize()
        # Other threads go on meanwhile, and may ask the device for memory: that must not end the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = runner.run(list(inputs))
    return CudaGraph(len(inputs[0]), inputs, tuple(outputs), graph.replay, runner)

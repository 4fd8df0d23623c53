"""CUDA graphs of a warm plan: captured for some batch sizes, and compared with the hooked forward.

Used if an entry of ``warm`` has ``cuda_graphs``; docs/explanation/gpu.md explains them.
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
from layertap.models.devices import devices, transfer
from layertap.models.errors import LayertapError
from layertap.models.inputs.noise import make_noise
from layertap.models.plan.plan import Plan
from layertap.models.run.compiled_plan import Graph, PlanGraphs, WarmError
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.replica import Replica

log = logging.getLogger("layertap")
WARMUP_ROUNDS = 3  # forwards before the capture, which must not contain one-time work such as tuning and loading


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """A captured graph for batches of ``rows`` rows: its input and output memory, and the call that replays it.

    ``keep_alive``: anything else that must stay in memory, such as the graph's weights.
    """

    rows: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], object]
    keep_alive: object = None


class CudaGraphs:
    """A replica's CUDA graphs by batch size. They share memory, so that only one runs at a time."""

    def __init__(self, graphs: Iterable[CudaGraph]) -> None:
        self._graphs = {each.rows: each for each in sorted(graphs, key=lambda each: each.rows)}
        self._lock = Lock()

    def __contains__(self, rows: int) -> bool:
        return rows in self._graphs

    def get_padded_rows(self, rows: int) -> int:
        """The smallest captured size that holds a batch; the batch's own size if it is larger than all."""
        return next((size for size in self._graphs if size >= rows), rows)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for a batch of a captured size, in memory that later runs do not overwrite."""
        graph = self._graphs[len(inputs[0])]
        with self._lock:
            for memory, given in zip(graph.inputs, inputs, strict=True):
                memory.copy_(given)
            graph.replay()
            return [output.clone() for output in graph.outputs]


def attach_cuda_graphs(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, sizes: Sequence[int], paths: Mapping[str, Path]
) -> PlanGraphs:
    """The graphs with CUDA graphs for the batch ``sizes``, for each replica; if that fails, without them.

    A failure is logged. ``paths`` are the compiled files for a single row and for several.
    """
    try:
        if model.device.type != "cuda":
            raise WarmError("there is no GPU")
        # Separate runners: the others query events for earlier runs, which is not allowed while a stream captures.
        # They hold a second copy of the weights.
        runners = {
            kind: open_graph(paths[kind], 1, model.device, single=True) for kind in {get_kind(rows) for rows in sizes}
        }
        attached = replace(graphs, cuda_graphs=capture_cuda_graphs(model, graphs, sizes, runners))
        for replica in model.replicas:
            check_against_hooks(model, plan, attached, replica, _list_checked_rows(sorted(set(sizes))))
    except Exception as error:  # a capture may raise anything; graphs also run without it
        reason = error.detail if isinstance(error, LayertapError) else type(error).__name__
        fields = {"model": model.spec.name, "reason": reason}
        log.warning("a warm plan runs without CUDA graphs", extra={"fields": fields})
        return graphs
    return attached


def _list_checked_rows(sizes: Sequence[int]) -> list[int]:
    """The batch sizes to compare: each captured size, and the smallest batch that is padded to it."""
    return sorted({*sizes, *(below + 1 for below in (0, *sizes[:-1]))})


def capture_cuda_graphs(
    model: LoadedModel, graphs: PlanGraphs, sizes: Sequence[int], runners: Mapping[str, Graph]
) -> dict[Replica, CudaGraphs]:
    """Capture CUDA graphs of the runners, for each size and replica; raises what a capture raises."""
    cuda_graphs = {}
    with devices.use_device(model.device), torch.no_grad():
        for replica in model.replicas:
            pool, stream = torch.cuda.graph_pool_handle(), transfer.create_stream(model.device)
            captured = [
                _capture_graph(runners[get_kind(rows)], _make_inputs(model, graphs, rows), pool, stream)
                for rows in sorted(set(sizes), reverse=True)  # the largest first: the others reuse its memory pool
            ]
            cuda_graphs[replica] = CudaGraphs(captured)
    return cuda_graphs


def get_kind(rows: int) -> str:
    """Which of a plan's two graphs a batch of ``rows`` rows uses."""
    return "one" if rows == 1 else "several"


def _make_inputs(model: LoadedModel, graphs: PlanGraphs, rows: int) -> tuple[Tensor, ...]:
    """``rows`` rows of noise in their own memory, which every replay reads."""
    batch = make_noise(model.inputs, model.device, model.dtype, rows)
    return tuple(batch[name] for name in graphs.inputs)


def _capture_graph(runner: Graph, inputs: tuple[Tensor, ...], pool: Any, stream: torch.cuda.Stream) -> CudaGraph:
    stream.wait_stream(torch.cuda.current_stream())  # it may still be writing the inputs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_ROUNDS):
            runner.run(list(inputs))
        stream.synchronize()
        # Other threads keep running and may allocate device memory: that must not invalidate the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = runner.run(list(inputs))
    return CudaGraph(len(inputs[0]), inputs, tuple(outputs), graph.replay, runner)

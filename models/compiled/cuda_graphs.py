"""CUDA graphs of a warm plan, captured for some batch sizes; docs/explanation/gpu.md explains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layertap.models.compiled.compile import Kind, get_kind
from layertap.models.devices import devices, transfer
from layertap.models.inputs.noise import make_noise
from layertap.models.run.compiled_plan import Graph, PlanGraphs
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.replica import Replica

WARMUP_ROUNDS = 3  # forwards before the capture, which must not contain one-time work such as tuning and loading


@dataclass(frozen=True, eq=False)
class CudaGraph:
    """A captured graph for batches of one size; only the replica's thread may run it."""

    inputs: tuple[Tensor, ...]  # the memory that every replay reads
    outputs: tuple[Tensor, ...]  # the memory that every replay writes
    replay: Callable[[], object]
    runner: object = None  # what must stay in memory: it holds the graph's weights

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for a batch of the captured size, in memory that later runs do not overwrite."""
        for memory, given in zip(self.inputs, inputs, strict=True):
            memory.copy_(given)
        self.replay()
        return [output.clone() for output in self.outputs]


def capture_cuda_graphs(
    model: LoadedModel, graphs: PlanGraphs, sizes: Sequence[int], runners: Mapping[Kind, Graph]
) -> dict[Replica, dict[int, CudaGraph]]:
    """Capture CUDA graphs of the runners, for each replica and size; raises what a capture raises."""
    cuda_graphs = {}
    with devices.use_device(model.device), torch.no_grad():
        for replica in model.replicas:
            pool, stream = torch.cuda.graph_pool_handle(), transfer.create_stream(model.device)
            cuda_graphs[replica] = {
                rows: _capture_graph(runners[get_kind(rows)], _make_inputs(model, graphs, rows), pool, stream)
                for rows in sorted(set(sizes), reverse=True)  # the largest first: the others reuse its memory pool
            }
    return cuda_graphs


def _make_inputs(model: LoadedModel, graphs: PlanGraphs, rows: int) -> tuple[Tensor, ...]:
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
    return CudaGraph(inputs, tuple(outputs), graph.replay, runner)

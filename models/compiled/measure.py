"""Batches of a warm plan with hooks and by its graphs, in turn and many times: noise disturbs both alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.compiled.plan_benchmark import BATCH_ROWS, PairedSeconds, PlanBenchmark
from layertap.models.compiled.plan_graphs import PlanGraphs
from layertap.models.devices import costs
from layertap.models.devices.threads import use_threads
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.loaded_model import LoadedModel
from layertap.models.selection.plan import Plan

MAX_PAIRS, PAIRS_S = 40, 6.0  # of a batch with hooks and by a graph, and seconds after which there are no more


def measure_plan(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, clock: Callable[[], float] = time.perf_counter
) -> PlanBenchmark:
    """Run a plan with hooks and by graphs in turn, in the first replica's thread; raises what a forward does.

    ``clock`` gives seconds.
    """
    with torch.no_grad(), use_threads(1):
        one = _measure_pairs(model, plan, graphs, 1, clock)
        fits = max(one.hooks, one.graph) * BATCH_ROWS <= costs.MAX_FORWARD_S
        several = _measure_pairs(model, plan, graphs, BATCH_ROWS, clock) if fits else None

    def run_graph(rows: Mapping[str, Tensor]) -> object:
        count = len(next(iter(rows.values())))
        return model.run(model.replicas[0], [rows], [RequestSlice(0, count, plan.captures)], graphs=graphs)

    row = make_noise_row(model.inputs, model.device, model.dtype)
    return PlanBenchmark(one, several, costs.measure_forward(run_graph, row, model.device, True, model.threads))


def _measure_pairs(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, rows: int, clock: Callable[[], float]
) -> PairedSeconds:
    noise = make_noise(model.inputs, model.device, model.dtype)
    place = torch.arange(rows, device=model.device)
    batch = {name: value[place % len(value)] for name, value in noise.items()}
    share = RequestSlice(0, rows, plan.captures)

    def measure(chosen: PlanGraphs | None) -> float:
        start = clock()
        model.run(model.replicas[0], [batch], [share], graphs=chosen)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return max(clock() - start, 1e-6)

    for chosen in (None, graphs):  # first runs allocate memory, and choose algorithms
        measure(chosen)
    pairs: list[tuple[float, float]] = []
    start = clock()
    while not pairs or (len(pairs) < MAX_PAIRS and clock() - start < PAIRS_S):
        if len(pairs) % 2:
            graph, hooks = measure(graphs), measure(None)
        else:
            hooks, graph = measure(None), measure(graphs)
        pairs.append((hooks, graph))
    hooks, graph = (median(seconds) for seconds in zip(*pairs, strict=True))
    return PairedSeconds(hooks, graph, median(hooks / graph for hooks, graph in pairs))

"""A warm plan's graphs beside the hooked forward: whether both give the same numbers, and what both take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.capture.reduction import ReducedTensor
from layertap.models.compiled.compile import WarmError
from layertap.models.compiled.compiled_plan import PlanGraphs
from layertap.models.compiled.plan_benchmark import BATCH_ROWS, PairedSeconds, PlanBenchmark
from layertap.models.devices import costs
from layertap.models.devices.devices import TOLERANCE, use_threads
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.loaded_model import LoadedModel
from layertap.models.replica import Replica
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
    reading = costs.measure_forward(run_graph, row, model.device, crosses_rows=False, max_threads=model.threads)
    return PlanBenchmark(one, several, reading)


def _measure_pairs(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, rows: int, clock: Callable[[], float]
) -> PairedSeconds:
    noise = make_noise(model.inputs, model.device, model.dtype)
    index = torch.arange(rows, device=model.device)
    batch = {name: value[index % len(value)] for name, value in noise.items()}
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


def check_against_hooks(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, replica: Replica, counts: Sequence[int]
) -> None:
    """WarmError where a graph gives something else than hooks, for batches of so many rows, one after the other."""
    batch = make_noise(model.inputs, model.device, model.dtype)
    batches = []
    for rows in counts:
        index = torch.arange(rows, rows * 2, device=model.device)  # each batch begins with another row
        part = {name: value[index % len(value)] for name, value in batch.items()}
        batches.append((part, RequestSlice(0, rows, plan.captures)))
    with use_threads(model.threads):
        # All graphs first: what one gives must last while others run.
        results = [model.run(replica, [part], [share], graphs=graphs).select(share) for part, share in batches]
        expected = [model.run(replica, [part], [share]).select(share) for part, share in batches]
    for actual, wanted in zip(results, expected, strict=True):
        for capture in plan.captures:
            if not _is_close(actual[capture], wanted[capture], TOLERANCE[model.spec.precision]):
                raise WarmError(f"the compiled graph gives other numbers for {capture.point.layer}")


def _is_close(actual: ReducedTensor, expected: ReducedTensor, tolerance: float) -> bool:
    """Whether results are alike: integers exactly, floats within a tolerance, int8 within that and a step of its scale.

    ``tolerance`` is a part of the largest number.
    """
    found, wanted = actual.values, expected.values
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    step: float | Tensor = 0.0
    if expected.scale is not None and actual.scale is not None:
        step = _align(expected.scale, wanted)
        found, wanted = found * _align(actual.scale, found), wanted * step
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(found, wanted)
    limit = tolerance * (wanted.abs() + wanted.abs().amax()) + step
    same = (found == wanted) | (found.isnan() & wanted.isnan()) | ((found - wanted).abs() <= limit)
    return bool(same.all())


def _align(scale: Tensor, values: Tensor) -> Tensor:
    """Scales, one for each index of axis 0, beside values."""
    return scale.reshape(-1, *[1] * (values.ndim - 1)) if values.ndim else scale

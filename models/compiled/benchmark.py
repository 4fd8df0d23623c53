"""Compare a warm plan's graphs with the hooked forward: whether results are equal, and how long each takes.

The measured times are kept in a file beside the graphs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layertap.models.devices import transfer
from layertap.models.devices.devices import TOLERANCE, describe_speed, use_threads
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.plan.plan import Plan
from layertap.models.run import costs
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.compiled_plan import BATCH_ROWS, PairedSeconds, PlanBenchmark, PlanGraphs, WarmError
from layertap.models.run.costs import read_figures, write_figures
from layertap.models.run.reduction import ReducedTensor
from layertap.models.run.replica import Replica

if TYPE_CHECKING:
    from layertap.models.run.loaded_model import LoadedModel

MAX_PAIRS, PAIRS_S = 40, 6.0  # pairs of a run with hooks and one by a graph; seconds after which no new pair starts
log = logging.getLogger("layertap")
RECIPE = 2  # raise it when the way of measuring changes


def locate_benchmark(paths: Sequence[Path], cuda_graphs: Iterable[int], threads: int, device: torch.device) -> Path:
    """The file for the graphs' benchmark: beside them, named by a digest of everything that affects their times."""
    names = [path.name for path in paths]
    text = json.dumps([RECIPE, names, sorted(cuda_graphs), threads, describe_speed(device)])
    return paths[0].with_name(f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json")


def read_benchmark(path: Path) -> PlanBenchmark | None:
    """The benchmark in a file; None if there is none, or it can't be read."""
    try:
        return read_figures(path, PlanBenchmark)
    except OSError as error:
        log.info("a warm plan's benchmark is not used", extra={"fields": {"reason": type(error).__name__}})
        return None


def keep_benchmark(path: Path, benchmark: PlanBenchmark) -> PlanBenchmark:
    """Store a benchmark for later starts; if another process has stored one meanwhile, use that, so that all agree."""
    kept = read_benchmark(path)
    if kept is not None:
        return kept
    try:
        write_figures(path, asdict(benchmark))
    except OSError as error:
        reason = {"fields": {"reason": type(error).__name__}}
        log.warning("a warm plan's benchmark is not kept: the next start may decide otherwise", extra=reason)
    return benchmark


def measure_plan(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, clock: Callable[[], float] = time.perf_counter
) -> PlanBenchmark:
    """Run a plan with hooks and by graphs in turn, in the first replica's thread; raises what a forward raises.

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
    batch = make_noise(model.inputs, model.device, model.dtype, rows)
    share = RequestSlice(0, rows, plan.captures)

    def measure(chosen: PlanGraphs | None) -> float:
        start = clock()
        model.run(model.replicas[0], [batch], [share], graphs=chosen)
        transfer.synchronize(model.device)
        return max(clock() - start, 1e-6)

    for chosen in (None, graphs):  # first runs allocate memory and select algorithms
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
    """WarmError if graphs and hooks differ for any of the batch sizes ``counts``."""
    batch = make_noise(model.inputs, model.device, model.dtype)
    batches = []
    for rows in counts:
        index = torch.arange(rows, rows * 2, device=model.device)  # each batch begins with another row
        part = {name: value[index % len(value)] for name, value in batch.items()}
        batches.append((part, RequestSlice(0, rows, plan.captures)))
    with use_threads(model.threads):
        # Run all graphs first: later runs must not overwrite an earlier result.
        results = [model.run(replica, [part], [share], graphs=graphs).select(share) for part, share in batches]
        expected = [model.run(replica, [part], [share]).select(share) for part, share in batches]
    for actual, wanted in zip(results, expected, strict=True):
        for capture in plan.captures:
            if not _is_close(actual[capture], wanted[capture], TOLERANCE[model.spec.precision]):
                raise WarmError(f"the compiled graph gives other numbers for {capture.point.layer}")


def _is_close(actual: ReducedTensor, expected: ReducedTensor, tolerance: float) -> bool:
    """Whether results agree: integers exactly, floats within a tolerance, int8 within that plus a step of its scale.

    ``tolerance`` is relative to the value and to the largest value.
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
    """Reshape scales, one for each index of axis 0, to broadcast over values."""
    return scale.reshape(-1, *[1] * (values.ndim - 1)) if values.ndim else scale

"""Prepare a model's warm plans: find or compile their graphs, then compare and measure them beside hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from operator import call
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor

from layertap.models.catalog.catalog import Costs
from layertap.models.compiled.graphs import (
    Kind,
    capture_cuda_graphs,
    compile_captures,
    compute_key,
    get_kind,
    open_folder,
    open_graph,
)
from layertap.models.devices import devices
from layertap.models.devices.devices import TOLERANCE, use_threads
from layertap.models.devices.turns import take_turn
from layertap.models.errors import UNPROVEN, LayertapError, LoadError, RequestError
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.loading import RunForwards, TakeTurn
from layertap.models.plan.plan import Capture, Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Reduction
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.compiled_plan import CompiledPlan, PlanGraphs, WarmError
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import BATCH_ROWS, measure_costs
from layertap.models.run.model_info import ModelInfo
from layertap.models.run.replica import Replica
from layertap.models.run.row_check import has_same_row, select_row
from layertap.models.spec import WarmSpec

Paths = Mapping[Kind, Path]  # of a plan's two graphs
log = logging.getLogger("layertap")
SITES = frozenset({"output", "input"})
KINDS: tuple[Kind, ...] = ("one", "several")
CHECKED_ROWS = (1, 2, 3)  # batch sizes that are compared


def prepare_warm_plans(
    model: LoadedModel,
    folder: Path,
    run_trial: RunForwards = call,
    take_turn: TakeTurn = take_turn,
    *,
    compiles: bool = False,
    earlier: Sequence[CompiledPlan | None] | None = None,
) -> LoadedModel:
    """The model with compiled graphs for its warm plans, from ``folder``; the log says why a plan has none.

    ``run_trial`` runs the comparison and the measurement, on as many threads as the model may use; ``take_turn`` waits
    until no other model is measured. ``compiles``: missing graphs are compiled, which takes minutes. ``earlier``: what
    the first load of the same model came to; nothing is measured then. LoadError if a plan names a layer that does not
    exist.
    """
    compiled: list[CompiledPlan | None] = []
    graphs: list[PlanGraphs | None] = []
    for index, warm in enumerate(model.spec.warm):
        try:
            plan = make_warm_plan(model, warm)
        except RequestError as error:
            raise LoadError(f"warm: {error.detail}", hint=error.hint) from error
        compiled.append(None)
        graphs.append(None)
        if not warm.compile or (earlier is not None and earlier[index] is None):
            continue
        with devices.use_device(model.device), _log_failure(model, "a warm plan runs with hooks"):
            captures = list_captures(model, plan)
            made = _open_graphs(model, plan, captures, _find_files(model, captures, folder, compiles), warm, run_trial)
            if earlier is None:
                with take_turn():
                    hooks, graph = run_trial(partial(measure_plan, model, plan, made))
                if warm.compile != "always":
                    _refuse_slower(hooks, graph)
            compiled[-1] = CompiledPlan(index, captures, graph, hooks) if earlier is None else earlier[index]
            graphs[-1] = made
    return replace(model, compiled=tuple(compiled), graphs=tuple(graphs))


@contextmanager
def _log_failure(model: ModelInfo, consequence: str) -> Iterator[None]:
    """Log whatever is raised inside, by a compiler or a capture too, with what follows from it."""
    try:
        yield
    except Exception as error:
        reason = error.detail if isinstance(error, LayertapError) else f"it can't be compiled ({type(error).__name__})"
        log.warning(consequence, extra={"fields": {"model": model.spec.name, "reason": reason}})


def make_warm_plan(model: ModelInfo, warm: WarmSpec) -> Plan:
    """The plan of an entry of ``warm``; RequestError if there is no such layer."""
    reduction = Reduction(pool=warm.pool, normalize=warm.normalize, dtype=warm.dtype)
    return make_plan([replace(parse_selector(text), reduction=reduction) for text in warm.layers], model.catalog)


def list_captures(model: ModelInfo, plan: Plan) -> tuple[Capture, ...]:
    """A plan's captures in order; WarmError if a graph can't return them."""
    traits = model.catalog.traits
    if devices.is_accelerator(model.device) and (lack := devices.find_lack(model.device, "compile")):
        raise WarmError(lack)
    if traits.state or not traits.deterministic:  # a graph's state changes would not be undone
        raise WarmError("its forwards change the model, or are not deterministic")
    if model.identity.startswith(UNPROVEN):
        raise WarmError("it holds what can't be read, so that a stored graph may be another model's")
    if model.catalog.crosses_rows:
        raise WarmError("rows of this model run one at a time")
    if model.text is not None or model.model_inputs.mask is not None:
        raise WarmError("its rows come in many lengths")
    for capture in plan.captures:
        point, info = capture.point, capture.info
        if point.function or point.site not in SITES or info.row_axis is None or info.crosses_rows or info.single_row:
            raise WarmError(f"a graph does not give {point.text}")
    return tuple(dict.fromkeys(result.capture for result in plan.results))


def _find_files(model: LoadedModel, captures: Sequence[Capture], folder: Path, compiles: bool) -> Paths:
    """The files of a plan's graphs, compiled if need be; raises whatever a compiler raises, WarmError without one."""
    open_folder(folder)
    paths = {kind: folder / f"{compute_key(model, captures, kind)}.pt2" for kind in KINDS}
    for kind, path in paths.items():
        if not path.exists():
            if not compiles:
                raise WarmError("it is not compiled: run 'layertap plan'")
            compile_captures(model, captures, kind, path)
    return paths


def _open_graphs(
    model: LoadedModel, plan: Plan, captures: tuple[Capture, ...], paths: Paths, warm: WarmSpec, run_trial: RunForwards
) -> PlanGraphs:
    """Graphs whose results match the hooks', with CUDA graphs for some batch sizes unless their capture fails."""
    one, several = (open_graph(paths[kind], len(model.replicas), model.device) for kind in KINDS)
    graphs = PlanGraphs(captures, tuple(spec.name for spec in model.inputs), one, several)
    run_trial(partial(check_against_hooks, model, plan, graphs, model.replicas[0], CHECKED_ROWS))
    if warm.cuda_graphs:
        with _log_failure(model, "a warm plan runs without CUDA graphs"):
            return _add_cuda_graphs(model, plan, graphs, sorted(set(warm.cuda_graphs)), paths)
    return graphs


def _add_cuda_graphs(
    model: LoadedModel, plan: Plan, graphs: PlanGraphs, sizes: Sequence[int], paths: Paths
) -> PlanGraphs:
    """The graphs with CUDA graphs for each replica; raises what a capture raises, WarmError if results differ."""
    if lack := devices.find_lack(model.device, "cuda_graphs"):
        raise WarmError(lack)
    # Separate runners: the others query events for earlier runs, which is not allowed while a stream captures.
    # They hold a second copy of the weights.
    runners = {
        kind: open_graph(paths[kind], 1, model.device, single=True) for kind in {get_kind(rows) for rows in sizes}
    }
    captured = replace(graphs, cuda_graphs=capture_cuda_graphs(model, graphs, sizes, runners))
    # Each captured size, and the smallest batch that is padded to it.
    counts = sorted({*sizes, *(below + 1 for below in (0, *sizes[:-1]))})
    for replica in model.replicas:
        check_against_hooks(model, plan, captured, replica, counts)
    return captured


def measure_plan(model: LoadedModel, plan: Plan, graphs: PlanGraphs) -> tuple[Costs, Costs]:
    """The costs of a plan's forward with hooks and by a graph, in the first replica's thread.

    Raises what a forward raises.
    """

    def measure(chosen: PlanGraphs | None, max_threads: int) -> Costs:
        def run(rows: Mapping[str, Tensor]) -> object:
            count = len(next(iter(rows.values())))
            return model.run(model.replicas[0], [rows], [RequestSlice(0, count, plan.captures)], graphs=chosen)

        row = make_noise_row(model.inputs, model.device, model.dtype)
        row_bytes = model.catalog.costs.row_bytes  # a graph takes no more than the whole forward with hooks
        return measure_costs(run, row, model.device, row_bytes, crosses_rows=False, max_threads=max_threads)

    return measure(None, 1), measure(graphs, model.threads)


def _refuse_slower(hooks: Costs, graph: Costs) -> None:
    """WarmError if a graph is not faster than hooks, on one thread, over small and larger batches."""
    ratio = geometric_mean(graph.estimate_seconds(rows) / hooks.estimate_seconds(rows) for rows in (1, BATCH_ROWS))
    if ratio >= 1:
        raise WarmError(f"its graph takes {ratio:.2f} times as long as hooks")


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
    for (_, share), actual, wanted in zip(batches, results, expected, strict=True):
        for capture, row in product(plan.captures, range(share.stop)):
            one, other = (select_row({capture: each[capture]}, row) for each in (wanted, actual))
            if not has_same_row(one, other, TOLERANCE[model.spec.precision]):
                raise WarmError(f"the compiled graph gives other numbers for {capture.point.layer}")

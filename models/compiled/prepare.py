"""Prepare a model's warm plans: find graphs on disk or compile them, then compare and benchmark them against hooks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from operator import call
from pathlib import Path
from threading import Thread
from typing import Protocol, TypeVar

from layertap.models.catalog.catalog import Catalog
from layertap.models.compiled.benchmark import (
    check_against_hooks,
    keep_benchmark,
    locate_benchmark,
    measure_plan,
    read_benchmark,
)
from layertap.models.compiled.compile import (
    OPTIONS,
    compile_graph,
    compute_key,
    export_graph,
    find_compiler,
    open_folder,
    open_graph,
)
from layertap.models.compiled.cuda_graphs import attach_cuda_graphs
from layertap.models.devices import devices
from layertap.models.devices.turns import take_turn
from layertap.models.errors import UNPROVEN, LayertapError, LoadError, RequestError
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.loading import TakeTurn, load_model
from layertap.models.plan.plan import Capture, Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Reduction
from layertap.models.plan.selectors import parse_selector
from layertap.models.run import costs
from layertap.models.run.compiled_plan import CompiledPlan, PlanBenchmark, PlanGraphs, WarmError
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_info import ModelInfo
from layertap.models.sources.python import add_search_folders, list_search_folders
from layertap.models.spec import ModelSpec, WarmSpec

T = TypeVar("T")
log = logging.getLogger("layertap")
SITES = frozenset({"output", "input"})
KINDS = ("one", "several")
REPORT_INTERVAL_S = 15.0  # between two log lines on a graph that takes long
CHECKED_ROWS = (1, 2, 3)  # batch sizes that are compared
CompilerOptions = tuple[ModelSpec, Catalog, Path, int, Sequence[str]]  # arguments of ``compile_warm_plans``
PreparedPlan = tuple[CompiledPlan | None, PlanGraphs | None, PlanBenchmark | None]


class RunTrial(Protocol):
    """Calls a function that runs forwards, in this process or in a fork of it."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Return what the function returns; raises what it raises."""


def prepare_warm_plans(
    model: LoadedModel,
    folder: Path,
    run_trial: RunTrial = call,
    take_turn: TakeTurn = take_turn,
    open_only: bool = False,
) -> LoadedModel:
    """The model with compiled graphs for its warm plans; a plan without graphs is logged with the reason.

    ``run_trial`` runs the comparison and the benchmark, on as many threads as the model may use; ``take_turn`` waits
    until no other model is measured. ``open_only``: a plan that was not compiled and measured before runs with hooks.
    LoadError if a plan names a layer that does not exist.
    """
    preparation = _Preparation(model, folder, run_trial, take_turn, open_only)
    with devices.use_device(model.device):
        prepared = [preparation.prepare(warm, index) for index, warm in enumerate(model.spec.warm)]
    compiled, graphs, benchmarks = zip(*prepared, strict=True) if prepared else ((), (), ())
    return replace(model, compiled=compiled, graphs=graphs, benchmarks=benchmarks)


@dataclass(frozen=True)
class _Preparation:
    """The arguments of ``prepare_warm_plans``, and the failures so far."""

    model: LoadedModel
    folder: Path
    run_trial: RunTrial
    take_turn: TakeTurn
    open_only: bool
    failures: dict[str, str] = field(default_factory=dict)  # why a graph failed to compile, by file name

    def prepare(self, warm: WarmSpec, index: int) -> PreparedPlan:
        """Prepare one plan; LoadError if it names a layer that does not exist."""
        try:
            plan = make_warm_plan(self.model, warm)
        except RequestError as error:
            raise LoadError(f"warm: {error.detail}", hint=error.hint) from error
        if not warm.compile:
            return None, None, None
        traits = self.model.catalog.traits
        if traits.state or not traits.deterministic:  # a graph's state changes would not be undone
            self._log_hooks("its forwards change the model, or are not deterministic")
            return None, None, None
        if self.model.identity.startswith(UNPROVEN):
            self._log_hooks("it holds what can't be read, so that a stored graph may be another model's")
            return None, None, None
        try:
            graphs, benchmark = self._choose_graphs(plan, warm)
        except Exception as error:  # a compiler may raise anything; the plan then runs with hooks
            self._log_hooks(error.detail if isinstance(error, LayertapError) else type(error).__name__)
            return None, None, None
        if graphs is None:
            self._log_hooks(f"its graph takes {1 / benchmark.speedup:.2f} times as long as hooks")
            return None, None, benchmark
        # A graph takes no more memory than the whole forward with hooks.
        graph_costs = costs.make_costs([benchmark.costs], self.model.catalog.costs.row_bytes)
        return CompiledPlan(index, graphs.captures, graph_costs), graphs, benchmark

    def _log_hooks(self, reason: str) -> None:
        fields = {"model": self.model.spec.name, "reason": reason}
        log.warning("a warm plan runs with hooks", extra={"fields": fields})

    def _choose_graphs(self, plan: Plan, warm: WarmSpec) -> tuple[PlanGraphs | None, PlanBenchmark]:
        """The graphs, or None if hooks are faster. The first start's benchmark is kept, as the choice affects bits."""
        model, folder = self.model, open_folder(self.folder)
        captures = _list_captures(model, plan)
        paths = {kind: folder / f"{compute_key(model, captures, kind)}.pt2" for kind in KINDS}
        benchmark_path = locate_benchmark([*paths.values()], warm.cuda_graphs, model.threads, model.device)
        benchmark = read_benchmark(benchmark_path)
        if benchmark and not _is_wanted(warm, benchmark):
            return None, benchmark
        if self.open_only and not (benchmark and all(path.exists() for path in paths.values())):
            raise WarmError("its graphs are not there any more")
        graphs = self._open_or_compile(plan, warm, captures, paths)
        if benchmark is None:
            with self.take_turn():
                measured = self.run_trial(partial(measure_plan, model, plan, graphs))
            benchmark = keep_benchmark(benchmark_path, measured)
        return graphs if _is_wanted(warm, benchmark) else None, benchmark

    def _open_or_compile(
        self, plan: Plan, warm: WarmSpec, captures: tuple[Capture, ...], paths: Mapping[str, Path]
    ) -> PlanGraphs:
        """Graphs whose results match the hooks'. Raises whatever compiling raises."""
        model = self.model
        missing = [path for path in paths.values() if not path.exists()]
        if missing and not any(path.name in self.failures for path in missing):
            find_compiler()
            self.failures.update(_compile_in_processes(model, paths["one"].parent))
        for path in missing:
            if reason := self.failures.get(path.name):
                raise WarmError(reason)
        one, several = (open_graph(paths[kind], len(model.replicas), model.device) for kind in KINDS)
        graphs = PlanGraphs(captures, tuple(spec.name for spec in model.inputs), one, several)
        self.run_trial(partial(check_against_hooks, model, plan, graphs, model.replicas[0], CHECKED_ROWS))
        return attach_cuda_graphs(model, plan, graphs, warm.cuda_graphs, paths) if warm.cuda_graphs else graphs


def make_warm_plan(model: ModelInfo, warm: WarmSpec) -> Plan:
    """The plan of an entry of ``warm``; RequestError if there is no such layer."""
    reduction = Reduction(pool=warm.pool, normalize=warm.normalize, dtype=warm.dtype)
    return make_plan([replace(parse_selector(text), reduction=reduction) for text in warm.layers], model.catalog)


def _compile_in_processes(model: LoadedModel, folder: Path) -> dict[str, str]:
    """Compile all graphs in other processes, so that the compiler's memory is freed when they end.

    Returns the reason for each graph that failed, by file name; WarmError if a process fails as a whole. On a CPU
    the graphs for single rows are compiled in parallel to the others. The processes are terminated if this one ends
    first, even if it is killed. Progress is logged.
    """
    context = get_context("spawn")
    started: list[tuple[SpawnProcess, Connection]] = []
    failures: dict[str, str] = {}
    try:
        for kinds in [(kind,) for kind in KINDS] if model.device.type == "cpu" else [KINDS]:
            receiver, sender = context.Pipe(duplex=False)
            options = (model.spec, model.catalog, folder, model.threads, kinds)
            process = context.Process(target=_run_compiler, args=(sender, list_search_folders(), options), daemon=True)
            process.start()
            sender.close()
            started.append((process, receiver))
        for _, receiver in started:
            try:
                found = wait_for_compiler(receiver, model.spec.name)
            except EOFError:
                raise WarmError("the compiler's process ended") from None
            if isinstance(found, str):
                raise WarmError(found)
            failures |= found
    finally:
        for process, _ in started:
            process.terminate()  # after an error another one may still be running
            process.join()
    return failures


def wait_for_compiler(receiver: Connection, model: str) -> dict[str, str] | str:
    """Log a compiler process's progress until it ends; return its failures by file name, or one reason for all graphs.

    EOFError if the process dies.
    """
    start = time.monotonic()
    log.info("compiling warm plans, which may take minutes", extra={"fields": {"model": model}})
    fields: dict[str, object] = {}
    while True:
        if receiver.poll(REPORT_INTERVAL_S):
            message = receiver.recv()
            if isinstance(message, dict | str):
                return message
            fields = {"model": model, "graph": message[0], "graphs": message[1]}
        if fields:
            seconds = round(time.monotonic() - start)
            log.info("compiling", extra={"fields": {**fields, "seconds": seconds}})


def _run_compiler(sender: Connection, folders: Sequence[str], options: CompilerOptions) -> None:
    """Compile, and send progress, then the failures. Output is discarded, because a server's log is structured.

    On SIGTERM it removes unfinished files.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes: the server terminates this one
    with Path(os.devnull).open("w") as devnull:
        os.dup2(devnull.fileno(), 1)
        os.dup2(devnull.fileno(), 2)
    Thread(target=_end_with_parent, daemon=True).start()
    add_search_folders(folders)
    try:
        sender.send(compile_warm_plans(*options, lambda number, count: sender.send((number, count))))
    except Exception as error:
        sender.send(_explain(error))


def _end_with_parent() -> None:
    """Send this process SIGTERM when its parent dies: a killed parent does not terminate its children."""
    if (parent := parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def compile_warm_plans(
    spec: ModelSpec,
    catalog: Catalog,
    folder: Path,
    threads: int,
    kinds: Sequence[str],
    report: Callable[[int, int], None],
) -> dict[str, str]:
    """Compile a model's missing graphs of some kinds.

    Returns the reason for each graph that failed, by file name. ``catalog`` is the one from the model's survey, which
    is not repeated. ``report`` is called before each graph with its number and the total, both counted over all kinds.
    """
    model = load_model(spec, 1, threads, run_survey=lambda _: catalog)
    plans = []
    for warm in (warm for warm in spec.warm if warm.compile):
        with suppress(WarmError):  # logged when that plan is prepared; the others are compiled
            plans.append(_list_captures(model, make_warm_plan(model, warm)))
    paths = {
        (captures, kind): folder / f"{compute_key(model, captures, kind)}.pt2" for captures in plans for kind in KINDS
    }
    missing = {each: path for each, path in paths.items() if not path.exists()}
    failures: dict[str, str] = {}
    failed: set[tuple[Capture, ...]] = set()  # a plan needs both of its graphs
    for number, ((captures, kind), path) in enumerate(missing.items(), 1):
        if kind not in kinds or captures in failed:
            continue
        report(number, len(missing))
        make = make_noise_row if kind == "one" else make_noise
        rows = make(model.inputs, model.device, model.dtype)
        try:
            compile_graph(export_graph(model, captures, rows), path, OPTIONS[kind])
        except Exception as error:  # export and compiler may raise anything
            failures[path.name] = _explain(error)
            failed.add(captures)
    return failures


def _explain(error: Exception) -> str:
    return error.detail if isinstance(error, LayertapError) else f"it can't be compiled ({type(error).__name__})"


def _is_wanted(warm: WarmSpec, benchmark: PlanBenchmark) -> bool:
    return warm.compile == "always" or benchmark.pays


def _list_captures(model: LoadedModel, plan: Plan) -> tuple[Capture, ...]:
    """A plan's captures in order; WarmError if a graph can't return one of them."""
    if model.catalog.crosses_rows:
        raise WarmError("rows of this model run one at a time")
    if model.text is not None or model.model_inputs.mask is not None:
        raise WarmError("its rows come in many lengths")
    for capture in plan.captures:
        point, info = capture.point, capture.info
        if point.function or point.site not in SITES or info.row_axis is None or info.crosses_rows or info.alone:
            raise WarmError(f"a graph does not give {point.text}")
    return tuple(dict.fromkeys(result.capture for result in plan.results))

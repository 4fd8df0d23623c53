"""Graphs of a plan's captures: exported with hooks attached, compiled ahead of time, kept in a folder, and opened.

Operations that no capture needs are removed. Of an opened graph CUDA graphs are captured for some batch sizes;
docs/explanation/gpu.md explains them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn

from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.devices import devices
from layertap.models.devices.devices import describe_processor, is_accelerator
from layertap.models.hooks.attach import Modules, attach_tensors
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.plan.plan import Capture
from layertap.models.points import Point
from layertap.models.run.compiled_plan import Graph, PlanGraphs, WarmError
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.reduction import ReducedTensor, apply_reduction
from layertap.models.run.replica import Replica, call_module

Kind = Literal["one", "several"]  # rows of a batch
MIN_ROWS = 2  # of a dynamic batch: torch.export specialises on sizes 0 and 1
RECIPE = 2  # raise it when graphs are compiled differently
THREADS = {"cpp.dynamic_threads": True}  # use the number of threads that is set when a graph runs
# Freezing packs weights for the processor: faster for several rows, and much slower for a single one.
OPTIONS: Mapping[Kind, Mapping[str, object]] = {"one": THREADS, "several": {**THREADS, "freezing": True}}
# Precompiling headers takes longer than it saves for a plan's two graphs.
BUILD: Mapping[str, object] = {"aot_inductor.precompile_headers": False}
RUNNER = Path(__file__).with_name("runner.cpp")
COMPILER_TIMEOUT_S = 300.0
WARMUP_ROUNDS = 3  # forwards before a capture, which must not contain one-time work such as tuning and loading
_loading = Lock()


def get_kind(rows: int) -> Kind:
    """Which of a plan's two graphs a batch of ``rows`` rows uses."""
    return "one" if rows == 1 else "several"


def open_folder(path: Path) -> Path:
    """Create the folder for graphs if needed; WarmError if other users could write to it, because its files are code.

    A group of this process may write to it: Kubernetes shares volumes that way (``fsGroup``).
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.stat()
    except OSError as error:
        raise WarmError(f"the folder for compiled plans {path} can't be used ({type(error).__name__})") from error
    reason = _describe_exposure(status) if hasattr(os, "getuid") else ""
    if reason:
        raise WarmError(f"the folder for compiled plans {path} {reason} {path}")
    return path


def _describe_exposure(status: os.stat_result) -> str:
    """Why other users may have written a folder's files, and the command that prevents it; empty if they can't."""
    if status.st_uid != os.getuid():
        return f"belongs to another user: chown {os.getuid()}"
    if status.st_mode & stat.S_IWOTH:
        return "may be written to by everybody: chmod o-w"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (os.getegid(), *os.getgroups()):
        return f"may be written to by group {status.st_gid}, which this process is not in: chmod g-w"
    return ""


def compute_key(model: LoadedModel, captures: Sequence[Capture], rows: str) -> str:
    """A digest of everything that a graph depends on: weights, captures, shapes, versions and the kind of processor."""
    parts = [
        *(RECIPE, model.identity, rows, torch.__version__, OPTIONS, describe_processor(model.device)),
        [[spec.name, spec.shape, spec.dtype] for spec in model.inputs],
        [asdict(capture) for capture in captures],
        model.spec.memory_format,  # a graph is compiled for the weights' memory format
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compile_captures(model: LoadedModel, captures: Sequence[Capture], kind: Kind, path: Path) -> None:
    """Write the file of a graph that returns captures; raises whatever the export or the compiler raises."""
    make = make_noise_row if kind == "one" else make_noise
    program = export_graph(model, captures, make(model.inputs, model.device, model.dtype))
    compile_graph(program, path, OPTIONS[kind])


def export_graph(
    model: LoadedModel, captures: Sequence[Capture], rows: Mapping[str, Tensor]
) -> torch.export.ExportedProgram:
    """Export the graph from a batch to its reduced captures: for one row if ``rows`` has one, else for two or more.

    Raises whatever torch.export does: a model may branch on values, or use what can't be exported.
    """
    from torch.export import Dim, export

    batch = tuple(rows[spec.name] for spec in model.inputs)
    several = len(batch[0]) >= MIN_ROWS
    dynamic = tuple({0: Dim("rows", min=MIN_ROWS)} for _ in batch) if several else None
    with torch.no_grad():
        program = export(
            _CapturingModule(model, captures).eval(),
            batch,
            dynamic_shapes=(dynamic,) if dynamic else None,
            strict=False,
        )
        # Decomposition removes in-place writes; then unused operations are detected and dropped.
        pruned: torch.export.ExportedProgram = program.run_decompositions({})
        return pruned


class _CapturingModule(nn.Module):
    """A module whose forward returns a model's captures."""

    def __init__(self, model: LoadedModel, captures: Sequence[Capture]) -> None:
        super().__init__()
        self.model = model.module
        self._names = [spec.name for spec in model.inputs]
        self._batch_axes = model.model_inputs.batch_axes
        self._captures = captures

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """All captures of a batch, reduced; each scale follows its values."""
        reduced: dict[Capture, ReducedTensor] = {}

        def capture_tensor(point: Point, tensor: Tensor) -> None:
            # A copy, because the forward may overwrite the tensor later.
            rows = {each: RowTensor(tensor.clone(), each.info) for each in self._captures if each.point == point}
            reduced.update((each, apply_reduction(value, each.reduction)) for each, value in rows.items())

        with ExitStack() as stack:
            attach_tensors(stack, Modules(self.model), {each.point for each in self._captures}, capture_tensor)
            # Run to the end: an interrupted export fails. Operations after the last capture are dropped afterwards.
            call_module(dict(zip(self._names, inputs, strict=True)), self.model, self._batch_axes)
        results = (reduced[capture] for capture in self._captures)
        return [tensor for each in results for tensor in (each.values, each.scale) if tensor is not None]


def compile_graph(program: torch.export.ExportedProgram, path: Path, options: Mapping[str, object]) -> None:
    """Compile a graph into a file, which is written atomically; raises whatever the compiler raises."""
    from torch._inductor import aoti_compile_and_package

    find_compiler()
    # With grad enabled the compiler silently skips freezing.
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler says to its developers
        configs = {**options, **BUILD}
        made = aoti_compile_and_package(program, package_path=f"{folder}/{path.name}", inductor_configs=configs)
        Path(made).replace(path)


def open_graph(path: Path, runners: int, device: torch.device, single: bool = False) -> Graph:
    """Load a compiled graph on a device, for ``runners`` threads at once; WarmError if it does not load.

    ``single``: for one thread only, without synchronisation between threads.
    """
    load_runner(path.parent)
    load: Callable[[str, int, int, bool], Graph] = torch.classes.layertap.Graph
    try:
        if is_accelerator(device):  # kernels are read on first use, from a copy of the files that torch keeps
            return load(str(path), runners, -1 if device.index is None else device.index, single)
        # Loaded files can be deleted at once, so that a killed process leaves none behind.
        with tempfile.TemporaryDirectory() as folder, ZipFile(path) as archive:
            archive.extractall(folder)
            return load(str(next(Path(folder).iterdir())), runners, -1, single)
    except (RuntimeError, OSError, BadZipFile, StopIteration) as error:
        raise WarmError(f"a compiled plan does not load ({type(error).__name__})") from error


def load_runner(folder: Path) -> None:
    """Load the C++ runner of graphs, once for each process, and compile it if needed; WarmError if that fails."""
    with _loading:
        try:
            loaded = torch.classes.layertap.Graph
        except RuntimeError:  # torch raises this for an unknown class
            loaded = None
        if loaded is not None:
            return
        text = RUNNER.read_bytes()
        name = hashlib.sha256(text + torch.__version__.encode() + platform.machine().encode()).hexdigest()[:16]
        path = folder / f"runner-{name}.so"
        if not path.exists():
            _build_runner(path)
        torch.classes.load_library(str(path))


def find_compiler() -> str:
    """The C++ compiler; WarmError if there is none."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise WarmError("there is no C++ compiler: install g++")
    return found


def _build_runner(path: Path) -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [
            *(find_compiler(), "-O1", "-shared", "-fPIC", "-std=c++20", str(RUNNER), "-o", str(made)),
            *(f"-I{root / 'include' / more}" for more in ("", "torch/csrc/api/include")),
            *(f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILER_TIMEOUT_S)  # noqa: S603
        except (OSError, subprocess.SubprocessError) as error:
            raise WarmError(f"the C++ compiler failed ({type(error).__name__})") from error
        made.replace(path)


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
    cuda_graphs: dict[Replica, dict[int, CudaGraph]] = {}
    with devices.use_device(model.device), torch.no_grad():
        for replica in model.replicas:
            pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
            cuda_graphs[replica] = {}
            for rows in sorted(set(sizes), reverse=True):  # the largest first: the others reuse its memory pool
                batch = make_noise(model.inputs, model.device, model.dtype, rows)
                inputs = tuple(batch[name] for name in graphs.inputs)
                cuda_graphs[replica][rows] = _capture_graph(runners[get_kind(rows)], inputs, pool, stream)
    return cuda_graphs


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

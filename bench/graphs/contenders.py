"""Forwards to be timed: a model of seeded weights with hooks, or its graphs, compiled where they are not on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram, export

from bench.graphs.variants import Variant
from layertap.models.compiled.graphs import (
    OPTIONS,
    compile_graph,
    compute_key,
    export_graph,
    get_kind,
    open_folder,
    open_graph,
)
from layertap.models.inputs.noise import make_noise, make_noise_row
from layertap.models.loading import load_model
from layertap.models.plan.plan import Capture, Plan
from layertap.models.plan.planner import make_plan
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.compiled_plan import PlanGraphs
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import DType, MemoryFormat, ModelSpec

Run = Callable[[], Tensor]


class Contenders:
    """The variants of one architecture's embedding; each precision and memory format is loaded once."""

    def __init__(self, architecture: str, folder: Path) -> None:
        self._architecture, self._folder = architecture, open_folder(folder)
        self._load = cache(self._load_model)

    def compile(self, variant: Variant, rows: int) -> None:
        """Have the variant's graph on disk; raises whatever an export or a compiler does."""
        path = self._locate(variant, rows)
        if variant.is_graph and not path.exists():
            print(f"compiling {self._architecture} for {variant}", file=sys.stderr)
            model = self._load(variant.dtype, variant.memory_format)
            compile_graph(self._export(model, variant, rows), path, {**OPTIONS[get_kind(rows)], **variant.options})

    def prepare(self, variant: Variant, rows: int) -> Run:
        """A forward of so many rows as the server runs it, on graphs that are on disk; it gives the embedding."""
        model = self._load(variant.dtype, variant.memory_format)
        plan, captures = _plan_embedding(model)
        batch, share, graphs = _make_batch(model, rows), RequestSlice(0, rows, plan.captures), None
        if variant.is_graph:
            graph = open_graph(self._locate(variant, rows), 1, model.device)
            names = tuple(spec.name for spec in model.inputs)
            graphs = PlanGraphs(captures, names, graph, graph)

        def run() -> Tensor:
            activations = model.run(model.replicas[0], [batch], [share], graphs=graphs)
            return activations.select(share)[captures[0]].values

        return run

    def _locate(self, variant: Variant, rows: int) -> Path:
        model = self._load(variant.dtype, variant.memory_format)
        kind = str(rows) if variant.is_static else get_kind(rows)
        key = compute_key(model, _plan_embedding(model)[1], f"{kind} {sorted(variant.options.items())}")
        return self._folder / f"{key}.pt2"

    def _export(self, model: LoadedModel, variant: Variant, rows: int) -> ExportedProgram:
        captures = _plan_embedding(model)[1]
        if rows == 1:
            return export_graph(model, captures, make_noise_row(model.inputs, model.device, model.dtype))
        program = export_graph(model, captures, make_noise(model.inputs, model.device, model.dtype))
        if not variant.is_static:
            return program
        batch = _make_batch(model, rows)
        with torch.no_grad():
            return export(program.module(), tuple(batch[spec.name] for spec in model.inputs))

    def _load_model(self, dtype: DType, memory_format: MemoryFormat) -> LoadedModel:
        source = f"torchvision:{self._architecture}"
        spec = ModelSpec(self._architecture, source, "random:0", "cpu", dtype, memory_format=memory_format)
        return load_model(spec, 1, 1)


def _plan_embedding(model: LoadedModel) -> tuple[Plan, tuple[Capture, ...]]:
    if model.model_embedding is None:
        raise SystemExit(f"{model.spec.name} has no embedding")
    plan = make_plan([model.model_embedding.selector], model.catalog)
    return plan, tuple(dict.fromkeys(result.capture for result in plan.results))


def _make_batch(model: LoadedModel, rows: int) -> Mapping[str, Tensor]:
    noise = make_noise(model.inputs, model.device, model.dtype)
    place = torch.arange(rows)
    return {name: value[place % len(value)] for name, value in noise.items()}

"""Loads a model in this process or in a host process, and creates its executor."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.devices import memory
from layertap.models.devices.devices import is_accelerator, list_devices, resolve_device
from layertap.models.loading import load_model
from layertap.models.run.loaded_model import LoadedModel, join_devices
from layertap.models.run.model_info import ModelInfo
from layertap.models.sources.python import list_search_folders
from layertap.models.spec import ModelSpec
from layertap.service.engine.batch import CPU
from layertap.service.engine.execute.executor import Executor, InProcessExecutor
from layertap.service.engine.execute.processes.host import HostOptions
from layertap.service.engine.execute.processes.model_host import ModelHost, OnRestart
from layertap.service.engine.execute.processes.process_executor import ProcessExecutor
from layertap.service.engine.execute.processes.worker_decoder import WorkerDecoder
from layertap.service.engine.execute.processes.worker_pool import WorkerPool
from layertap.service.inputs.items import EncodedItem, FramesItem, SamplesItem
from layertap.service.metrics import Metrics
from layertap.service.settings import MIN_WORKER_MEMORY_BYTES, Settings

MEMORY_SHARE = 0.5  # of the memory that is free at loading: the share of all workers of a model


def load(
    spec: ModelSpec, settings: Settings, metrics: Metrics, *, warm: bool = True, compiles: bool = False
) -> ModelInfo:
    """Load a model where it will run; LoadError. ``metrics`` count its workers' restarts.

    Models on a GPU run in this process: a forked process can't use the device's memory. Without ``warm``, all models
    run with hooks; ``compiles``: graphs of warm plans are compiled if they are missing, in this process.
    """
    plans = settings.cache_dir / "plans" if warm else None
    if settings.workers and not spec.devices and not is_accelerator(resolve_device(spec.device)):
        return load_in_host(spec, settings, plans, partial(metrics.count, "worker_restarts_total"))
    replicas = 1 if spec.devices else settings.replicas  # a CPU that stands in for a GPU runs one, too

    def load_here(spec: ModelSpec) -> LoadedModel:
        model = load_model(spec, replicas, settings.cpu_threads, settings.gpu_streams, settings.notes_dir)
        return prepare_warm_plans(model, plans, compiles=compiles) if plans is not None else model

    if not spec.devices:
        return load_here(spec)
    parts = {name: replace(spec, device=name, devices=()) for name in list_devices(spec.devices)}
    return join_devices(spec, {name: load_here(part) for name, part in parts.items()})


def create_executor(model: ModelInfo, settings: Settings, metrics: Metrics) -> Executor:
    """The executor of a loaded model; ``metrics`` as for ``load``.

    If the model's device, or the first of several, is not the CPU, worker processes decode its files.
    """
    if isinstance(model, HostedModel):
        return ProcessExecutor(model, WorkerPool(model.host), settings)
    if not isinstance(model, LoadedModel):
        raise TypeError(f"unknown kind of model: {type(model).__name__}")
    device = next(iter(model.by_device), str(model.device))
    if settings.workers and device != CPU and model.model_inputs.takes_media:
        decoder = create_decoder(model, settings, partial(metrics.count, "worker_restarts_total"))
        return InProcessExecutor(model, settings, decoder)
    return InProcessExecutor(model, settings)


@dataclass(frozen=True, kw_only=True)
class HostedModel(ModelInfo):
    """A model loaded by its host process."""

    host: ModelHost

    @property
    def hooks(self) -> int:
        """Our hooks that were on the model in its workers when they were last counted: 0."""
        return sum(worker.progress.hooks for worker in list(self.host.workers.values()))


def load_in_host(spec: ModelSpec, settings: Settings, plans: Path | None, on_restart: OnRestart) -> HostedModel:
    """Load a model in a host process, and start its workers; LoadError.

    ``plans`` as for ``HostOptions``, ``on_restart`` as for ``ModelHost``.
    """
    options = HostOptions(spec, settings, list_search_folders(), choose_worker_bytes(settings), plans)
    host = ModelHost(options, on_restart)
    info = cast("ModelInfo", host.load())
    return HostedModel(host=host, **{each.name: getattr(info, each.name) for each in fields(ModelInfo)})


def create_decoder(model: LoadedModel, settings: Settings, on_restart: OnRestart) -> WorkerDecoder:
    """Start processes that decode files for a model in this process; LoadError. ``on_restart`` as above.

    Texts are tokenized here, because a tokenizer can't be sent to another process.
    """
    pictures = replace(model.model_inputs.pictures, text=None, decoder=None)
    options = HostOptions(model.spec, settings, (), choose_worker_bytes(settings), plans=None, pictures=pictures)
    host = ModelHost(options, on_restart)
    host.load()
    kinds = (EncodedItem, FramesItem, SamplesItem)
    return WorkerDecoder(WorkerPool(host), settings, settings.cpu_threads, model.model_inputs, kinds)


def choose_worker_bytes(settings: Settings) -> int:
    """The memory limit in bytes of each worker of a model that is loaded now."""
    if settings.worker_memory_bytes is not None:
        return settings.worker_memory_bytes
    free = memory.measure_available_bytes(torch.device("cpu"))
    return max(int(free * MEMORY_SHARE / settings.workers), MIN_WORKER_MEMORY_BYTES)

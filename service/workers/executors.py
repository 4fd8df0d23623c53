"""Where each model runs: in this process, or in worker processes."""

from __future__ import annotations

from layertap.models.devices.devices import resolve_device
from layertap.models.loaded_model import LoadedModel
from layertap.models.model_info import ModelInfo
from layertap.models.registry import ModelLoader
from layertap.models.spec import ModelSpec
from layertap.service.engine.executor import Executor, InProcessExecutor
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings
from layertap.service.workers.decoding_executor import DecodingExecutor
from layertap.service.workers.process_executor import HostedModel, ProcessExecutor, load_in_host


def load(spec: ModelSpec, settings: Settings, metrics: Metrics, *, warm: bool = True) -> ModelInfo:
    """Load a model where it is to run; LoadError where it can't be. ``metrics`` count its workers' restarts.

    Models on a GPU run in this process: a device's memory can't be copied with a process. Without ``warm`` they all run
    with hooks.
    """
    plans = settings.cache_dir / "plans" if warm else None
    if settings.workers and resolve_device(spec.device).type == "cpu":
        return load_in_host(spec, settings, plans, metrics.count_worker_restart)
    in_process = ModelLoader(
        settings.replicas, settings.cpu_threads, plans, settings.gpu_streams, settings.cache_dir / "costs"
    )
    return in_process(spec)


def create_executor(model: ModelInfo, settings: Settings, metrics: Metrics) -> Executor:
    """What runs a model where it was loaded; ``metrics`` as for ``load``."""
    if isinstance(model, HostedModel):
        return ProcessExecutor(model, settings)
    if not isinstance(model, LoadedModel):
        raise TypeError(f"a model that is nowhere: {type(model).__name__}")
    if settings.workers and model.device.type != "cpu" and model.model_inputs.takes_pictures:
        return DecodingExecutor(model, settings, metrics.count_worker_restart)
    return InProcessExecutor(model, settings)

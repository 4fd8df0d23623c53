"""Where each model runs: in this process, or in worker processes."""

from __future__ import annotations

from dataclasses import replace

from layertap.models.devices.devices import list_devices, resolve_device
from layertap.models.loaded_model import LoadedModel
from layertap.models.model_info import ModelInfo
from layertap.models.multi_device_model import MultiDeviceModel, join_devices
from layertap.models.registry import ModelLoader
from layertap.models.spec import ModelSpec
from layertap.service.engine.batch import CPU
from layertap.service.engine.execute.executor import Executor, InProcessExecutor
from layertap.service.engine.execute.processes.decoding_executor import DecodingExecutor
from layertap.service.engine.execute.processes.process_executor import HostedModel, ProcessExecutor, load_in_host
from layertap.service.metrics import Metrics
from layertap.service.settings import Settings


def load(spec: ModelSpec, settings: Settings, metrics: Metrics, *, warm: bool = True) -> ModelInfo:
    """Load a model where it is to run; LoadError where it can't be. ``metrics`` count its workers' restarts.

    Models on a GPU run in this process: a device's memory can't be copied with a process. Without ``warm`` they all run
    with hooks.
    """
    plans, costs = settings.cache_dir / "plans" if warm else None, settings.cache_dir / "costs"
    if settings.workers and not spec.devices and resolve_device(spec.device).type == "cpu":
        return load_in_host(spec, settings, plans, metrics.count_worker_restart)
    replicas = 1 if spec.devices else settings.replicas  # a stand-in for a GPU runs a forward at a time as well
    load_here = ModelLoader(replicas, settings.cpu_threads, plans, settings.gpu_streams, costs)
    if not spec.devices:
        return load_here(spec)
    names = list_devices(spec.devices)
    return join_devices(spec, {name: load_here(replace(spec, device=name, devices=())) for name in names})


def create_executor(model: ModelInfo, settings: Settings, metrics: Metrics) -> Executor:
    """What runs a model where it was loaded; ``metrics`` as for ``load``.

    Where its device, or the first of several, is no CPU, workers decode its pictures.
    """
    if isinstance(model, HostedModel):
        return ProcessExecutor(model, settings)
    if not isinstance(model, (LoadedModel, MultiDeviceModel)):
        raise TypeError(f"a model that is nowhere: {type(model).__name__}")
    device = model.names[0] if isinstance(model, MultiDeviceModel) else str(model.device)
    if settings.workers and device != CPU and model.model_inputs.takes_pictures:
        return DecodingExecutor(model, settings, metrics.count_worker_restart)
    return InProcessExecutor(model, settings)

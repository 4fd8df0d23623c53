"""The same model on several devices: loaded on each by itself, known as one."""

from __future__ import annotations

from dataclasses import dataclass, fields

from layertap.models.errors import LoadError
from layertap.models.loaded_model import LoadedModel
from layertap.models.model_info import ModelInfo
from layertap.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MultiDeviceModel(ModelInfo):
    """A model on several devices. What is known of it is what is known of the first of ``models``.

    Their ``names`` are those that the configuration gives the devices, in the same order.
    """

    names: tuple[str, ...]
    models: tuple[LoadedModel, ...]

    @property
    def device_name(self) -> str:
        """Where it is: all of its devices."""
        return ", ".join(self.names)

    @property
    def by_device(self) -> dict[str, LoadedModel]:
        """The model on each device."""
        return dict(zip(self.names, self.models, strict=True))

    @property
    def hooks(self) -> int:
        """Hooks of ours on all of them now: 0 when idle."""
        return sum(model.hooks for model in self.models)


def join_devices(spec: ModelSpec, models: dict[str, LoadedModel]) -> MultiDeviceModel:
    """One model of those loaded by ``spec`` on devices, by name; LoadError where they are not the same.

    A warm plan that has graphs on some devices only runs with hooks on all: an answer must not depend on its device.
    """
    first, *others = models.values()
    if any((other.digest, other.identity) != (first.digest, first.identity) for other in others):
        raise LoadError("the model has other weights each time it is built", hint="devices need the same on each")
    graphs = zip(*(model.compiled for model in models.values()), strict=True)
    compiled = tuple(plans[0] if all(plan is not None for plan in plans) else None for plans in graphs)
    known = {each.name: getattr(first, each.name) for each in fields(ModelInfo)}
    known |= {"spec": spec, "compiled": compiled, "memory_bytes": sum(each.memory_bytes for each in models.values())}
    return MultiDeviceModel(names=tuple(models), models=tuple(models.values()), **known)

"""The catalog of another shape: what the survey of the configured one found, with the sizes of one forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import Tensor, nn

from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.catalog.observations import CallObservation, Observation, Sketch
from layertap.models.catalog.patches import number_patches
from layertap.models.devices.devices import dtype_name
from layertap.models.hooks.tensor_tree import Path
from layertap.models.points import Site

NO_SKETCH = Sketch((), 0.0, 0.0)


class CallsDifferError(Exception):
    """The forward of another shape calls other layers, or these take or return other kinds of tensors."""


class SizeRecorder(CallRecorder):
    """Notes the order of calls and the sizes of tensors, and looks at no number."""

    def _observe(self, path: Path, tensor: Tensor, earlier: Observation | None) -> Observation:
        return Observation(TensorInfo(path, tuple(tensor.shape), dtype_name(tensor.dtype), None), NO_SKETCH)


def resize_catalog(configured: Catalog, module: nn.Module, recorder: SizeRecorder, prefix: int) -> Catalog:
    """The catalog of the shape of which the recorder has seen one row; CallsDifferError.

    Axes, layouts and shares of the cost are those of the configured shape. Memory is not counted here; time grows as
    what all layers return, and their attention, does.
    """
    modules = {name or ".": part for name, part in module.named_modules(remove_duplicate=False)}
    _check(modules.keys() == configured.layers.keys())
    layers = {
        name: _resize_layer(layer, recorder.calls.get(modules[name], [])) for name, layer in configured.layers.items()
    }
    growth = _count_numbers(layers) / max(_count_numbers(configured.layers), 1)
    return replace(
        configured,
        layers=number_patches(layers, prefix),
        seconds=configured.seconds * growth,
        costs=replace(configured.costs, per_row=configured.costs.per_row * growth),
        has_functions=False,
    )


def _resize_layer(layer: Layer, calls: Sequence[CallObservation]) -> Layer:
    _check(len(layer.calls) == len(calls))
    return replace(layer, calls=tuple(map(_resize_call, layer.calls, calls)))


def _resize_call(call: Call, seen: CallObservation) -> Call:
    _check((call.input.order, call.output.order) == (seen.start, seen.end))

    def resize(name: Site, boundary: CallBoundary) -> CallBoundary:
        infos = [each.info for each in seen.tensors[name].values()]
        _check(boundary.refused == seen.refused.get(name, ()))
        _check([info.path for info in boundary.tensors] == [info.path for info in infos])
        return replace(boundary, tensors=tuple(map(_resize_tensor, boundary.tensors, infos)))

    def resize_optional(name: Site, boundary: CallBoundary | None) -> CallBoundary | None:
        _check((boundary is None) == (not seen.tensors[name]))
        return resize(name, boundary) if boundary is not None else None

    return Call(
        resize("input", call.input),
        resize("output", call.output),
        resize_optional("attention", call.attention),
        sinks=resize_optional("attention_sink", call.sinks),
    )


def _resize_tensor(info: TensorInfo, seen: TensorInfo) -> TensorInfo:
    _check(info.dtype == seen.dtype and len(info.shape) == len(seen.shape))
    resized = replace(info, shape=seen.shape)
    # In which order several entries for a row lie among those of other rows, one entry does not tell.
    _check(info.entries_per_row > 1 or resized.entries_per_row == 1)
    return resized


def _check(is_same: bool) -> None:
    if not is_same:
        raise CallsDifferError


def _count_numbers(layers: Mapping[str, Layer]) -> int:
    """Of what layers without parts return, and of all attention."""
    calls = ((layer, call) for layer in layers.values() for call in layer.calls)
    tensors = (
        (*(call.output.tensors if layer.is_leaf else ()), *(call.attention.tensors if call.attention else ()))
        for layer, call in calls
    )
    return sum(prod(info.shape) for group in tensors for info in group)

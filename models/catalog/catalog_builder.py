"""CatalogBuilder: a catalogue made of what a survey's forwards showed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from layertap.models.catalog.call_observer import CallTimer
from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.catalog.observations import AttentionObservation, Boundary, CallObservation, TensorObservation
from layertap.models.catalog.token_grid import number_patches
from layertap.models.devices.devices import dtype_name
from layertap.models.hooks.tensor_tree import Path

FindTensor = Callable[[CallObservation], TensorObservation | None]


@dataclass(frozen=True)
class LengthProbe:
    """A forward of a text of another length, which tells what grows with it; ``lengths`` are those of both forwards."""

    recorder: CallRecorder
    lengths: tuple[int, int]

    def find_token_axes(
        self, module: nn.Module, number: int, find: FindTensor, shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The axes that have an entry for each token, of a tensor of a shape in one call of a module."""
        calls = self.recorder.calls.get(module, [])
        other = find(calls[number]) if number < len(calls) else None
        if other is None or len(other.shape) != len(shape):
            return ()
        sizes = zip(shape, other.shape, strict=True)
        return tuple(axis for axis, pair in enumerate(sizes) if pair == self.lengths)


class CatalogBuilder:
    """Puts observations together: shapes of one row from the first forward, axes and layouts from the second.

    ``several`` is the first forward again where the module can't take several rows; ``prefix`` counts the tokens that
    stand before the patches.
    """

    def __init__(
        self,
        module: nn.Module,
        alone: CallRecorder,
        several: CallRecorder,
        timer: CallTimer,
        prefix: int,
        length_probe: LengthProbe | None,
    ) -> None:
        self._module = module
        self._alone = alone
        self._several = several
        self._timer = timer
        self._prefix = prefix
        self._length_probe = length_probe
        whole = several.calls.get(module, [])
        self._batches = several is not alone
        self._crosses_rows = not self._batches or any(
            each.crosses_rows for call in whole for each in call.output.values()
        )

    def build(self) -> Catalog:
        """The catalogue, its layers in the order in which they first run."""
        names = self._module.named_modules(remove_duplicate=False)
        layers = [self._build_layer(name or ".", part) for name, part in names]
        layers.sort(key=lambda layer: layer.calls[0].input.order if layer.calls else math.inf)
        by_name = number_patches({layer.name: layer for layer in layers}, self._prefix)
        has_functions = self._alone.has_functions
        return Catalog(
            by_name, self._timer.total, self._crosses_rows, batches=self._batches, has_functions=has_functions
        )

    def _build_layer(self, name: str, module: nn.Module) -> Layer:
        pairs = zip(self._alone.calls.get(module, []), self._several.calls.get(module, []), strict=True)
        calls = tuple(self._build_call(module, number, *pair) for number, pair in enumerate(pairs))
        parameters = sum(parameter.numel() for parameter in module.parameters())
        is_leaf = next(module.children(), None) is None
        kind = type_before_parametrizations(module).__name__
        return Layer(name, kind, is_leaf, parameters, calls, tuple(_find_hazards(module, bool(calls))))

    def _build_call(self, module: nn.Module, number: int, alone: CallObservation, several: CallObservation) -> Call:
        def build_tensors(boundary: Boundary) -> tuple[TensorInfo, ...]:
            pairs = ((path, tensor, several.at(boundary)[path]) for path, tensor in alone.at(boundary).items())
            infos = (self._build_tensor(*pair) for pair in pairs)
            finders = ((info, partial(_find_at, boundary, info.path)) for info in infos)
            return tuple(self._add_token_axes(module, number, info, find) for info, find in finders)

        def build_attention(*, of_sinks: bool = False) -> Iterator[TensorInfo]:
            for index, (path, one, other) in enumerate(pair_attention(alone.attention, several.attention)):
                parts = (each.select(of_sinks=of_sinks) for each in (one, other))
                info = replace(self._build_tensor(path, *parts), source=one.source)
                if info.shape[-1]:
                    yield self._add_token_axes(module, number, info, partial(_find_weights, index, of_sinks))

        before, after = self._timer.get_cost_before(module, number), self._timer.get_cost_after(module, number)
        weights, sinks = tuple(build_attention()), tuple(build_attention(of_sinks=True))
        # Functions that a forward of several rows calls otherwise can't be told apart by their numbers.
        functions = build_tensors("functions") if alone.functions.keys() == several.functions.keys() else ()
        returning = {info.path[:2] for info in functions if info.path[2] == "output"}
        functions = tuple(
            info for info in functions if info.path[:2] in returning
        )  # len() and its kind compute nothing
        return Call(
            CallBoundary(alone.start, before, build_tensors("input"), alone.inputs_refused),
            CallBoundary(alone.end, after, build_tensors("output"), alone.outputs_refused),
            CallBoundary(alone.end, after, weights) if weights else None,
            CallBoundary(alone.end, after, functions) if functions else None,
            CallBoundary(alone.end, after, sinks) if sinks else None,
        )

    def _add_token_axes(self, module: nn.Module, number: int, info: TensorInfo, find: FindTensor) -> TensorInfo:
        if self._length_probe is None or info.crosses_rows:
            return info
        axes = self._length_probe.find_token_axes(module, number, find, info.shape)
        # Of a text every token counts; patches alone stand behind class tokens.
        return replace(info, token_axes=axes, prefix=0, grid_size=None) if axes else info

    def _build_tensor(self, path: Path, alone: TensorObservation, several: TensorObservation) -> TensorInfo:
        # One row at a time, whatever has an axis for rows holds that one.
        crosses_rows = several.crosses_rows and (not self._crosses_rows or several.row_axis is None)
        return TensorInfo(path, alone.shape, dtype_name(alone.dtype), several.row_axis, crosses_rows, several.layout)


def _find_at(boundary: Boundary, path: Path, call: CallObservation) -> TensorObservation | None:
    return call.at(boundary).get(path)


def _find_weights(index: int, of_sinks: bool, call: CallObservation) -> TensorObservation | None:
    return call.attention[index].select(of_sinks=of_sinks) if index < len(call.attention) else None


def pair_attention(
    alone: Sequence[AttentionObservation], several: Sequence[AttentionObservation]
) -> Iterator[tuple[Path, AttentionObservation, AttentionObservation]]:
    """The attention of a call by path, which is empty where there is only one."""
    for index, pair in enumerate(zip(alone, several, strict=True)):
        yield ((str(index),) if len(alone) > 1 else ()), *pair


def _find_hazards(module: nn.Module, is_called: bool) -> Iterator[str]:
    if getattr(module, "inplace", False) is True:
        yield "inplace"
    if not is_called:
        yield "scripted" if isinstance(module, torch.jit.ScriptModule) else "never_called"
    if isinstance(module, nn.MultiheadAttention) or "attention" in type(module).__name__.lower():
        yield "attention"

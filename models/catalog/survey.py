"""Build a catalog from a few small forwards.

One takes a single row, one is timed, and one takes the same row between two others: the axis that grew is the row
axis, and the row's values must be the same as before. That rows are independent is then proven (``row_proof.py``),
or they run one at a time. A model that can't take several rows, or makes other calls with them, is recorded from the
first forward. Device
errors, out of memory or fatal, say nothing about the model and are not caught.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from layertap.models.catalog.axes import Axes, make_axes, name_axes
from layertap.models.catalog.axis_tracker import AxisTracker
from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo, Traits
from layertap.models.catalog.observations import CallObservation, Observation, Place
from layertap.models.catalog.patches import number_patches
from layertap.models.catalog.row_proof import prove_rows
from layertap.models.catalog.shared_values import TrackedForward
from layertap.models.catalog.trials import find_outputs, try_forward
from layertap.models.devices import transfer
from layertap.models.devices.devices import TOLERANCE
from layertap.models.devices.memory import Forward, is_device_error
from layertap.models.errors import IN_THE_LOG, InputError, describe_error
from layertap.models.hooks.attach import observe_calls
from layertap.models.hooks.tensor_tree import Path
from layertap.models.inputs.noise import copy_row, copy_rows, make_noise
from layertap.models.points import Point, Site
from layertap.models.spec import InputSpec

MAX_TIMED, ENOUGH_S = 5, 0.1  # timed forwards: how many at most, and after how many seconds no further one
# What torch and models raise for a wrong shape.
SHAPE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


def survey(
    module: nn.Module,
    inputs: Sequence[InputSpec],
    run: Forward,
    device: torch.device,
    prefix: int,
    dtype: torch.dtype,
    *,
    functions: bool = False,
    tolerance: float = TOLERANCE["float32"],
) -> Catalog:
    """The catalog of a module for one shape of input.

    ``inputs`` gives the shapes of one row; ``run`` calls the module with a batch of such rows; ``prefix`` is the
    number of tokens that stand before the patches; floating inputs come in ``dtype``. With ``functions`` it tells
    what these return. ``tolerance``: the share of a tensor's largest number by which kernels differ.
    InputError if the module can't take that shape.
    """
    rows = make_noise(inputs, device, dtype)
    # Not inference mode: what a model keeps of its first forward (tables, caches) must be fit for gradients later.
    with torch.no_grad():
        alone = CallRecorder(module, functions=functions, axes=AxisTracker())
        with name_input_errors(inputs):
            alone.watch(run, copy_row(rows))
            timer = _time_calls(module, run, copy_row(rows), device)
        tracked = TrackedForward(module, run, copy_row(rows))
        traits = Traits(outputs=find_outputs(tracked.output, tracked.sigmoids))
        branches = tracked.may_branch
        create_recorder = partial(CallRecorder, module, alone=alone, functions=functions)
        several = try_forward(create_recorder().watch, run, copy_rows(rows)) or alone
        other_length = CallRecorder(module, functions=functions)
        lengths = _probe_length(other_length, inputs, run, device, dtype)
        if several.describe_calls() != alone.describe_calls():
            several = alone
        unproven = None
        if several is not alone:
            unproven = prove_rows(module, run, rows, inputs, several, create_recorder, tolerance)
    catalog = CatalogBuilder(module, alone, several, timer, prefix, other_length, lengths, unproven).build()
    return replace(catalog, branches=branches, traits=traits)


def _time_calls(module: nn.Module, run: Forward, row: Mapping[str, Tensor], device: torch.device) -> CallTimer:
    """The fastest of a few forwards, or a single slow one: noise only adds time."""
    timers: list[CallTimer] = []
    while len(timers) < MAX_TIMED and sum(timer.total for timer in timers) < ENOUGH_S:
        timers.append(CallTimer(module, run, row, device))
    return min(timers, key=lambda timer: timer.total)


def _probe_length(
    recorder: CallRecorder, inputs: Sequence[InputSpec], run: Forward, device: torch.device, dtype: torch.dtype
) -> tuple[int, int] | None:
    """Record a forward of a text of half the length; gives both lengths.

    None if all rows have one length, or the model takes one.
    """
    masks = {spec.shape for spec in inputs if spec.is_mask}
    varying = [spec for spec in inputs if spec.longest is not None or spec.shape[:1] in masks]
    length = varying[0].shape[0] if varying else 1
    if length == 1:
        return None
    other = length // 2
    specs = [replace(spec, shape=(other, *spec.shape[1:])) if spec in varying else spec for spec in inputs]
    recorded = try_forward(recorder.watch, run, copy_row(make_noise(specs, device, dtype)))
    return (length, other) if recorded is not None else None


class CallTimer:
    """When the calls of one forward began and ended, in the order in which they did; ``total`` are its seconds."""

    def __init__(self, module: nn.Module, run: Forward, inputs: Mapping[str, Tensor], device: torch.device) -> None:
        self._marks = [0.0]

        def note(*_: object) -> None:
            transfer.synchronize(device)
            self._marks.append(time.perf_counter() - start)

        with observe_calls(module, note, note):
            transfer.synchronize(device)
            start = time.perf_counter()
            run(inputs)
        self.total = max(self._marks[-1], 1e-9)

    def get_cost(self, order: float) -> float:
        """The share of the whole forward spent when the last call up to a place in it began or ended, 0 to 1."""
        return round(min(self._marks[min(int(order), len(self._marks) - 1)] / self.total, 1.0), 4)


@contextmanager
def name_input_errors(inputs: Sequence[InputSpec]) -> Iterator[None]:
    """Raise InputError for whatever a forward of rows of these shapes raises, unless it is the device's.

    What is raised for a wrong shape may be one of the model's own bugs too; other errors are nothing else.
    """
    try:
        yield
    except Exception as error:
        if is_device_error(error):
            raise
        cause = f"the model's own forward raised {describe_error(error)}"
        shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs)
        detail = f"for an input of shape {shapes} {cause}"
        if isinstance(error, SHAPE_ERRORS) and not isinstance(error, NotImplementedError | RecursionError):
            detail = f"the model can't take an input of this shape: {shapes}, or has a bug: {cause}"
        raise InputError(detail, hint=IN_THE_LOG) from error


@dataclass(frozen=True)
class CatalogBuilder:
    """Puts together what the recorders of one row ``alone`` and of ``several`` saw, and the timer.

    ``several`` is ``alone`` again where the module can't take several rows; ``prefix`` counts the tokens that stand
    before the patches. ``other_length`` saw a text of another length, which tells what grows with it; ``lengths`` are
    those of both, None if it saw none. ``unproven``: which tensors hold rows that may not be their own; None if the
    output does.
    """

    module: nn.Module
    alone: CallRecorder
    several: CallRecorder
    timer: CallTimer
    prefix: int
    other_length: CallRecorder
    lengths: tuple[int, int] | None
    unproven: frozenset[Place] | None

    def build(self) -> Catalog:
        """The catalog, its layers in the order in which they first run."""
        names = self.module.named_modules(remove_duplicate=False)
        layers = [self._build_layer(name or ".", part) for name, part in names]
        layers.sort(key=lambda layer: layer.calls[0].input.order if layer.calls else math.inf)
        return Catalog(
            number_patches({layer.name: layer for layer in layers}, self.prefix),
            self.timer.total,
            self._crosses_rows,
            batches=self.several is not self.alone,
            has_functions=self.alone.has_functions,
        )

    @cached_property
    def _crosses_rows(self) -> bool:
        calls = self.several.calls.get(self.module, [])
        outputs = [(call.address, path, each) for call in calls for path, each in call.tensors["output"].items()]
        return self.unproven is None or any(
            each.info.crosses_rows or (address, "output", path) in self.unproven for address, path, each in outputs
        )

    def _build_layer(self, name: str, module: nn.Module) -> Layer:
        calls = tuple(map(self._build_call, self.alone.calls.get(module, [])))
        parameters = sum(parameter.numel() for parameter in module.parameters())
        is_leaf = next(module.children(), None) is None
        kind = type_before_parametrizations(module).__name__
        return Layer(name, kind, is_leaf, parameters, calls, tuple(_find_hazards(module, bool(calls))))

    def _build_call(self, alone: CallObservation) -> Call:
        """A call of a module, or of a function in one."""
        several = self.several.find(alone.address) or alone
        build = partial(self._build_boundary, alone, several)
        attention, sinks = build("attention"), build("attention_sink")
        functions: dict[str, Call] = {}
        # If a forward of several rows calls other functions, numbers do not tell which is which.
        if _describe_functions(alone) == _describe_functions(several):
            calls = alone.functions.items()
            functions = {name: self._build_call(call) for name, call in calls if call.tensors["output"]}  # not len()
        return Call(
            build("input"),
            build("output"),
            attention if attention.tensors else None,
            functions,
            sinks if sinks.tensors else None,
            self._find_origins(alone),
            alone.is_view or several.is_view,
        )

    def _find_origins(self, call: CallObservation) -> Mapping[Path, Point]:
        """Where inputs of a call come from that others read too; none where functions, which may, are not recorded."""
        if not self.alone.has_functions:
            return {}
        origins: dict[Path, Point] = {}
        for path, (origin, boundary, there) in self.alone.find_origins(call):
            module, number, function = origin.address
            site: Site = "input" if boundary == "input" else "output"
            origins[path] = Point(self._names[module], number, there, site, function)
        return origins

    @cached_property
    def _names(self) -> Mapping[nn.Module, str]:
        return {module: name or "." for name, module in self.module.named_modules()}

    def _build_boundary(self, alone: CallObservation, several: CallObservation, boundary: Site) -> CallBoundary:
        longer = self.other_length.find(alone.address)
        others = longer.tensors[boundary] if longer is not None else {}
        seen = alone.tensors[boundary]
        tensors = tuple(
            self._complete(
                each.info, seen[path].axes, others.get(path), (several.address, boundary, path) in (self.unproven or ())
            )
            for path, each in several.tensors[boundary].items()
        )
        order = alone.start if boundary == "input" else alone.end
        return CallBoundary(order, self.timer.get_cost(order), tensors, alone.refused.get(boundary, ()))

    def _complete(self, info: TensorInfo, axes: Axes, other: Observation | None, unproven: bool) -> TensorInfo:
        """What a catalog says of a tensor, with what the other forwards tell: ``other`` is of another length."""
        if not info.source:
            missing = make_axes((1,) * (len(info.shape) - len(axes)))  # the axis of a single row, squeezed away
            info = replace(info, layout=name_axes((*missing, *axes), info.row_axis))
        # One row at a time, whatever has an axis for rows holds that one.
        crosses_rows = (info.crosses_rows or unproven) and info.row_axis is None
        alone = (info.crosses_rows or unproven) and info.row_axis is not None and not self._crosses_rows
        info = replace(info, crosses_rows=crosses_rows, alone=alone)
        if crosses_rows or self.lengths is None or other is None or len(other.info.shape) != len(info.shape):
            return info
        sizes = zip(info.shape, other.info.shape, strict=True)
        grown = {axis: pair for axis, pair in enumerate(sizes) if len(set(pair)) > 1}
        token_axes = tuple(axis for axis, pair in grown.items() if pair == self.lengths)
        return replace(info, token_axes=token_axes, merges_tokens=len(grown) > len(token_axes))


def _describe_functions(call: CallObservation) -> Mapping[str, tuple[set[Path], set[Path], int]]:
    return {name: function.describe_tensors() for name, function in call.functions.items()}


def _find_hazards(module: nn.Module, is_called: bool) -> Iterator[str]:
    if getattr(module, "inplace", False) is True:
        yield "inplace"
    if not is_called:
        yield "scripted" if isinstance(module, torch.jit.ScriptModule) else "never_called"
    if isinstance(module, nn.MultiheadAttention) or "attention" in type(module).__name__.lower():
        yield "attention"

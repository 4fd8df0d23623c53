"""Build a catalog from a few small forwards.

One takes a single row, one is timed, and one takes the same row between two others: the axis that grew is the row
axis, and the row's values must be the same as before. That rows are independent is then proven (``row_proof.py``),
or they run one at a time. A model that can't take several rows, or makes other calls with them, is recorded from the
first forward. Device errors, out of memory or fatal, say nothing about the model and are not caught.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import prod

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from layertap.models.catalog.axes import make_axes, name_axes
from layertap.models.catalog.axis_tracker import AxisTracker
from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo, Traits, make_calls
from layertap.models.catalog.row_proof import TrackedForward, prove_rows
from layertap.models.catalog.trials import find_outputs, try_forward
from layertap.models.devices import transfer
from layertap.models.devices.devices import TOLERANCE, dtype_name
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.errors import IN_THE_LOG, InputError, describe_error
from layertap.models.hooks.attach import Modules, observe_calls
from layertap.models.inputs.noise import copy_row, copy_rows, make_noise
from layertap.models.points import Point
from layertap.models.spec import InputSpec

TIME = "TLQK"  # axes of time in layouts
MAX_TIMED, ENOUGH_S = 5, 0.1  # timed forwards: how many at most, and after how many seconds no further one
MAX_APART = 3  # inputs that share another length than the text
MIN_APART = 4  # their least length: half of a shorter one is 1, which broadcasts to any other
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
    frames: int | None = None,
) -> Catalog:
    """The catalog of a module for one shape of input.

    ``inputs`` gives the shapes of one row; ``run`` calls the module with a batch of such rows; ``prefix`` is the
    number of tokens that stand before the patches; floating inputs come in ``dtype``. With ``functions`` it includes
    what these take and return. ``tolerance``: the share of a tensor's largest number by which kernels differ.
    ``frames``: the entries of time axes that a mask is of, if it has as many for every row.
    InputError if the module can't take that shape.
    """
    rows = make_noise(inputs, device, dtype)
    # Not inference mode: what a model keeps of its first forward (tables, caches) must be fit for gradients later.
    with torch.no_grad():
        batch_axis = max(spec.batch_axis or 0 for spec in inputs)
        single = any(spec.as_list for spec in inputs)
        alone = CallRecorder(module, functions=functions, axes=AxisTracker(), batch_axis=batch_axis, single=single)
        with name_input_errors(inputs):
            alone.watch(run, copy_row(rows))
            marks = _time_calls(module, run, copy_row(rows), device)
        tracked = TrackedForward(module, run, copy_row(rows))
        traits = Traits(outputs=find_outputs(tracked.output, tracked.sigmoids))
        branches = tracked.may_branch
        create_recorder = partial(CallRecorder, module, alone=alone, functions=functions)
        several = try_forward(create_recorder().watch, run, copy_rows(rows)) or alone

        def try_half(chosen: Sequence[InputSpec]) -> CallRecorder | None:
            half = [spec.with_length(spec.length // 2) if spec in chosen else spec for spec in inputs]
            recorder = CallRecorder(module, functions=functions)
            return try_forward(recorder.watch, run, copy_row(make_noise(half, device, dtype)))

        varying = _list_varying(inputs, lambda chosen: try_half(chosen) is not None) if frames is None else []
        length = varying[0].length if varying else 1
        # What a text of half the length shows; None if all rows have one length, or the model takes one.
        shorter = try_half(varying) if length > 1 else None
        if not several.has_calls_of(alone):
            several = alone
        unproven = None
        if several is not alone:
            unproven = prove_rows(module, run, rows, inputs, several, create_recorder, tolerance)
    infos, crosses_rows = _describe_tensors(alone, several, unproven)
    if shorter is not None:
        half_infos = {point: each.info for point, each in shorter.tensors.items()}
        infos = {point: _find_tokens(info, half_infos.get(point), length) for point, info in infos.items()}
    if frames is not None:
        infos = {point: _find_frames(info, frames) for point, info in infos.items()}
    boundaries = number_patches(alone.make_boundaries(infos, partial(_get_cost, marks)), prefix)
    calls = make_calls(boundaries, alone.views | several.views)
    modules = Modules(module)
    runs = {name: calls.get(modules.names[part], ()) for name, part in modules.items()}
    weights = _describe_weights(modules, runs)
    layers = [_describe_layer(name, part, runs[name], weights[name]) for name, part in modules.items()]
    layers.sort(key=lambda layer: layer.calls[0].input.order if layer.calls else math.inf)
    return Catalog(
        {layer.name: layer for layer in layers},
        marks[-1],
        crosses_rows,
        batches=several is not alone,
        has_functions=functions,
        traits=traits,
        branches=branches,
        sizes_known=not single,  # how many boxes there are depends on values
    )


def resize_catalog(configured: Catalog, module: nn.Module, recorder: CallRecorder, prefix: int) -> Catalog | None:
    """The catalog of another shape, of which the recorder has seen one row: with its sizes, else as configured.

    None if the forward of that shape makes other calls, or sizes alone do not tell all.
    """
    modules = Modules(module)
    if modules.keys() != configured.layers.keys():
        return None
    seen = recorder.make_boundaries({point: each.info for point, each in recorder.tensors.items()})
    resized: dict[Point, CallBoundary] = {}
    for point, boundary in configured.boundaries.items():
        other = seen.get(modules.locate(point))
        if other is None or (other.order, other.refused) != (boundary.order, boundary.refused):
            return None
        pairs = list(zip(boundary.tensors, other.tensors, strict=False))
        if len(boundary.tensors) != len(other.tensors) or not all(_differ_in_size(*pair) for pair in pairs):
            return None
        tensors = tuple(replace(info, shape=sized.shape) for info, sized in pairs)
        resized[point] = replace(boundary, tensors=tensors)
    return configured.with_boundaries(number_patches(resized, prefix)) if seen.keys() <= resized.keys() else None


def _differ_in_size(info: TensorInfo, other: TensorInfo) -> bool:
    """Whether nothing else than sizes may differ.

    In which order several entries for a row lie among those of other rows, one entry does not tell.
    """
    is_same = (info.path, info.dtype, len(info.shape)) == (other.path, other.dtype, len(other.shape))
    return is_same and (info.entries_per_row > 1 or info.row_axis is None or other.shape[info.row_axis] == 1)


def _time_calls(module: nn.Module, run: Forward, row: Inputs, device: torch.device) -> list[float]:
    """When the calls of a forward began and ended, in seconds: of the fastest of a few, or of a single slow one."""
    forwards: list[list[float]] = []
    while len(forwards) < MAX_TIMED and sum(marks[-1] for marks in forwards) < ENOUGH_S:
        forwards.append(_mark_calls(module, run, row, device))
    return min(forwards, key=lambda marks: marks[-1])  # noise only adds time


def _mark_calls(module: nn.Module, run: Forward, row: Inputs, device: torch.device) -> list[float]:
    marks = [0.0]

    def note(*_: object) -> None:
        transfer.synchronize(device)
        marks.append(time.perf_counter() - start)

    with observe_calls(module, note, note):
        transfer.synchronize(device)
        start = time.perf_counter()
        run(row)
    return marks


def _get_cost(marks: Sequence[float], order: float) -> float:
    """The share of the whole forward spent when the last call up to an order began or ended, 0 to 1."""
    return round(min(marks[min(int(order), len(marks) - 1)] / max(marks[-1], 1e-9), 1.0), 4)


def _list_varying(
    inputs: Sequence[InputSpec], takes_half: Callable[[Sequence[InputSpec]], bool]
) -> Sequence[InputSpec]:
    """The inputs that have a text's length on an axis, its mask first.

    Beside a mask none of those whose length is another's, as a decoder's ids: ``takes_half`` says whether the model
    takes some at half their length, and all others whole.
    """
    masks = {spec.shape for spec in inputs if spec.is_mask}
    varying = [spec for spec in inputs if spec.longest is not None or spec.shape[:1] in masks]
    if not any(spec.is_mask for spec in varying):
        return varying
    others = [spec for spec in varying if not spec.is_mask and spec.length >= MIN_APART]
    apart = list[InputSpec]()
    for size in range(1, min(len(others), MAX_APART + 1)):
        for chosen in combinations([spec for spec in others if spec not in apart], size):
            apart += chosen if takes_half(chosen) else ()
    return [spec for spec in sorted(varying, key=lambda spec: not spec.is_mask) if spec not in apart]


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


def _describe_tensors(
    alone: CallRecorder, several: CallRecorder, unproven: frozenset[Point] | None
) -> tuple[dict[Point, TensorInfo], bool]:
    """What a catalog says of each tensor, by what one row and several showed, and whether rows affect each other.

    ``unproven``: the tensors that hold rows that may not be their own; None if the output does.
    """
    suspect = {point for point, each in several.tensors.items() if each.info.crosses_rows}.union(unproven or ())
    crosses_rows = unproven is None or any(
        (point.layer, point.site, point.function) == (".", "output", "") for point in suspect
    )
    unlike, origins = alone.find_unlike_functions(several), alone.find_origins()
    infos: dict[Point, TensorInfo] = {}
    for point, each in several.tensors.items():
        if point.function and (point.layer, point.call) in unlike:
            continue
        info, axes = each.info, alone.tensors[point].axes
        if not info.source:
            # With the axis of a single row, if it was squeezed away.
            axes = (*make_axes((1,) * (len(info.shape) - len(axes))), *axes)
            layout = name_axes(axes, info.row_axis)
            heads = axes[layout.index("C")].count_heads() if layout and "C" in layout else 0
            info = replace(info, layout=layout, heads=heads)
        # One row at a time, whatever has an axis for rows holds that one.
        crosses = point in suspect
        infos[point] = replace(
            info,
            crosses_rows=crosses and info.row_axis is None,
            single_row=crosses and info.row_axis is not None and not crosses_rows,
            origin=origins.get(point),
        )
    return infos, crosses_rows


def _find_tokens(info: TensorInfo, half: TensorInfo | None, length: int) -> TensorInfo:
    """The same with the axes that grow with a text, as ``half`` tells: the same tensor of a text of half the length."""
    if info.crosses_rows or half is None or len(half.shape) != len(info.shape):
        return info
    sizes = zip(info.shape, half.shape, strict=True)
    grown = {axis: pair for axis, pair in enumerate(sizes) if len(set(pair)) > 1}
    token_axes = tuple(axis for axis, pair in grown.items() if pair == (length, length // 2))
    return replace(info, token_axes=token_axes, merges_tokens=len(grown) > len(token_axes))


def _find_frames(info: TensorInfo, frames: int) -> TensorInfo:
    """The same with its axes of so many time steps; other positions may be of several of them."""
    letters = info.layout or "?" * len(info.shape)
    axes = tuple(axis for axis, letter in enumerate(letters) if letter in TIME and info.shape[axis] == frames)
    return replace(info, token_axes=axes, merges_tokens=not axes and not set(letters) <= {"N", "C"})


def number_patches(boundaries: Mapping[Point, CallBoundary], prefix: int) -> dict[Point, CallBoundary]:
    """The same with the prefix and the grid of each tensor, as the forward's feature maps tell.

    A transformer's patches come of such a map: of a convolution whose strides are the patches.
    """
    maps = defaultdict[int, set[tuple[int, ...]]](set)  # their sizes, by how many positions they have
    for point, boundary in boundaries.items():
        for info in boundary.tensors if point.site == "output" and not point.function else ():
            if info.layout in ("NCHW", "NCTHW"):
                maps[prod(info.shape[2:])].add(info.shape[2:])

    def number(info: TensorInfo) -> TensorInfo:
        if info.source:  # attention: its keys
            tokens = info.shape[-1]
            is_whole = tokens <= prefix
        elif info.layout in ("NTC", "TNC") and info.entries_per_row == 1:
            tokens = info.size("T")
            # As many tokens as a map has positions means that no class token is among them.
            is_whole = tokens <= prefix or tokens in maps
        else:
            return info
        own = 0 if is_whole else prefix
        grids = [(size[0], size[1]) for size in maps.get(tokens - own, ()) if len(size) == 2]
        return replace(info, prefix=own, grid_size=grids[0] if len(grids) == 1 else None)

    return {
        point: boundary
        if point.site == "attention_sink"
        else replace(boundary, tensors=tuple(map(number, boundary.tensors)))
        for point, boundary in boundaries.items()
    }


def _describe_weights(modules: Modules, calls: Mapping[str, Sequence[Call]]) -> Mapping[str, Sequence[TensorInfo]]:
    """A row's gradients of the parameters of each layer that runs: of its own, and of those of parts that never run.

    Left out are those of scripted modules, integers, and classes of other libraries, such as quantised weights.
    """
    weights = defaultdict[str, list[TensorInfo]](list)
    for name, part in modules.items():
        owner = name
        while not calls[owner] and owner != ".":
            owner = owner.rpartition(".")[0] or "."
        inside = name.removeprefix(owner).removeprefix(".")
        scripted = isinstance(part, torch.jit.ScriptModule)
        for key, value in () if scripted else part.named_parameters(recurse=False):
            if type(value) is nn.Parameter and value.is_floating_point():
                path, shape = f"{inside}.{key}" if inside else key, (1, *value.shape)
                weights[owner].append(TensorInfo((path,), shape, dtype_name(value.dtype), single_row=True))
    return weights


def _describe_layer(name: str, module: nn.Module, calls: Sequence[Call], weights: Sequence[TensorInfo]) -> Layer:
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    hazards = {
        "inplace": getattr(module, "inplace", False) is True,
        "scripted": not calls and is_scripted,
        "never_called": not calls and not is_scripted,
        "attention": any(call.attention is not None for call in calls),
    }
    return Layer(
        name,
        type_before_parametrizations(module).__name__,
        next(module.children(), None) is None,
        sum(parameter.numel() for parameter in module.parameters()),
        tuple(calls),
        tuple(hazard for hazard, is_so in hazards.items() if is_so),
        tuple(weights),
    )

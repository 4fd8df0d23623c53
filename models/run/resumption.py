"""Forwards that resume from a given layer's output, and run only what follows; verified before the first reply.

A forward is Python code and can't be entered in the middle. It runs from the beginning, and every module that would
end before the layer is skipped: it returns NaN in the shapes of its output. Values that depend only on the layer's
output are the same as in a whole forward.

Which these are is found by comparing a whole forward, tensor by tensor, with one that resumes from its layer's output.
Between the two another row runs, so that values which a module keeps from its last forward differ, and skipped modules
return the structure of that row's outputs. But a comparison hides a NaN, masks and integers have none, and values may
be equal by chance: so everything that is computed from placeholders is tracked too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_recorder import NO_SKETCH, CallRecorder, Sketch
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, TensorInfo
from layertap.models.catalog.taint import Taint
from layertap.models.devices.devices import DTYPES
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.errors import SelectorError, escape
from layertap.models.hooks.attach import Modules, OnModuleCall, attach_tensors, observe_calls
from layertap.models.hooks.tensor_tree import iterate_tensors, replace_tensor
from layertap.models.plan.matches import find_matches
from layertap.models.plan.plan import Tap, get_boundary, get_call
from layertap.models.plan.requested import Selector
from layertap.models.points import ATTENTION, Point
from layertap.models.spec import InputDType, InputSpec, Shapes

SMALLEST = 1e-4  # the smallest share of a forward's cost that remains, after its last layer
Placeholder = tuple[object, tuple[TensorInfo, ...]]  # the structure of a call's output, its tensors empty; their infos
SkippedCalls = tuple[Placeholder | None, ...]  # for each call of a module, from the first; None: it runs
CallNumbers = tuple[int | None, ...]  # for each call of a module in a resumed forward: its number if skipped, else None


@dataclass(frozen=True)
class Resumption:
    """Forwards that resume from the output of one call of a layer."""

    start: Tap  # the tensor that is sent
    catalog: Catalog  # of the tensors that depend on it alone, with the costs of what runs
    inputs: tuple[InputSpec, ...]  # the model's, floating ones in ``dtype``
    dtype: torch.dtype
    # By module. The layer's own last skipped call is the one whose output is sent, unless ``start`` is a function's.
    skipped: Mapping[str, SkippedCalls]

    @property
    def shapes(self) -> Shapes:
        """The shapes of the model's inputs, of one row."""
        return tuple(each.shape for each in self.inputs)

    @property
    def takes(self) -> InputSpec:
        """What a request sends for each row: the layer's output without the row axis; a text's may have any length."""
        info = self.start.info
        spec = InputSpec(escape_point(self.start.point), info.shape[1:], cast("InputDType", info.dtype))
        longest = next((each.longest for each in self.inputs if each.longest is not None), None)
        if longest is None or len(info.token_axes) != 1:
            return spec
        return replace(spec, longest=longest, long_axis=info.token_axes[0] - 1)

    def forward(self, run: Forward, modules: Modules, sent: Tensor) -> object:
        """What the model returns when it resumes from a layer's output; its modules are restored afterwards.

        ``sent`` has its rows on axis 0; the model may write to it.
        """
        point = self.start.point
        with ExitStack() as stack:
            if point.function:
                attach_tensors(stack, modules, [point], lambda *_: self._begin(sent))
            for name, calls in self.skipped.items():
                is_own = name == point.layer
                _skip_calls(stack, modules[name or "."], calls, partial(self._fill, sent, is_own))
            return run(self._make_inputs(sent))

    def _fill(self, sent: Tensor, is_own: bool, placeholder: Placeholder, is_last: bool) -> Any:
        """What a skipped call returns, in new memory; the layer's own last call returns the sent tensor in it."""
        value, infos = placeholder
        dtypes = {path: tensor.dtype for path, tensor in iterate_tensors(value)}
        for info in infos:
            empty = _make_empty(info.shape_for(len(sent)), dtypes[info.path], sent.device)
            value = replace_tensor(value, info.path, empty)
        return replace_tensor(value, self.start.point.path, self._begin(sent)) if is_own and is_last else value

    def _begin(self, sent: Tensor) -> Tensor:
        """The sent tensor; with grad enabled it requires grad, so that the graph shows what depends on it."""
        sent = sent.to(DTYPES[self.start.info.dtype])
        if not torch.is_grad_enabled() or not sent.is_floating_point():
            return sent
        return sent.detach().requires_grad_().clone()

    def _make_inputs(self, sent: Tensor) -> Inputs:
        """Inputs for the parts of a forward that run although their results are not used: NaN, or zeros."""
        dtypes = {each.name: DTYPES[each.dtype] for each in self.inputs}
        dtypes = {name: self.dtype if dtype.is_floating_point else dtype for name, dtype in dtypes.items()}
        shapes = {each.name: (len(sent), *each.shape) for each in self.inputs}
        return {name: _make_empty(shape, dtypes[name], sent.device) for name, shape in shapes.items()}


def find_start(selector: Selector, catalog: Catalog) -> Tap:
    """The tensor that a forward resumes from; UnknownLayerError or SelectorError if there is not exactly one."""
    matches, _ = find_matches(selector, catalog)
    if len(matches) != 1 or matches[0].point.site != "output":
        raise SelectorError(
            f"{escape(selector.text)} does not name the output of one layer",
            hint="name a layer without a site; where it returns several tensors, one of them: 'LAYER[path]'",
        )
    point, info = matches[0].point, matches[0].info
    if point.layer == "." and not point.function:
        raise SelectorError("nothing runs after the model's own output", hint="resume from a layer inside")
    if info.dtype not in DTYPES:
        raise SelectorError(
            f"'{escape_point(point)}' is of dtype {info.dtype}, which can't be sent",
            hint="resume from a layer after it",
        )
    if info.row_axis != 0 or info.entries_per_row != 1 or info.crosses_rows or info.single_row:
        raise SelectorError(
            f"'{escape_point(point)}' does not return one entry for each input, so none can be sent",
            hint="resume from a layer around it, or after it",
        )
    return matches[0]


def not_resumable_error(point: Point) -> SelectorError:
    """The error if a model can't resume from a point."""
    return SelectorError(
        f"this model's forward can't be resumed from '{escape_point(point)}'",
        hint="resume from a layer around it, or after it",
    )


def format_point(point: Point) -> str:
    """An output as a request names it, unescaped and not shortened."""
    return point.format_name(f"#{point.call}" if point.call else "")


def escape_point(point: Point) -> str:
    """``format_point``, safe to show."""
    return escape(format_point(point))[1:-1]


def _skip_calls(
    stack: ExitStack, module: nn.Module, calls: SkippedCalls, fill: Callable[[Placeholder, bool], Any]
) -> None:
    """Until the stack closes, a module's calls that have a placeholder return it filled instead of running.

    ``fill`` takes the placeholder, and whether it is the last one.
    """
    numbers, own_forward, run = count(), vars(module).get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        placeholder = calls[number] if number < len(calls) else None
        return run(*args, **kwargs) if placeholder is None else fill(placeholder, number == len(calls) - 1)

    def restore() -> None:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward

    module.forward = forward
    stack.callback(restore)


def _make_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, or zeros if the dtype has no NaN."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def verify_resumable(
    module: nn.Module,
    start: Tap,
    catalog: Catalog,
    inputs: tuple[InputSpec, ...],
    run: Forward,
    batch: Inputs,
    dtype: torch.dtype,
) -> Resumption:
    """Forwards that resume from a point, verified with three forwards; SelectorError if the model can't resume there.

    ``run`` calls the module; ``batch`` has a few rows, floating ones in ``dtype``, of which the first is only used for
    the structure of outputs.
    Device errors, such as out of memory, are raised as they are: they do not mean that the model can't resume.
    """
    point, modules = start.point, Modules(module)
    skipped = find_skipped_calls(module, point, catalog)
    first = {name: value[:1].clone() for name, value in batch.items()}
    others = {name: value[1:2].clone() if catalog.crosses_rows else value[1:].clone() for name, value in batch.items()}
    taint, sent = Taint(), list[Tensor]()
    whole = CallRecorder(module)
    # What depends on what skipped calls return equals nothing.
    resumed = CallRecorder(module, look=lambda each: NO_SKETCH if taint.reaches(each) else Sketch.from_tensor(each))

    def run_tainted(batch: Inputs) -> object:
        taint.marked.mark(batch.values())
        with taint:
            return run(batch)

    try:
        with torch.no_grad():
            with ExitStack() as stack:
                attach_tensors(stack, modules, [point], lambda _, tensor: sent.append(tensor.clone()))
                whole.watch(run, others)
            placeholders = collect_placeholders(module, run, first, skipped, catalog)
            draft = Resumption(start, catalog, inputs, dtype, placeholders)
            with observe_calls(module, lambda *_: None, create_marker(taint, module, point, skipped)):
                resumed.watch(lambda batch: draft.forward(run_tainted, modules, batch["sent"]), {"sent": sent[-1]})
    except Exception as error:  # a model may raise anything on NaN: it can't resume
        if is_device_error(error):
            raise
        raise not_resumable_error(point) from error
    seen = resumed.tensors
    same = {key for key, each in whole.tensors.items() if key in seen and each.sketch.matches(seen[key].sketch)}
    return replace(draft, catalog=build_catalog(module, point, catalog, skipped, same))


def collect_placeholders(
    module: nn.Module, run: Forward, batch: Inputs, numbers: Mapping[str, CallNumbers], catalog: Catalog
) -> dict[str, SkippedCalls]:
    """For each module, the structure of what its skipped calls return, without the numbers."""
    values: dict[tuple[str, int | None], Placeholder] = {}
    names = {module.get_submodule(name): name for name in numbers}

    def keep(part: nn.Module, call: int, value: object) -> None:
        name = names.get(part)
        if name is None or call not in numbers[name]:
            return
        for path, tensor in iterate_tensors(value):
            value = replace_tensor(value, path, torch.empty(0, dtype=tensor.dtype))
        values[name, call] = value, catalog.layers[name].calls[call].output.tensors

    with observe_calls(module, lambda *_: None, keep):
        run(batch)
    return {
        name: tuple(None if number is None else values[name, number] for number in calls)
        for name, calls in numbers.items()
    }


def create_marker(taint: Taint, module: nn.Module, point: Point, skipped: Mapping[str, CallNumbers]) -> OnModuleCall:
    """A callback that marks what a skipped call returns, all but the tensor that was sent, which ``point`` is."""
    calls = {module.get_submodule(name): numbers for name, numbers in skipped.items()}
    start = None if point.function else Modules(module)[point.layer]

    def mark(part: nn.Module, call: int, value: object) -> None:
        numbers = calls.get(part, ())
        if call < len(numbers) and numbers[call] is not None:
            sent = point.path if part is start and call == len(numbers) - 1 else None
            taint.marked.mark(tensor for path, tensor in iterate_tensors(value) if path != sent)

    return mark


def find_skipped_calls(module: nn.Module, point: Point, catalog: Catalog) -> dict[str, CallNumbers]:
    """The outermost modules that are skipped, and which of their calls; for the layer itself those up to the point.

    Hooks count calls as they run. A call that contains a call of a module that also runs later is not skipped, or
    the later calls would be miscounted. SelectorError if the layer's own call is such a call.
    """
    start = get_call(point, catalog)
    target = Modules(module)[point.layer]
    names = {part: name for name, part in module.named_modules()} | {target: point.layer}
    calls_of = {part: catalog.layers[name or "."].calls for part, name in names.items()}
    late = {target} | {part for part, calls in calls_of.items() if not all(_ends_before(call, start) for call in calls)}
    counted = [call for part in late for call in calls_of[part]]
    if any(map(start.contains, counted)):
        raise not_resumable_error(point)
    # A layer whose function is the point runs its own code; only its children may be skipped.
    skipped = {} if point.function else {target: calls_of[target][: point.call + 1]}

    def walk(part: nn.Module) -> None:
        for child in part.children():
            calls = calls_of[child]
            if child not in late and calls and not any(call.contains(each) for call in calls for each in counted):
                skipped[child] = calls
            elif child is not target or point.function:
                walk(child)

    walk(module)
    spans = [call for calls in skipped.values() for call in calls if _ends_before(call, start) or call is start]
    return {
        names[part]: tuple(
            number if _ends_before(call, start) or call is start else None
            for number, call in enumerate(calls)
            if not any(span.contains(call) for span in spans)
        )
        for part, calls in skipped.items()
    }


def _ends_before(call: Call, start: Call) -> bool:
    """Whether a call ends before the layer's call begins, or is inside it."""
    return call.output.order < start.input.order or start.contains(call)


def build_catalog(
    module: nn.Module, point: Point, catalog: Catalog, skipped: Mapping[str, CallNumbers], same: Set[Point]
) -> Catalog:
    """The catalog of the tensors that were the ``same`` in a whole forward and in a resumed one."""
    spent = get_boundary(point, catalog).cost
    rest = max(1.0 - spent, SMALLEST)
    modules = Modules(module)
    first = {name: modules.names[part] for name, part in modules.items()}
    skipped_calls = {(first[name or "."], number) for name, calls in skipped.items() for number in calls}
    boundaries: dict[Point, CallBoundary] = {}
    cut: set[tuple[str, int]] = set()  # calls of which something is left out: their attention is, too
    for key, boundary in catalog.boundaries.items():
        call = first[key.layer], key.call
        if key.site in ATTENTION and (call in cut or call in skipped_calls):
            continue
        tensors = tuple(info for info in boundary.tensors if Point(*call, info.path, key.site) in same)
        if key.site in ATTENTION:
            tensors = boundary.tensors
        elif len(tensors) < len(boundary.tensors):
            cut.add(call)
        cost = round(max(boundary.cost - spent, 0.0) / rest, 4)
        boundaries[key] = replace(boundary, cost=cost, tensors=tensors)
    return replace(
        catalog.with_boundaries(boundaries),
        seconds=catalog.seconds * rest,
        costs=replace(catalog.costs, base=catalog.costs.base * rest, per_row=catalog.costs.per_row * rest),
        start=format_point(point),
    )

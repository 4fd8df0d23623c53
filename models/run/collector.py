"""Collector: the pending work of one forward for the requests that share it, done by hooks at each call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import TENSORS
from layertap.models.catalog.row_tensor import RowTensor, Span
from layertap.models.devices.devices import dtype_name
from layertap.models.errors import InputError, LayerNotReachedError, LayertapError, OtherCallsError, escape
from layertap.models.hooks.attach import OF_FUNCTIONS, StopForward
from layertap.models.hooks.own_code import run_own
from layertap.models.hooks.running_calls import Changes, OnCall
from layertap.models.hooks.tensor_tree import Arguments, Path, TensorsByPath, iterate_tensors, replace_tensor
from layertap.models.plan.operations import apply_operation
from layertap.models.plan.plan import Capture, ResolvedIntervention, ResolvedObjective, Tap
from layertap.models.points import ATTENTION, GRADIENTS, CallKey, HookKind, Point, format_path
from layertap.models.run.batch_slices import RequestSlice, find_spans
from layertap.models.run.gradient_anchors import GradientAnchors, compute_objective
from layertap.models.run.reduction import ReducedTensor, reduce


@dataclass
class GradientAnchor:
    """Where a gradient is wanted, or changed."""

    tap: Tap
    interventions: list[tuple[RequestSlice, ResolvedIntervention]] = field(default_factory=list)


@dataclass
class CallActions:
    """The work at one call of a module, on one side; it is done in the order of the fields.

    ``objectives`` are the indices of the slices whose objectives look at it.
    """

    interventions: list[tuple[RequestSlice, ResolvedIntervention]] = field(default_factory=list)
    anchors: dict[Path, GradientAnchor] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    objectives: list[int] = field(default_factory=list)

    @property
    def point(self) -> Point:
        """One of those where something is changed or differentiated."""
        return [
            *(anchor.tap.point for anchor in self.anchors.values()),
            *(each.point for _, each in self.interventions),
        ][0]


def group_actions(
    slices: Sequence[RequestSlice], captures: Iterable[Capture], modules: Mapping[str, nn.Module]
) -> Mapping[tuple[nn.Module, HookKind], Mapping[CallKey, CallActions]]:
    """The actions by module and side, then by call."""
    groups: dict[tuple[nn.Module, HookKind], dict[CallKey, CallActions]] = defaultdict(lambda: defaultdict(CallActions))
    captures = tuple(captures)
    changes = [change for request_slice in slices for change in request_slice.interventions]
    # Weights that are changed are seen where that is done, and nowhere else.
    unfused = {modules[change.point.layer] for change in changes if change.point.site in ATTENTION}
    gradients = [capture for capture in captures if capture.point.site in GRADIENTS]
    changed = {modules[tap.point.layer] for tap in (*changes, *gradients) if tap.point.function}

    def get_actions(point: Point) -> CallActions:
        module, hook = modules[point.layer], point.hook
        if hook == "attention" and module in unfused:
            hook = "unfused"
        elif hook == "function" and module in changed:
            hook = "changed_function"
        return groups[module, hook][point.call_key]

    def get_anchor(tap: Tap) -> GradientAnchor:
        return get_actions(tap.point).anchors.setdefault(tap.point.path, GradientAnchor(tap))

    for request_slice in slices:
        for change in request_slice.interventions:
            target = get_anchor(change) if change.point.site in GRADIENTS else get_actions(change.point)
            target.interventions.append((request_slice, change))
    for capture in gradients:
        get_anchor(capture)
    for capture in captures:
        if capture.point.site not in GRADIENTS:
            get_actions(capture.point).captures.append(capture)
    for index, request_slice in enumerate(slices):
        if request_slice.objective is not None:
            get_actions(request_slice.objective.point).objectives.append(index)
    return groups


class Collector:
    """The pending work of one forward: hooks close over it, nothing of it is stored on the model.

    ``results`` are the captures made so far, reduced span by span.
    """

    def __init__(
        self,
        slices: tuple[RequestSlice, ...],
        row_count: int,
        modules: Mapping[str, nn.Module],
        token_mask: Tensor | None,
        stops: bool = True,
    ) -> None:
        """``stops``: whether the forward may be left midway, when nothing is pending."""
        self._stops = stops
        spans = find_spans(slices, row_count)
        self.results: dict[tuple[Capture, Span], ReducedTensor] = {}
        self._pending = {capture: spans[capture] for capture in spans if capture.point.site not in GRADIENTS}
        self._gradients = {capture: spans[capture] for capture in spans if capture.point.site in GRADIENTS}
        self._slices = slices
        self._objectives = {index: each.objective for index, each in enumerate(slices) if each.objective is not None}
        self._has_graph = bool(self._objectives)
        self._row_count = row_count
        self._modules = modules
        self._token_mask = token_mask
        self._anchors = GradientAnchors()
        self._error: InputError | None = None
        self._has_stopped = False
        self._misfits: list[LayertapError] = []
        self._actions = dict(group_actions(slices, spans, modules))
        self._calls_run: dict[tuple[nn.Module, HookKind], dict[CallKey, int]] = defaultdict(dict)
        self._expected = {key: count for each in slices for key, count in each.calls}
        for layer, _, function in self._expected:  # all are counted, whether anything is wanted of them or not
            sides: tuple[HookKind, ...] = OF_FUNCTIONS if function else ("output",)
            if not any((modules[layer], side) in self._actions for side in sides):
                self._actions[modules[layer], sides[0]] = {}
        self._unmade = {change.point for each in slices for change in each.interventions}
        self._absent: dict[Point, str] = {}  # points whose call held other tensors

    def set_grad_mode(self) -> AbstractContextManager[object]:
        """How the forward runs: with a graph only where something is differentiated."""
        # Not inference mode: tensors that a model keeps (tables, caches) must be usable in a forward with a graph.
        return torch.enable_grad() if self._has_graph else torch.no_grad()

    @property
    def changes_outputs(self) -> bool:
        """Whether other tensors go on in place of those that leave some calls."""
        calls = (each for (_, side), calls in self._actions.items() if side == "output" for each in calls.values())
        return any(actions.interventions or actions.anchors for actions in calls)

    def list_callbacks(self) -> Iterator[tuple[nn.Module, HookKind, OnCall]]:
        """One for each module and side, though a tied module may be asked for under several names."""
        for (module, side), calls in self._actions.items():
            yield module, side, partial(self._on_call, calls, self._calls_run[module, side])

    def list_recompute_callbacks(self) -> Iterator[tuple[nn.Module, HookKind, OnCall]]:
        """For the backward, in which a model with activation checkpointing recomputes activations."""
        for (module, side), calls in self._actions.items():
            changing = {call: actions for call, actions in calls.items() if actions.interventions or actions.anchors}
            if changing and self._has_graph:
                yield module, side, partial(self._on_recompute, changing, self._calls_run[module, side])

    def check(self) -> None:
        """InputError if a tensor was not as promised, LayerNotReachedError if anything is still pending."""
        if self._error is not None:
            raise (*self._misfits, self._error)[0]
        self._check_calls()
        points = [capture.point for capture in self._pending]
        points += [objective.point for objective in self._objectives.values()]
        # A forward that was stopped may have been stopped before attention inside a layer.
        points += [point for point in self._unmade if not (self._has_stopped and point.site in ATTENTION)]
        if errors := [*self._misfits, *(_make_unreached_error(point, self._absent.get(point)) for point in points)]:
            errors[0].points = {point: reason for error in errors for point, reason in error.points.items()}
            raise errors[0]

    def _check_calls(self) -> None:
        """OtherCallsError if a forward that ended made other numbers of calls than its plan is for."""
        made = {key: self._count_calls(*key) for key in self._expected}
        for (layer, call, kind), count in made.items():
            if kind == TENSORS and count > (planned := self._expected[layer, call, kind]):
                name = escape(f"{layer}#{call}")
                detail = f"with this input {name} holds {count} tensors, not {planned}"
                raise InputError(detail, hint="ask for a layer after it, or for one of them by its path")
        counts = {key: n for key, n in made.items() if 0 < n != self._expected[key] and key[2] != TENSORS}
        if counts:
            (layer, call, function), count = next(iter(counts.items()))
            name = escape(f"{layer}#{call}/{function}" if function else layer)
            planned = self._expected[layer, call, function]
            detail = f"with this input {name} runs {count} times, not {planned} times"
            error = OtherCallsError(detail, hint="name its calls by their numbers")
            error.counts = counts
            raise error

    def _count_calls(self, layer: str, number: int, function: str) -> int:
        if function == TENSORS:
            return self._calls_run[self._modules[layer], "output"].get(number, 0)
        keys = [key for (module, _), run in self._calls_run.items() if module is self._modules[layer] for key in run]
        if not function:
            return len({key[0] if isinstance(key, tuple) else key for key in keys})
        called = {key[:2] for key in keys if isinstance(key, tuple)}
        return sum(call == number and name.rpartition("#")[0] == function for call, name in called)

    def backward(self) -> None:
        """Differentiate the objectives, and reduce the gradients that are wanted."""
        if not self._gradients:
            return
        gradients = self._anchors.compute_gradients()
        for capture, spans in self._gradients.items():
            gradient = gradients.get(capture.point.locate(self._modules))
            if gradient is None:
                raise _make_unreached_error(capture.point, self._absent.get(capture.point))
            for span in spans:
                run_own(self._reduce, capture, span, gradient)

    def find_unreached(self) -> set[Point]:
        """Objectives' points without a graph to the first point whose gradient is wanted: zero may be wrong there."""
        unreached = set()
        for each in self._slices:
            anchors = {
                capture.point.locate(self._modules) for capture in each.captures if capture.point.site in GRADIENTS
            }
            if each.objective is not None and anchors and not self._anchors.reaches(each.objective.point, anchors):
                unreached.add(each.objective.point)
        return unreached

    def _on_call(
        self, calls: Mapping[CallKey, CallActions], calls_run: dict[CallKey, int], call: CallKey, value: object
    ) -> Changes | None:
        """Do the work at a call; returns the tensors that replace the call's own."""
        tensors = dict(iterate_tensors(value))
        calls_run[call] = len(tensors)
        actions = calls.get(call)
        if actions is None:
            return None
        changes: dict[Path, Tensor] = {}
        find = partial(self._find_path, value, tensors)
        self._change_tensors(actions, find, tensors, changes)
        for anchor in actions.anchors.values():
            if (path := find(anchor.tap)) is not None:
                tensors[path] = changes[path] = self._anchor(anchor, tensors[path])
        for capture in actions.captures:
            if capture in self._pending and (path := find(capture)) is not None:
                self._capture(capture, tensors[path])
        for index in actions.objectives:
            objective = self._objectives.get(index)
            if objective is not None and (path := find(objective)) is not None:
                self._add_objective(index, objective, tensors[path])
        if self._stops and not self._pending and not self._objectives and not self._expected:
            self._has_stopped = True
            raise StopForward
        self._check_containers(value, changes)
        return changes

    def _on_recompute(
        self, calls: Mapping[CallKey, CallActions], calls_run: dict[CallKey, int], call: CallKey, value: object
    ) -> Changes | None:
        """Change the only call's tensors as they were changed when it ran first; nothing else is wanted of it."""
        # Of functions those of the module's call in which they ran first.
        keys = {
            (each[0], *call[1:]) if isinstance(each, tuple) and isinstance(call, tuple) else each for each in calls_run
        }
        if len(keys) > 1:  # segments are recomputed in reverse: the call can't be identified
            point = next(iter(calls.values())).point
            self._stop(
                f"the model computes {point.escaped_text} again in its backward, where its calls can't be told apart",
                "ask for a layer that runs once, or load the model without activation checkpointing",
            )
        tensors, changes = dict(iterate_tensors(value)), dict[Path, Tensor]()
        find = partial(self._find_path, value, tensors)
        actions = next((calls[key] for key in keys if key in calls), None)
        if actions is None:
            return None
        self._change_tensors(actions, find, tensors, changes)
        for anchor in actions.anchors.values():
            if (path := find(anchor.tap)) is not None:  # the same steps, on anchors that nobody reads
                location = anchor.tap.point.locate(self._modules)
                changes[path] = GradientAnchors().anchor(location, tensors[path], ())
        return changes

    def _find_path(self, value: object, tensors: Mapping[Path, Tensor], tap: Tap) -> Path | None:
        """Where a call has a tensor that the catalog knows at a path; None, and a note, if it has none there.

        Arguments are found by their parameters. A lone tensor that is now in a tuple is the only one there that fits.
        """
        path = tap.point.path
        if isinstance(value, Arguments):
            path = value.find_path(path, tap.info.argument)
        if path in tensors:
            return path
        if not path and isinstance(value, (tuple, list)):
            items = (each for each in tensors.items() if len(each[0]) == 1)
            fitting = [each for each, tensor in items if not self._find_misfit(tensor, tap)]
            if len(fitting) == 1:
                return fitting[0]
        paths = ", ".join(format_path(each) or "a single tensor" for each in tensors)
        self._absent[tap.point] = f"its call has {paths or 'no tensor'}"
        return None

    def _change_tensors(
        self,
        actions: CallActions,
        find: Callable[[Tap], Path | None],
        tensors: dict[Path, Tensor],
        changes: dict[Path, Tensor],
    ) -> None:
        for request_slice, change in actions.interventions:
            if (path := find(change)) is not None:
                self._check_tensor(tensors[path], change)
                changed = _apply_intervention(request_slice, change, self._token_mask, tensors[path])
                tensors[path] = changes[path] = changed
                self._unmade.discard(change.point)

    def _anchor(self, anchor: GradientAnchor, tensor: Tensor) -> Tensor:
        self._unmade.discard(anchor.tap.point)
        self._check_tensor(tensor, anchor.tap)
        self._check_differentiable(anchor.tap.point)
        changes = [partial(_apply_intervention, *each, self._token_mask) for each in reversed(anchor.interventions)]
        return self._anchors.anchor(anchor.tap.point.locate(self._modules), tensor, changes)

    def _capture(self, capture: Capture, tensor: Tensor) -> None:
        spans = self._pending.pop(capture)
        if misfit := self._find_misfit(tensor, capture):
            self._misfits.append(misfit)
            return
        for span in spans:
            self._reduce(capture, span, tensor.detach())

    def _reduce(self, capture: Capture, span: Span, tensor: Tensor) -> None:
        part = RowTensor.from_hook(tensor, capture.info, self._token_mask).select(span)
        self.results[capture, span] = reduce(part, capture.reduction, capture.length)

    def _add_objective(self, index: int, objective: ResolvedObjective, tensor: Tensor) -> None:
        self._check_tensor(tensor, objective)
        self._check_differentiable(objective.point)
        part = RowTensor.from_hook(tensor, objective.info, self._token_mask).select(self._slices[index].span)
        self._anchors.add(objective.point, compute_objective(part, objective.objective))
        del self._objectives[index]

    def _check_tensor(self, tensor: Tensor, tap: Tap) -> None:
        """Leave the forward where a tensor can't be cut by what its catalog says: rows would be cut elsewhere."""
        if misfit := self._find_misfit(tensor, tap):
            self._error = misfit
            raise StopForward from misfit

    def _find_misfit(self, tensor: Tensor, tap: Tap) -> InputError | None:
        """What is wrong with a tensor that is not what its catalog says."""
        shape, expected = tuple(RowTensor.from_hook(tensor, tap.info).value.shape), tap.info.shape_for(self._row_count)
        if shape == expected and dtype_name(tensor.dtype) == tap.info.dtype:
            return None
        difference = f"is {dtype_name(tensor.dtype)} {list(shape)}, not {tap.info.dtype} {list(expected)}"
        one_row = "its size depends on the input's values: ask for another layer"
        hint = "send one input at a time" if self._row_count > 1 else one_row
        detail = f"with this input {tap.point.escaped_text} {difference}"
        return InputError(detail, hint=hint, points={tap.point: difference})

    def _check_differentiable(self, point: Point) -> None:
        """Leave the forward where the model itself keeps no graph: zero would be no answer."""
        if not torch.is_grad_enabled():
            self._stop(
                f"the model computes {point.escaped_text} without gradients",
                "ask for one outside the model's own torch.no_grad()",
            )

    def _check_containers(self, value: object, changes: Changes) -> None:
        """Leave the forward where tensors can't be put into what holds them."""
        try:
            if isinstance(value, Arguments):
                value.replace(changes)
            for path, tensor in changes.items() if not isinstance(value, (Arguments, TensorsByPath)) else ():
                replace_tensor(value, path, tensor)
        except InputError as error:
            self._error = error
            raise StopForward from error

    def _stop(self, detail: str, hint: str) -> NoReturn:
        """Leave the forward; ``check`` then raises the InputError, which a model might catch here."""
        self._error = InputError(detail, hint=hint)
        raise StopForward


def _make_unreached_error(point: Point, absent: str | None) -> LayerNotReachedError:
    detail = f"this input's forward never reached {point.escaped_text}"
    if absent is not None:
        detail = f"with this input there is no {point.escaped_text}: {absent}"
    return LayerNotReachedError(detail, points={point: "is not reached by every input"})


# Not a method: a graph whose hooks held the collector, which holds tensors of that graph, would never be freed.
def _apply_intervention(
    request_slice: RequestSlice, change: ResolvedIntervention, token_mask: Tensor | None, value: Tensor
) -> Tensor:
    """A tensor in which one request's rows are changed."""
    rows = RowTensor.from_hook(value, change.info, token_mask)
    changed = apply_operation(rows.select(request_slice.span), change.operation, request_slice.row_offset)
    changed = rows.replace_rows(request_slice.span, changed).reshape(value.shape)
    # In the memory order of what was there: in another, kernels round the other rows otherwise.
    return changed if changed.stride() == value.stride() else torch.empty_like(value).copy_(changed)

"""One forward for several requests: attach hooks, run it, change and reduce inside the hooks, detach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from layertap.models.catalog.catalog import TENSORS
from layertap.models.catalog.row_tensor import RowTensor, Span
from layertap.models.devices.devices import dtype_name
from layertap.models.errors import InputError, LayerNotReachedError, LayertapError, OtherForwardError, escape
from layertap.models.hooks.attach import Modules, StopForward, attach_values
from layertap.models.hooks.kept import KeptOutputs
from layertap.models.hooks.running_calls import Changes, run_own
from layertap.models.hooks.tensor_tree import Arguments, Path, TensorsByPath, iterate_tensors, replace_tensor
from layertap.models.plan.objectives import compute_objective
from layertap.models.plan.operations import apply_operation
from layertap.models.plan.plan import Capture, ResolvedIntervention, ResolvedObjective, Tap
from layertap.models.points import ATTENTION, GRADIENTS, Point, format_path
from layertap.models.run.batch_slices import BatchActivations, RequestSlice, find_span
from layertap.models.run.gradient_anchors import GradientAnchors, find_unreachable
from layertap.models.run.reduction import ReducedTensor, reduce

Interventions = list[tuple[RequestSlice, ResolvedIntervention]]


def extract_slices(
    modules: Modules,
    forward: Callable[[], object],
    slices: Iterable[RequestSlice],
    row_count: int,
    token_mask: Tensor | None = None,
    stops: bool = True,
) -> BatchActivations:
    """Run one forward for several requests: the hooks are the union, each reduces only the rows that asked.

    ``token_mask`` (rows, tokens), on the host, is False for padding. The forward ends as soon as nothing is pending, if
    it ``stops``; a backward follows if a slice has an objective. If that finds no graph ``forward`` runs once more. The
    results are on the model's device, without a graph. LayerNotReachedError if the forward ends earlier, InputError if
    a tensor is not as its catalog says; errors of the forward pass through. In every case the hooks are gone. Not
    thread-safe: hooks run in every forward through the modules.
    """
    slices = tuple(slices)
    has_graph = any(each.objective is not None for each in slices)
    extractor = FeatureExtractor(slices, row_count, modules, token_mask, stops)
    # Not inference mode: tensors that a model keeps (tables, caches) must be usable in a forward with a graph.
    with torch.enable_grad() if has_graph else torch.no_grad():
        with ExitStack() as weights:
            extractor.anchor_weights(weights)
            with ExitStack() as stack:
                extractor.attach(stack)
                with suppress(StopForward):
                    forward()
            extractor.check()
            if has_graph:
                with ExitStack() as stack, suppress(StopForward):
                    extractor.attach_recompute(stack)
                    extractor.backward()
                extractor.check()
        for point in find_unreachable(forward, modules, extractor.find_unreached()):
            raise InputError(
                f"between its input and {point.escaped_text} the model computes without gradients",
                hint="take an objective before the model's own torch.no_grad() or detach()",
            )
    return BatchActivations(extractor.results)


@dataclass
class CallActions:
    """The work at one side of a call, done in the order of the fields."""

    interventions: Interventions = field(default_factory=list)
    anchors: dict[Path, tuple[Tap, Interventions]] = field(default_factory=dict)  # with changes of the gradient
    captures: list[Capture] = field(default_factory=list)
    objectives: list[int] = field(default_factory=list)  # indices of the slices whose objectives are computed here


def group_actions(
    slices: Sequence[RequestSlice], captures: Iterable[Capture], modules: Modules
) -> Mapping[Point, CallActions]:
    """The actions by located call: a point without a path."""
    groups: dict[Point, CallActions] = defaultdict(CallActions)

    def get_actions(tap: Tap) -> CallActions:
        return groups[replace(modules.locate(tap.point), path=())]

    def get_anchor(tap: Tap) -> Interventions:
        return get_actions(tap).anchors.setdefault(tap.point.path, (tap, []))[1]

    for request_slice in slices:
        for change in request_slice.interventions:
            is_gradient = change.point.site in GRADIENTS
            target = get_anchor(change) if is_gradient else get_actions(change).interventions
            target.append((request_slice, change))
    for capture in captures:
        if capture.point.site == "grad_weight":
            continue  # no hook shows it
        if capture.point.site in GRADIENTS:
            get_anchor(capture)
        else:
            get_actions(capture).captures.append(capture)
    for index, request_slice in enumerate(slices):
        if request_slice.objective is not None:
            get_actions(request_slice.objective).objectives.append(index)
    return groups


class FeatureExtractor:
    """The hooks of one forward, with what is still to be done in them: nothing of it is stored on the model.

    ``results`` are the captures made so far, reduced for each request that wants them.
    """

    def __init__(
        self,
        slices: tuple[RequestSlice, ...],
        row_count: int,
        modules: Modules,
        token_mask: Tensor | None,
        stops: bool = True,
    ) -> None:
        """``stops``: whether the forward may be left midway, when nothing is pending."""
        self._stops = stops
        # By capture the rows that each request wants it for, in order: of a dictionary only the keys count.
        spans: dict[Capture, dict[Span | None, None]] = {}
        for each in slices:
            for capture in each.captures:
                spans.setdefault(capture, {})[find_span(capture, each)] = None
        self.results: dict[tuple[Capture, Span | None], ReducedTensor] = {}
        self._pending = {capture: spans[capture] for capture in spans if capture.point.site not in GRADIENTS}
        self._gradients = {capture: spans[capture] for capture in spans if capture.point.site in GRADIENTS}
        self._slices = slices
        self._objectives = {index: each.objective for index, each in enumerate(slices) if each.objective is not None}
        self._row_count = row_count
        self._modules = modules
        self._token_mask = token_mask
        self._anchors = GradientAnchors()
        self._error: InputError | None = None
        self._has_stopped = False
        self._misfits: list[LayertapError] = []
        self._actions = dict(group_actions(slices, spans, modules))
        self._changed = {call for call, each in self._actions.items() if each.interventions or each.anchors}
        self._calls_run: dict[Point, int] = {}  # how many tensors each call held
        self._expected = {key: count for each in slices for key, count in each.calls}
        self._unmade = {change.point for each in slices for change in each.interventions}
        self._shapes: dict[Point, tuple[int, ...]] = {}  # of tensors of other sizes than planned
        self._absent: dict[Point, str] = {}  # points whose call held other tensors

    def attach(self, stack: ExitStack) -> None:
        """Attach the hooks of a forward, until the stack ends."""
        # All calls of these are counted, whether anything is wanted of them or not.
        counted = [Point(layer, 0, (), "output", kind.replace(TENSORS, "")) for layer, _, kind in self._expected]
        points = [*self._actions, *map(self._modules.locate, counted)]
        replaces_outputs = any(call.site == "output" and not call.function for call in self._changed)
        kept = KeptOutputs(self._modules["."]) if replaces_outputs else None
        attach_values(stack, self._modules, points, self._on_call, changed=self._changed, kept=kept)

    def anchor_weights(self, stack: ExitStack) -> None:
        """Anchor the weights whose gradients are wanted, until the stack ends; InputError for several rows."""
        weights = {capture.point for capture in self._gradients if capture.point.site == "grad_weight"}
        if weights and self._row_count > 1:
            detail = "gradients of weights are taken of one input at a time"
            raise InputError(detail, hint="leave 'isolated' out, or send one input")
        self._anchors.anchor_weights(stack, self._modules, weights)

    def attach_recompute(self, stack: ExitStack) -> None:
        """Attach the hooks of a backward, in which a model with activation checkpointing recomputes activations."""
        attach_values(stack, self._modules, self._changed, self._on_recompute, changed=self._changed)

    def check(self) -> None:
        """InputError if a tensor was not as promised, LayerNotReachedError if anything is still pending."""
        if self._error is not None:
            raise (*self._misfits, self._error)[0]
        self._check_calls()
        points = [capture.point for capture in self._pending]
        points += [objective.point for objective in self._objectives.values()]
        # A forward that was stopped may have been stopped before attention inside a layer.
        points += [point for point in self._unmade if not (self._has_stopped and point.site in ATTENTION)]
        if errors := [*self._misfits, *map(self._make_unreached_error, points)]:
            errors[0].points = {point: reason for error in errors for point, reason in error.points.items()}
            raise errors[0]

    def _check_calls(self) -> None:
        """OtherForwardError if a forward that ended made other numbers of calls than its plan is for."""
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
            error = OtherForwardError(detail, hint="name its calls by their numbers")
            error.counts = counts
            raise error

    def _count_calls(self, layer: str, number: int, function: str) -> int:
        output = self._modules.locate(Point(layer, number, (), "output"))
        if function == TENSORS:
            return self._calls_run.get(output, 0)
        run = [call for call in self._calls_run if call.layer == output.layer]
        if not function:
            return len({call.call for call in run})
        named = {call.function for call in run if call.call == number and call.function}
        return sum(each.rpartition("#")[0] == function for each in named)

    def backward(self) -> None:
        """Differentiate the objectives, and reduce the gradients that are wanted."""
        if not self._gradients:
            return
        gradients = self._anchors.compute_gradients()
        for capture, spans in self._gradients.items():
            of_weight = capture.point.site == "grad_weight"
            gradient = gradients.get(capture.point if of_weight else self._modules.locate(capture.point))
            if gradient is None:
                raise self._make_unreached_error(capture.point)
            if of_weight:
                gradient = gradient.to_dense().reshape(capture.info.shape)
            for span in spans:
                run_own(self._reduce, capture, span, gradient)

    def find_unreached(self) -> set[Point]:
        """Objectives' points without a graph to the first point whose gradient is wanted: zero may be wrong there."""
        unreached = set()
        for each in self._slices:
            wanted = [capture.point for capture in each.captures if capture.point.site in GRADIENTS - {"grad_weight"}]
            anchors = set(map(self._modules.locate, wanted))
            if each.objective is not None and anchors and not self._anchors.reaches(each.objective.point, anchors):
                unreached.add(each.objective.point)
        return unreached

    def _on_call(self, call: Point, value: object) -> Changes | None:
        """Do the work at a call; returns the tensors that replace the call's own."""
        tensors = dict(iterate_tensors(value))
        self._calls_run[call] = len(tensors)
        actions = self._actions.get(call)
        if actions is None:
            return None
        find = partial(self._find_path, value, tensors)
        changes = self._change_tensors(actions, find, tensors, self._anchors)
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

    def _on_recompute(self, call: Point, value: object) -> Changes | None:
        """Change the only call's tensors as they were changed when it ran first; nothing else is wanted of it."""
        # Of functions those of the module's call in which they ran first.
        run = (
            each for each in self._calls_run if each.layer == call.layer and bool(each.function) == bool(call.function)
        )
        numbers = {each.call for each in run if call.function or each.site == call.site}
        if len(numbers) > 1:  # segments are recomputed in reverse: the call can't be identified
            first = next(self._actions[each] for each in self._changed if each.layer == call.layer)
            taps = [*(tap for tap, _ in first.anchors.values()), *(change for _, change in first.interventions)]
            self._stop(
                f"the model computes {taps[0].point.escaped_text} again in its backward, where its calls can't be told "
                "apart",
                "ask for a layer that runs once, or load the model without activation checkpointing",
            )
        calls = [replace(call, call=number) for number in numbers]
        tensors = dict(iterate_tensors(value))
        actions = next((self._actions[each] for each in calls if each in self._changed), CallActions())
        return self._change_tensors(actions, partial(self._find_path, value, tensors), tensors, GradientAnchors())

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
        anchors: GradientAnchors,
    ) -> Changes:
        """Intervene at a call, and anchor its gradients; other anchors than the forward's own change no gradient."""
        changes: dict[Path, Tensor] = {}
        for request_slice, change in actions.interventions:
            if (path := find(change)) is not None:
                self._check_tensor(tensors[path], change)
                changed = _apply_intervention(request_slice, change, self._token_mask, tensors[path])
                tensors[path] = changes[path] = changed
                self._unmade.discard(change.point)
        for tap, interventions in actions.anchors.values():
            if (path := find(tap)) is not None:
                self._unmade -= {tap.point, *(change.point for _, change in interventions)}  # tied: of several names
                self._check_tensor(tensors[path], tap)
                self._check_differentiable(tap.point)
                given = reversed(interventions) if anchors is self._anchors else ()
                hooks = [partial(_apply_intervention, *each, self._token_mask) for each in given]
                tensors[path] = changes[path] = anchors.anchor(self._modules.locate(tap.point), tensors[path], hooks)
        return changes

    def _capture(self, capture: Capture, tensor: Tensor) -> None:
        spans = self._pending.pop(capture)
        if misfit := self._find_misfit(tensor, capture):
            self._misfits.append(misfit)
            return
        for span in spans:
            self._reduce(capture, span, tensor.detach())

    def _reduce(self, capture: Capture, span: Span | None, tensor: Tensor) -> None:
        part = RowTensor.from_hook(tensor, capture.info, self._token_mask).select(span or (0, self._row_count))
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
        tokens = None if self._token_mask is None else self._token_mask.shape[1]
        expected = tap.info.with_length(tokens).shape_for(self._row_count)
        shape = tuple(RowTensor.from_hook(tensor, tap.info).value.shape)
        if shape == expected and dtype_name(tensor.dtype) == tap.info.dtype:
            return None
        difference = f"is {dtype_name(tensor.dtype)} {list(shape)}, not {tap.info.dtype} {list(expected)}"
        one_row = "its size depends on the input's values: ask for another layer"
        hint = "send one input at a time" if self._row_count > 1 else one_row
        detail = f"with this input {tap.point.escaped_text} {difference}"
        points = {tap.point: difference}
        is_resized = len(shape) == len(expected) and dtype_name(tensor.dtype) == tap.info.dtype
        if self._row_count > 1 or tap.point.function or not is_resized:
            return InputError(detail, hint=hint, points=points)
        misfit, self._shapes[tap.point] = OtherForwardError(detail, hint=hint, points=points), shape
        misfit.shapes = self._shapes
        return misfit

    def _make_unreached_error(self, point: Point) -> LayerNotReachedError:
        detail = f"this input's forward never reached {point.escaped_text}"
        if point in self._absent:
            detail = f"with this input there is no {point.escaped_text}: {self._absent[point]}"
        return LayerNotReachedError(detail, points={point: "is not reached by every input"})

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


# Not a method: a graph whose hooks held the extractor, which holds tensors of that graph, would never be freed.
def _apply_intervention(
    request_slice: RequestSlice, change: ResolvedIntervention, token_mask: Tensor | None, value: Tensor
) -> Tensor:
    """A tensor in which one request's rows are changed."""
    rows = RowTensor.from_hook(value, change.info, token_mask)
    changed = apply_operation(rows.select(request_slice.span), change.operation, request_slice.row_offset)
    changed = rows.replace_rows(request_slice.span, changed).reshape(value.shape)
    # In the original's memory order: in another, kernels round the other rows otherwise.
    return changed if changed.stride() == value.stride() else torch.empty_like(value).copy_(changed)

"""FeatureExtractor: attach, run the forward, change and reduce inside the hooks, detach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from layertap.models.capture.batch_slices import BatchActivations, RequestSlice, Span, find_spans, select_span_rows
from layertap.models.capture.reduction import ReducedTensor, reduce
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.devices.dtypes import dtype_name
from layertap.models.errors import InputError, LayerNotReachedError, escape
from layertap.models.gradients import objectives, reachability
from layertap.models.gradients.tape import Key, Tape
from layertap.models.hooks.attach import ATTACH, Changes, OnCall
from layertap.models.hooks.tensor_tree import Path, TensorsByPath, iterate_tensors, replace_tensor
from layertap.models.interventions import operations
from layertap.models.interventions.resolve import ResolvedIntervention
from layertap.models.selection.hook_points import GRADIENTS, HookPoint, Side
from layertap.models.selection.plan import Capture


class _StopForward(BaseException):
    """Nothing is pending: leave the forward. Not an Exception, which models catch."""


class FeatureExtractor:
    """Takes tensors and gradients out of a module's forward, changes values in it; the module is left as it was found.

    Not for several threads at once: hooks are seen by every forward through the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = {name or ".": part for name, part in module.named_modules(remove_duplicate=False)}

    def __call__(
        self, forward: Callable[[], object], captures: Iterable[Capture], rows: int
    ) -> dict[Capture, ReducedTensor]:
        """Run a forward of so many rows and return each capture reduced: ``shared`` for a single request."""
        share = RequestSlice(0, rows, frozenset(captures))
        return self.extract_slices(forward, [share], rows).select(share)

    def extract_slices(
        self, forward: Callable[[], object], shares: Iterable[RequestSlice], rows: int, real: Tensor | None = None
    ) -> BatchActivations:
        """Run one forward for several requests: the hooks are the union, each reduces only the rows that asked.

        ``real`` (rows, tokens), on the host, is False where a token only pads its row.
        The tensors are the caller's; they are on the model's device and not to be differentiated. The forward ends as
        soon as nothing is pending; a backward follows where a share has a goal. Where that finds no graph the forward
        may run once more: it takes its inputs anew each time. LayerNotReachedError if it ends earlier, InputError if a
        tensor is not as its catalogue says; whatever the forward raises goes through. In every case the hooks are gone.
        """
        collector = _Collector(tuple(shares), rows, self._modules, real)
        with ExitStack() as held, collector.mode():
            held.callback(collector.clear)
            with ExitStack() as stack:
                for module, side, take in collector.callbacks():
                    ATTACH[side](stack, module, take)
                with suppress(_StopForward):
                    forward()
            collector.check()
            with ExitStack() as stack:
                for module, side, take in collector.recompute_callbacks():
                    ATTACH[side](stack, module, take)
                with suppress(_StopForward):
                    collector.backward()
            collector.check()
            for point in reachability.find_unreachable(forward, self._modules, collector.unreached()):
                raise InputError(
                    f"between its input and {_where(point)} the model computes without gradients",
                    hint="take an objective before the model's own torch.no_grad() or detach()",
                )
        return BatchActivations(collector.results)

    def run_with_replacements(
        self, forward: Callable[[], object], values: Mapping[HookPoint, Tensor]
    ) -> dict[HookPoint, Tensor]:
        """Run a whole forward with other tensors in place of those that leave some calls.

        Gives the tensors of its output, and those that were about to leave these calls.
        """
        found: dict[HookPoint, Tensor] = {}
        calls: dict[nn.Module, dict[int, list[HookPoint]]] = defaultdict(lambda: defaultdict(list))
        for point in values:
            calls[self._modules[point.layer]][point.call].append(point)

        def put(points: Mapping[int, Iterable[HookPoint]], call: int, value: object) -> Changes | None:
            given = dict(iterate_tensors(value))
            changes = {}
            for point in points.get(call, ()):
                found[point] = given[point.path].clone()
                # In the order of memory of what was there: in another, kernels round otherwise.
                changes[point.path] = torch.empty_like(given[point.path]).copy_(values[point])
            return changes

        with ExitStack() as stack, torch.no_grad():
            for module, points in calls.items():
                ATTACH["output"](stack, module, partial(put, dict(points)))
            output = forward()
            return {
                HookPoint(".", 0, path, "output"): tensor.clone() for path, tensor in iterate_tensors(output)
            } | found


@dataclass
class _GradientPoint:
    """Where a gradient is wanted, or changed."""

    point: HookPoint
    leaf: TensorInfo
    edits: list[tuple[RequestSlice, ResolvedIntervention]] = field(default_factory=list)


@dataclass
class _CallActions:
    """What is wanted of one call of a module, on one side; the order of fields is the order in which it is done."""

    edits: list[tuple[RequestSlice, ResolvedIntervention]] = field(default_factory=list)
    anchors: dict[Path, _GradientPoint] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    goals: list[int] = field(default_factory=list)  # places of the shares whose goals they are

    @property
    def point(self) -> HookPoint:
        """One of those where something is changed or differentiated."""
        return [*(anchor.point for anchor in self.anchors.values()), *(edit.point for _, edit in self.edits)][0]


class _Collector:
    """What one forward owes: hooks close over it, nothing of it is stored on the model."""

    def __init__(
        self, shares: tuple[RequestSlice, ...], rows: int, modules: dict[str, nn.Module], real: Tensor | None
    ) -> None:
        spans = find_spans(shares, rows)
        self.pending = {capture: spans[capture] for capture in spans if capture.point.site not in GRADIENTS}
        self.results: dict[tuple[Capture, Span], ReducedTensor] = {}
        self._gradients = {capture: spans[capture] for capture in spans if capture.point.site in GRADIENTS}
        self._shares = shares
        self._goals = {place: share.objective for place, share in enumerate(shares) if share.objective is not None}
        self._has_graph = bool(self._goals)
        self._rows = rows
        self._modules = modules
        self._real = real
        self._tape = Tape()
        self._misfit: InputError | None = None
        self._wanted = self._group_by_call()
        self._ran: dict[tuple[nn.Module, Side], set[int]] = defaultdict(set)

    def mode(self) -> AbstractContextManager[object]:
        """How the forward runs: with a graph only where something is differentiated."""
        # Not inference mode: what a model keeps of a forward (tables, caches) must be fit for one with a graph.
        return torch.enable_grad() if self._has_graph else torch.no_grad()

    def callbacks(self) -> Iterator[tuple[nn.Module, Side, OnCall]]:
        """One for each module and side, though a tied module may be asked for under several names."""
        for (module, side), calls in self._wanted.items():
            yield module, side, partial(self._on_call, calls, self._ran[module, side])

    def recompute_callbacks(self) -> Iterator[tuple[nn.Module, Side, OnCall]]:
        """For the backward, in which a model that checkpoints computes again what it did not keep."""
        for (module, side), calls in self._wanted.items():
            changing = {call: here for call, here in calls.items() if here.edits or here.anchors}
            if changing and self._has_graph:
                yield module, side, partial(self._on_recompute, changing, self._ran[module, side])

    def _group_by_call(self) -> Mapping[tuple[nn.Module, Side], Mapping[int, _CallActions]]:
        found: dict[tuple[nn.Module, Side], dict[int, _CallActions]] = defaultdict(lambda: defaultdict(_CallActions))

        def here(point: HookPoint) -> _CallActions:
            return found[self._modules[point.layer], point.side][point.call]

        def anchor(item: ResolvedIntervention | Capture) -> _GradientPoint:
            return here(item.point).anchors.setdefault(item.point.path, _GradientPoint(item.point, item.leaf))

        for share in self._shares:
            for edit in share.interventions:
                if edit.point.site in GRADIENTS:
                    anchor(edit).edits.append((share, edit))
                else:
                    here(edit.point).edits.append((share, edit))
        for capture in self._gradients:
            anchor(capture)
        for capture in self.pending:
            here(capture.point).captures.append(capture)
        for place, goal in self._goals.items():
            here(goal.point).goals.append(place)
        return found

    def check(self) -> None:
        """InputError if a tensor was not as promised, LayerNotReachedError if anything is still pending."""
        if self._misfit is not None:
            raise self._misfit
        points = [capture.point for capture in self.pending] + [goal.point for goal in self._goals.values()]
        for point in points:
            raise LayerNotReachedError(f"this input's forward never reached {_where(point)}")

    def backward(self) -> None:
        """Differentiate what was gathered, and reduce the gradients that are wanted."""
        if not self._gradients:
            return
        found = self._tape.gradients()
        for capture, spans in self._gradients.items():
            gradient = found.get(self._key(capture.point))
            if gradient is None:
                raise LayerNotReachedError(f"this input's forward never reached {_where(capture.point)}")
            for span in spans:
                self._reduce(capture, span, gradient)

    def unreached(self) -> set[HookPoint]:
        """What is differentiated without a graph to the first point where that is wanted: zero may be no answer."""
        found = set()
        for share in self._shares:
            own = {self._key(capture.point) for capture in share.captures if capture.point.site in GRADIENTS}
            if share.objective is not None and own and not self._tape.reaches(share.objective.point, own):
                found.add(share.objective.point)
        return found

    def clear(self) -> None:
        """Let go of the graph where the model holds on to it: buffers that the forward wrote to."""
        if self._has_graph:
            for module in set(self._modules.values()):
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.grad_fn is not None:
                        module._buffers[name] = buffer.detach()

    def _key(self, point: HookPoint) -> Key:
        return self._modules[point.layer], point.side, point.call, point.path

    def _on_call(self, calls: Mapping[int, _CallActions], ran: set[int], call: int, value: object) -> Changes | None:
        """Do what is wanted of a call; gives back what goes on in place of its tensors."""
        ran.add(call)
        here = calls.get(call)
        if here is None:
            return None
        found = dict(iterate_tensors(value))
        changes: dict[Path, Tensor] = {}
        for share, edit in here.edits:
            self._edit(share, edit, found, changes)
        for path, anchor in here.anchors.items():
            if path in found:
                found[path] = changes[path] = self._anchored(anchor, found[path])
        for capture in here.captures:
            self._capture(capture, found)
        for place in here.goals:
            self._reach(place, found)
        if not self.pending and not self._goals:
            raise _StopForward
        self._check_containers(value, changes)
        return changes

    def _on_recompute(
        self, calls: Mapping[int, _CallActions], ran: set[int], call: int, value: object
    ) -> Changes | None:
        """Change the only call's tensors as they were changed when it ran first; nothing else is wanted of it."""
        if len(ran) > 1:  # segments are computed again last first: nothing tells which call it is
            point = next(iter(calls.values())).point
            self._misfit = InputError(
                f"the model computes {_where(point)} again in its backward, where its calls can't be told apart",
                hint="ask for a layer that runs once, or load the model without activation checkpointing",
            )
            raise _StopForward
        found, changes = dict(iterate_tensors(value)), dict[Path, Tensor]()
        here = next((calls[number] for number in ran if number in calls), None)
        if here is None:
            return None
        for share, edit in here.edits:
            self._edit(share, edit, found, changes)
        for path in here.anchors:
            if path in found:  # the same steps, and nothing to hold on to
                changes[path] = Tape().anchor((None, "", 0, path), found[path], ())
        return changes

    def _check_containers(self, value: object, changes: Changes) -> None:
        """Leave the forward where tensors can't be put into what holds them."""
        try:
            for path, tensor in changes.items() if not isinstance(value, TensorsByPath) else ():
                replace_tensor(value, path, tensor)
        except InputError as error:
            self._misfit = error
            raise _StopForward from error

    def _edit(
        self, share: RequestSlice, edit: ResolvedIntervention, found: dict[Path, Tensor], changes: dict[Path, Tensor]
    ) -> None:
        tensor = found.get(edit.point.path)
        if tensor is not None:
            self._fit(tensor, edit.leaf, edit.point)
            found[edit.point.path] = changes[edit.point.path] = _apply_intervention(
                share, edit, self._rows, self._real, tensor
            )

    def _anchored(self, anchor: _GradientPoint, tensor: Tensor) -> Tensor:
        self._fit(tensor, anchor.leaf, anchor.point)
        self._differentiable(anchor.point)
        changers = [partial(_apply_intervention, *each, self._rows, self._real) for each in reversed(anchor.edits)]
        return self._tape.anchor(self._key(anchor.point), tensor, changers)

    def _capture(self, capture: Capture, found: dict[Path, Tensor]) -> None:
        tensor = found.get(capture.point.path)
        if tensor is None or capture not in self.pending:
            return
        self._fit(tensor, capture.leaf, capture.point)
        for span in self.pending.pop(capture):
            self._reduce(capture, span, tensor.detach())

    def _reduce(self, capture: Capture, span: Span, tensor: Tensor) -> None:
        part = select_span_rows(tensor, capture.leaf, span, self._rows)
        real = _real_of(self._real, span)
        self.results[capture, span] = reduce(part, capture.leaf, capture.reduction, real, capture.length)

    def _reach(self, place: int, found: dict[Path, Tensor]) -> None:
        goal = self._goals.get(place)
        tensor = found.get(goal.point.path) if goal is not None else None
        if goal is not None and tensor is not None:
            self._fit(tensor, goal.leaf, goal.point)
            self._differentiable(goal.point)
            span = self._shares[place].span
            part, real = select_span_rows(tensor, goal.leaf, span, self._rows), _real_of(self._real, span)
            self._tape.add(goal.point, objectives.compute_objective(part, goal.leaf, goal.objective, real))
            del self._goals[place]

    def _fit(self, tensor: Tensor, leaf: TensorInfo, point: HookPoint) -> None:
        """Leave the forward where a tensor can't be cut by what its catalogue says: rows would be cut elsewhere."""
        self._misfit = _misfit(tensor, leaf, point, self._rows)
        if self._misfit is not None:
            raise _StopForward

    def _differentiable(self, point: HookPoint) -> None:
        """Leave the forward where the model itself keeps no graph: zero would be no answer."""
        if not torch.is_grad_enabled():
            self._misfit = InputError(
                f"the model computes {_where(point)} without gradients",
                hint="ask for one outside the model's own torch.no_grad()",
            )
            raise _StopForward


# Not a method: a graph whose hooks held the collector, which holds tensors of that graph, would never be freed.
def _apply_intervention(
    share: RequestSlice, edit: ResolvedIntervention, rows: int, real: Tensor | None, value: Tensor
) -> Tensor:
    """A tensor of so many rows in which those of one request are changed."""
    part = select_span_rows(value, edit.leaf, share.span, rows)
    own = operations.apply_operation(part, edit.leaf, edit.operation, share.first, _real_of(real, share.span))
    if own.shape == value.shape:
        return own
    axis, each = edit.leaf.row_axis or 0, edit.leaf.entries_per_row
    before = value.narrow(axis, 0, share.start * each)
    after = value.narrow(axis, share.stop * each, value.shape[axis] - share.stop * each)
    return torch.cat([before, own, after], dim=axis)


def _real_of(real: Tensor | None, span: Span) -> Tensor | None:
    return None if real is None else real[slice(*span)]


def _misfit(tensor: Tensor, leaf: TensorInfo, point: HookPoint, rows: int) -> InputError | None:
    shape = tuple(tensor.shape)
    if shape == leaf.shape_for(rows) and dtype_name(tensor.dtype) == leaf.dtype:
        return None
    found = f"{dtype_name(tensor.dtype)} {list(shape)}, not {leaf.dtype} {list(leaf.shape_for(rows))}"
    hint = "send one input at a time" if rows > 1 else "its size depends on the input's values: ask for another layer"
    return InputError(f"with this input {_where(point)} is {found}", hint=hint)


def _where(point: HookPoint) -> str:
    return escape(point.text)

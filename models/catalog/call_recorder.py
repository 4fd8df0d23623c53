"""CallRecorder: what a survey's forward shows, in order, with shapes, row axes and layouts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from torch import Tensor, nn

from layertap.models.catalog import layout
from layertap.models.catalog.call_observer import CallObserver, Run
from layertap.models.catalog.observations import (
    AttentionObservation,
    Boundary,
    CallObservation,
    Sketch,
    TensorHistory,
    TensorObservation,
)
from layertap.models.hooks import attention
from layertap.models.hooks.attach import ATTACH
from layertap.models.hooks.functions import may_call_functions, run_unseen
from layertap.models.hooks.tensor_tree import Path, find_refused, iterate_tensors
from layertap.models.inputs.noise import QUIET, ROWS


class CallRecorder(CallObserver):
    """Notes order, shapes and layouts; given the recorder of one row alone, also which axis holds the rows.

    Its own forward then has ROWS rows, that row in the middle: what either neighbour does to it shows. With
    ``functions`` it notes what these take and return, too.
    """

    def __init__(self, module: nn.Module, alone: CallRecorder | None = None, *, functions: bool = False) -> None:
        super().__init__(module)
        self.has_functions = functions
        self.calls: dict[nn.Module, list[CallObservation]] = {}
        self._alone = alone
        self._order = 0
        self._running: list[tuple[nn.Module, int]] = []
        self._histories: dict[int, TensorHistory] = {}
        self._recent: dict[int, TensorObservation] = {}  # by number of axes, what was returned last
        self._recent_known: dict[int, TensorObservation] = {}  # the last of which the layout was known then

    def summarize_calls(self) -> dict[nn.Module, list[tuple[set[Path], set[Path], int]]]:
        """Which modules were called, how often, and with and for what kind of value; how often they attended."""
        return {
            module: [(set(call.input), set(call.output), len(call.attention)) for call in calls]
            for module, calls in self.calls.items()
        }

    def watch(self, run: Run, inputs: Mapping[str, Tensor]) -> None:
        """Run one forward."""
        with attention.AttentionObserver(self._record_attention):
            super().watch(run, inputs)

    def attach(self, stack: ExitStack) -> None:
        """See the functions that modules call, where that is wanted."""
        for module in filter(may_call_functions, self.modules if self.has_functions else ()):
            ATTACH["function"](stack, module, partial(run_unseen, partial(self._record_function, module)))

    def enter(self, module: nn.Module, call: int, value: object) -> None:
        """Note what a call takes."""
        with attention.disable_observers():
            run_unseen(partial(self._record_inputs, module), call, value)

    def leave(self, module: nn.Module, call: int, value: object) -> None:
        """Note what a call returns."""
        with attention.disable_observers():
            run_unseen(partial(self._record_outputs, module), call, value)

    def _record_inputs(self, module: nn.Module, number: int, value: object) -> None:
        self._running.append((module, number))
        call = CallObservation(self._tick(), inputs_refused=tuple(find_refused(value)))
        self.calls.setdefault(module, []).append(call)
        for path, tensor in iterate_tensors(value):
            observation = self._observe(self._get_earlier(module, number, "input").get(path), tensor)
            call.input[path] = observation
            self._infer_input_layout(module, tensor, observation, whole=call.start == 1)

    def _record_outputs(self, module: nn.Module, number: int, value: object) -> None:
        while self._running and self._running.pop() != (module, number):
            pass
        call = self.calls[module][number]
        call.end, call.outputs_refused = self._tick(), tuple(find_refused(value))
        if value is None or call.has_partial_attention:  # None: as it is after a call that raised
            call.attention.clear()
        first = next(iter(call.input.values()), None)
        before: layout.Evidence = (first.shape, first.layout) if first else ((), None)
        for path, tensor in iterate_tensors(value):
            observation = self._observe(self._get_earlier(module, number, "output").get(path), tensor)
            call.output[path] = observation
            self._infer_output_layout(module, tensor, observation, before)

    def _record_function(self, module: nn.Module, number: int, value: object) -> None:
        """Note what a function takes, or returns, that a call of a module calls; it may be other than that later."""
        call = self.calls[module][number]
        with attention.disable_observers():
            for path, tensor in iterate_tensors(value):
                observation = self._observe(self._get_earlier(module, number, "functions").get(path), tensor)
                call.functions[path] = observation
                self._infer_function_layout(tensor, observation)

    def _infer_function_layout(self, tensor: Tensor, observation: TensorObservation) -> None:
        shape = observation.shape
        if layout.is_plain(shape, observation.row_axis):
            observation.layout = layout.get_plain_layout(shape, observation.row_axis)
            return
        guess = layout.infer_from_evidence(shape, self._get_nearest(shape))
        self._get_history(tensor).add(observation, guess)

    def _observe(self, earlier: TensorObservation | None, tensor: Tensor) -> TensorObservation:
        """A tensor, compared with ``earlier``: the same one in the forward of one row, None in that forward."""
        shape = tuple(tensor.shape)
        if earlier is None:
            axis = 0 if shape[:1] == (1,) else None
            return TensorObservation(shape, tensor.dtype, Sketch.from_tensor(tensor), axis, crosses_rows=axis is None)
        axis = _find_grown_axis(earlier.shape, shape)
        part = tensor if axis is None else tensor.narrow(axis, QUIET * earlier.shape[axis], earlier.shape[axis])
        sketch = Sketch.from_tensor(part)
        crosses_rows = part.shape != earlier.shape or not sketch.matches(earlier.sketch)
        return TensorObservation(shape, tensor.dtype, sketch, axis, crosses_rows)

    def _record_attention(self, event: attention.AttentionEvent) -> None:
        """Note attention, by shape alone: weights of many tokens are large, and nobody asked for them yet."""
        if not self._running:
            return
        module = attention.find_owner([module for module, _ in self._running])
        number = next(number for running, number in reversed(self._running) if running is module)
        shape = attention.unfold_weights(event.shape, module)
        if shape is None:
            self.calls[module][number].has_partial_attention |= attention.is_attention(module)
            return
        observations = self.calls[module][number].attention
        earlier = self._get_earlier_attention(module, number, len(observations))
        evidence = self._observe(earlier.evidence if earlier else None, event.evidence)
        axis: int | None
        if earlier is None:
            axis = 0 if shape[0] == 1 else None
        else:
            axis = _find_grown_axis(earlier.weights.shape, shape)
            axis = axis if axis == evidence.row_axis else None
        crosses_rows = axis is None or (earlier is not None and evidence.crosses_rows)
        axes = layout.ATTENTION if axis == 0 else None
        weights = TensorObservation(shape, event.dtype, evidence.sketch, axis, crosses_rows, axes)
        observations.append(AttentionObservation(weights, evidence, event.source, event.sinks))

    def _get_earlier_call(self, module: nn.Module, number: int) -> CallObservation | None:
        """A call as the forward of one row showed it."""
        calls = self._alone.calls.get(module, []) if self._alone else []
        return calls[number] if number < len(calls) else None

    def _get_earlier(self, module: nn.Module, number: int, boundary: Boundary) -> Mapping[Path, TensorObservation]:
        call = self._get_earlier_call(module, number)
        return call.at(boundary) if call is not None else {}

    def _get_earlier_attention(self, module: nn.Module, number: int, index: int) -> AttentionObservation | None:
        call = self._get_earlier_call(module, number)
        return call.attention[index] if call is not None and index < len(call.attention) else None

    def _infer_input_layout(
        self, module: nn.Module, tensor: Tensor, observation: TensorObservation, *, whole: bool
    ) -> None:
        shape = observation.shape
        if layout.is_plain(shape, observation.row_axis):
            observation.layout = layout.get_plain_layout(shape, observation.row_axis)
            return
        history = self._get_history(tensor)
        history.settle(layout.infer_argument_layout(module, shape, self._get_nearest(shape)))
        guess = (
            layout.infer_input_layout(shape) if whole else layout.infer_from_evidence(shape, self._get_nearest(shape))
        )
        history.add(observation, guess)

    def _infer_output_layout(
        self, module: nn.Module, tensor: Tensor, observation: TensorObservation, before: layout.Evidence
    ) -> None:
        shape = observation.shape
        if layout.is_plain(shape, observation.row_axis):
            observation.layout = layout.get_plain_layout(shape, observation.row_axis)
            return
        history = self._get_history(tensor)
        history.settle(layout.infer_result_layout(module, shape, before))
        history.add(observation, self._guess_layout(module, shape, before))
        self._recent[len(shape)] = observation
        if observation.layout is not None:
            self._recent_known[len(shape)] = observation

    def _guess_layout(self, module: nn.Module, shape: tuple[int, ...], before: layout.Evidence) -> str | None:
        if next(module.parameters(), None) is None and next(module.children(), None) is None:
            return layout.infer_rearranged_layout(shape, before)
        inside = self._get_nearest(shape) if next(module.children(), None) is not None else []
        return layout.infer_from_evidence(shape, [before, *inside] if before[0] == shape else [*inside, before])

    def _get_nearest(self, shape: tuple[int, ...]) -> list[layout.Evidence]:
        """What was returned last with as many axes, within a module by one of its parts; and last of a known layout."""
        nearest = [each[len(shape)] for each in (self._recent, self._recent_known) if len(shape) in each]
        return [(each.shape, each.layout) for each in nearest]

    def _get_history(self, tensor: Tensor) -> TensorHistory:
        history = self._histories.get(id(tensor))
        if history is None or history.reference() is not tensor or history.shape != tensor.shape:
            history = self._histories[id(tensor)] = TensorHistory(weakref.ref(tensor), tensor.shape)
        return history

    def _tick(self) -> int:
        self._order += 1
        return self._order


def _find_grown_axis(one: tuple[int, ...], several: tuple[int, ...]) -> int | None:
    if len(one) != len(several):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(one, several, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and several[grown[0]] == ROWS * one[grown[0]] else None

"""CallRecorder: what a survey's forward shows, in order, with shapes, row axes and layouts."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Literal, Self

from torch import Tensor, nn

from layertap.models.catalog.axes import ATTENTION
from layertap.models.catalog.axis_tracker import AxisTracker
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.observations import (
    Address,
    AttentionObservation,
    CallObservation,
    Observation,
    Place,
    Shape,
    Sketch,
)
from layertap.models.devices.devices import dtype_name
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.hooks import attention
from layertap.models.hooks.attach import ATTACH, OnModuleCall, list_observed, observe_calls
from layertap.models.hooks.functions import may_call_functions, run_unseen
from layertap.models.hooks.running_calls import get_version
from layertap.models.hooks.tensor_tree import Arguments, Path, find_refused, iterate_tensors
from layertap.models.inputs.noise import QUIET, ROWS
from layertap.models.points import Site


class CallRecorder:
    """Records order, shapes and layouts; given the recorder of a one-row forward, also which axis holds the rows.

    Its own forward then has ROWS rows with that row in the middle, so that effects of either neighbour show. With
    ``functions`` it records what functions take and return, too; with ``axes`` what those of each tensor are.
    """

    def __init__(
        self,
        module: nn.Module,
        alone: CallRecorder | None = None,
        *,
        functions: bool = False,
        axes: AxisTracker | None = None,
    ) -> None:
        self.has_functions = functions
        self._axes = axes
        self.calls: dict[nn.Module, list[CallObservation]] = {}
        self._module = module
        self._alone = alone
        self._order = 0
        self._functions_since = 0  # how often a function began or ended since then
        self._taken: dict[int, int] = {}  # the memory that the last function took, with its version then
        self._running: list[tuple[nn.Module, int]] = []
        self._values: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # by id: a version, and the value's number
        self._places: list[list[tuple[CallObservation, Site, Path]]] = []  # of each value, in order

    def describe_calls(self) -> dict[nn.Module, list[tuple[set[Path], set[Path], int]]]:
        """The modules that were called: for each call, paths of inputs and outputs, and the number of attentions."""
        return {module: [call.describe_tensors() for call in calls] for module, calls in self.calls.items()}

    def find(self, address: Address) -> CallObservation | None:
        """The call of an address; None if there was none."""
        module, number, function = address
        calls = self.calls.get(module, [])
        call = calls[number] if number < len(calls) else None
        return call.functions.get(function) if call is not None and function else call

    def list_sketches(self) -> dict[Place, Sketch]:
        """The sketches of all tensors."""
        calls = (each for calls in self.calls.values() for call in calls for each in (call, *call.functions.values()))
        return {
            (call.address, boundary, path): each.sketch
            for call in calls
            for boundary, tensors in call.tensors.items()
            for path, each in tensors.items()
        }

    def find_origins(self, call: CallObservation) -> Iterator[tuple[Path, tuple[CallObservation, Site, Path]]]:
        """Of inputs of a call that others read too, which would not see them changed there: where they come from."""
        for path, taken in call.tensors["input"].items():
            (first, side, there), *_ = places = self._places[taken.value]
            readers = [each for each, boundary, _ in places if boundary == "input" and each.reads(taken.value)]
            apart = [each for each in readers if each is not call and not (call.contains(each) or each.contains(call))]
            is_made = side == "output" or all(first.contains(each) for each in (call, *apart))
            if apart and is_made and call.reads(taken.value):
                yield path, (first, side, there)

    def watch(self, run: Forward, inputs: Inputs) -> Self:
        """Run one forward, and give the recorder."""

        def hide(record: OnModuleCall) -> OnModuleCall:
            return lambda module, call, value: run_unseen(partial(record, module), call, value)

        with ExitStack() as stack:
            stack.enter_context(attention.AttentionObserver(self._record_attention))
            stack.enter_context(observe_calls(self._module, hide(self._record_inputs), hide(self._record_outputs)))
            if self.has_functions:  # these hooks come after those around calls
                for module in filter(may_call_functions, list_observed(self._module)):
                    ATTACH["function"](stack, module, partial(run_unseen, partial(self._record_function, module)))
            if self._axes is not None:
                self._axes.start(inputs)
                stack.enter_context(self._axes)
            run(inputs)
        return self

    def _record_inputs(self, module: nn.Module, number: int, value: object) -> None:
        self._running.append((module, number))
        call = CallObservation((module, number, ""), self._tick())
        self.calls.setdefault(module, []).append(call)

        call.refused["input"] = tuple(find_refused(value))
        self._record(call, "input", value)

    def _record_outputs(self, module: nn.Module, number: int, value: object) -> None:
        while self._running and self._running.pop() != (module, number):
            pass
        call = self.calls[module][number]
        call.end = self._tick()
        if value is None or call.has_partial_attention:  # None: as it is after a call that raised
            call.attention.clear()
        _record_weights(call)
        if self._axes is not None and isinstance(module, nn.RNNBase):
            self._axes.follow_recurrent(call.tensors["input"], value)
        call.refused["output"] = tuple(find_refused(value))
        self._record(call, "output", value)

    def _record_function(
        self, module: nn.Module, key: tuple[int, str, Literal["input", "output"]], value: object
    ) -> None:
        """Note what a function takes, or returns, that a call of a module calls; it may be other than that later."""
        number, name, side = key
        # Between two calls of modules, whose places are whole numbers whether functions are recorded or not.
        self._functions_since += 1
        order = self._order + 1 - 1 / (1 + self._functions_since)
        call = self.calls[module][number].functions.setdefault(name, CallObservation((module, number, name), order))
        call.end = order
        memory = {_get_address(tensor): get_version(tensor) for _, tensor in iterate_tensors(value)}
        if side == "input":
            self._taken = memory
        else:
            call.is_view = any(address and self._taken.get(address) == memory[address] for address in memory)
        self._record(call, side, value)

    def _record(self, call: CallObservation, boundary: Site, value: object) -> None:
        """Note tensors at one side of a call."""
        tensors, alone = call.tensors[boundary], self._alone.find(call.address) if self._alone else None
        with attention.disable_observers():
            for path, tensor in iterate_tensors(value):
                earlier = alone.tensors[boundary].get(path) if alone else None
                observation = tensors[path] = self._observe(path, tensor, earlier)
                observation.value = self._number_value(tensor)
                self._places[observation.value].append((call, boundary, path))
                if self._axes is not None:
                    observation.axes = self._axes.find(tensor)
                if isinstance(value, Arguments) and value.lone:
                    observation.info = replace(observation.info, argument=value.get_parameter(value.lone))

    def _observe(self, path: Path, tensor: Tensor, earlier: Observation | None) -> Observation:
        """A tensor, compared with ``earlier``: the same one in the forward of one row, None in that forward."""
        shape = tuple(tensor.shape)
        if earlier is None:
            axis = 0 if shape[:1] == (1,) else None
            info = TensorInfo(path, shape, dtype_name(tensor.dtype), axis, crosses_rows=axis is None)
            return Observation(info, Sketch.from_tensor(tensor))
        one = earlier.info
        if shape == (ROWS, *one.shape):  # the model squeezes the axis away where it has a single row
            one = replace(one, shape=(1, *one.shape))
        axis = _find_grown_axis(one.shape, shape)
        part = tensor if axis is None else tensor.narrow(axis, QUIET * one.shape[axis], one.shape[axis])
        sketch = Sketch.from_tensor(part)
        crosses_rows = tuple(part.shape) != one.shape or not sketch.matches(earlier.sketch)
        return Observation(replace(one, row_axis=axis, crosses_rows=crosses_rows), sketch)

    def _record_attention(self, event: attention.AttentionEvent) -> None:
        """Note attention, by shape alone: weights of many tokens are large, and nobody asked for them yet."""
        if not self._running:
            return
        module = attention.find_owner([module for module, _ in self._running])
        number = next(number for running, number in reversed(self._running) if running is module)
        call = self.calls[module][number]
        alone = self._alone.find(call.address) if self._alone else None
        shape = attention.unfold_weights(event.shape, module)
        if shape is None:
            call.has_partial_attention |= attention.is_attention(module)
            return
        index = len(call.attention)
        earlier = alone.attention[index] if alone is not None and index < len(alone.attention) else None
        evidence = self._observe((), event.evidence, earlier.evidence if earlier else None)
        if earlier is None:
            axis = 0 if shape[0] == 1 else None
            info = TensorInfo((), shape, dtype_name(event.dtype), axis, axis is None, source=event.source)
        else:
            axis = _find_grown_axis(earlier.info.shape, shape)
            axis = axis if axis == evidence.info.row_axis else None
            crosses_rows = axis is None or evidence.info.crosses_rows
            info = replace(earlier.info, row_axis=axis, crosses_rows=crosses_rows)
        info = replace(info, layout=ATTENTION if axis == 0 else None)
        call.attention.append(AttentionObservation(info, evidence, event.sinks))

    def _number_value(self, tensor: Tensor) -> int:
        """The number of a value, a new one for a tensor that was written to."""
        reference, version, number = self._values.get(id(tensor), (None, 0, 0))
        if reference is None or reference() is not tensor or version != get_version(tensor):
            number = len(self._places)
            self._places.append([])
            self._values[id(tensor)] = weakref.ref(tensor), get_version(tensor), number
        return number

    def _tick(self) -> int:
        self._order += 1
        self._functions_since = 0
        return self._order


def _get_address(tensor: Tensor) -> int:
    """Where the memory lies that a tensor is a view of; 0 for none."""
    return tensor.untyped_storage().data_ptr()


def _record_weights(call: CallObservation) -> None:
    """Note the attention of a call that is over, when its sinks are counted; its path is empty if there is one."""
    for index, each in enumerate(call.attention):
        path = (str(index),) if len(call.attention) > 1 else ()
        *outer, keys = each.info.shape
        parts: dict[Site, int] = {"attention": keys - each.sinks.count, "attention_sink": each.sinks.count}
        for boundary, count in parts.items():
            if count:
                info = replace(each.info, path=path, shape=(*outer, count))
                call.tensors[boundary][path] = Observation(info, each.evidence.sketch)


def _find_grown_axis(one: Shape, several: Shape) -> int | None:
    if len(one) != len(several):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(one, several, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and several[grown[0]] == ROWS * one[grown[0]] else None

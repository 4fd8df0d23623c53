"""CallRecorder: what one forward shows, as flat lists by point: the sides of its calls in order, and their tensors.

Tensors are kept as sketches, to compare those of two forwards that are never in memory at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from layertap.models.catalog.axes import ATTENTION, Axes
from layertap.models.catalog.axis_tracker import AxisTracker
from layertap.models.catalog.catalog import CallBoundary, TensorInfo
from layertap.models.devices.devices import dtype_name
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.devices.transfer import to_plain, view_bytes
from layertap.models.hooks import attention
from layertap.models.hooks.attach import ATTACH, Modules, OnModuleCall, list_observed, observe_calls
from layertap.models.hooks.functions import may_call_functions, run_unseen
from layertap.models.hooks.running_calls import get_version
from layertap.models.hooks.tensor_tree import Arguments, Path, find_refused, iterate_tensors
from layertap.models.inputs.noise import QUIET, ROWS
from layertap.models.points import Point, Site

Shape = tuple[int, ...]
BINS = 16
WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)
MAX_NUMBERS = 2**16  # looked at
MASK_VALUE = 1e30  # larger numbers, infinities and NaN are marks of what to leave out
TOLERANCE_INTEGER = 1e-6
TOLERANCE_FLOAT32 = 5e-3  # rounding makes 1e-6, or 4e-4 where softmax amplifies it
TOLERANCE_HALF = 0.1  # half precision: enough to tell a row from its neighbour


@dataclass(frozen=True)
class Sketch:
    """A tensor in a few numbers: random projections of its parts, its norm, and a sum of all of its bits.

    ``masked`` counts the numbers that are left out: marks of masked entries, infinities and NaN.
    """

    bins: tuple[float, ...]
    norm: float
    tolerance: float
    bits: int = 0
    masked: int = 0

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Sketch:
        """The sketch of a tensor of any dtype; what marks a masked entry counts as zero."""
        plain = to_plain(tensor)
        real = torch.view_as_real(plain) if plain.is_complex() else plain
        # Of a large tensor a number in every so many: as telling, and a survey stays a few forwards long. On the host,
        # because some accelerators have no float64.
        values = real.flatten()[:: 1 + real.numel() // MAX_NUMBERS].to("cpu", torch.float32)
        is_number = values.abs() < MASK_VALUE
        values = torch.where(is_number, values, 0.0)
        weights = _make_weights()[: values.numel()]
        parts = functional.pad(values * weights, (0, -values.numel() % BINS)).view(-1, BINS).sum(0)
        norm = float(values.norm(dtype=torch.float64))
        masked = values.numel() - int(is_number.sum())
        return cls(tuple(parts.tolist()), norm, _get_tolerance(real.dtype), _sum_bits(real), masked)

    def matches(self, other: Sketch) -> bool:
        """Whether both are of the same tensor, but for rounding."""
        limit = other.tolerance * max(other.norm, 1e-6) / BINS**0.5
        return self.masked == other.masked and all(
            abs(a - b) <= limit for a, b in zip(self.bins, other.bins, strict=True)
        )


NO_SKETCH = Sketch((), 0.0, 0.0, masked=-1)  # of numbers that nobody looked at: matches no tensor's


@dataclass
class Observation:
    """A tensor as one forward showed it."""

    info: TensorInfo  # with the shape of one row
    sketch: Sketch  # of the part that belongs to the row that ran alone
    axes: Axes = ()  # those of ``info``, empty where they were not followed


class CallRecorder:
    """Records one forward. A side of a call, or of a function in a call, is a point without path.

    ``alone``: the recorder of one row. This forward then has ROWS rows with that row in the middle, so that effects of
    either neighbour show, and the axis that grew holds the rows. Of one row that is the first axis, or ``batch_axis``,
    that has one entry; with ``single`` else the first, all of whose entries are the row's. With ``functions`` it
    records what functions take and return, too; ``axes`` follows the axes of each tensor; ``look`` makes the sketches.
    """

    def __init__(
        self,
        module: nn.Module,
        alone: CallRecorder | None = None,
        *,
        functions: bool = False,
        axes: AxisTracker | None = None,
        batch_axis: int = 0,
        single: bool = False,
        look: Callable[[Tensor], Sketch] = Sketch.from_tensor,
    ) -> None:
        self.orders: dict[Point, float] = {}  # when each side was reached; calls of modules count from 1, by ones
        self.tensors: dict[Point, Observation] = {}
        self.refused: dict[Point, str] = {}  # tensors without plain memory, and their kinds
        self.views: set[Point] = set()  # outputs of functions that lie in the memory of their unchanged inputs
        self._module = module
        self._modules = Modules(module)
        self._names = self._modules.names
        self._alone = alone
        self._has_functions = functions
        self._axes = axes
        self._batch_axis = batch_axis
        self._single = single
        self._look = look
        self._order = 0
        self._functions_since = 0  # how often a function began or ended since then
        self._taken: dict[int, int] = {}  # the memory that the last function took (0: none), with its version then
        self._running: list[tuple[nn.Module, int]] = []
        # By call: each attention with the tensor that tells where its rows are, and the number of learned sinks after
        # the real keys. None where weights do not stand as (heads, queries, keys).
        self._weights = defaultdict[tuple[str, int], list[tuple[TensorInfo, Observation, attention.Sinks] | None]](list)
        self._values: MutableMapping[Tensor, tuple[int, int]] = WeakIdKeyDictionary()  # versions, and values' numbers
        self._points: list[list[Point]] = []  # where each value was seen, in order

    def watch(self, run: Forward, inputs: Inputs) -> Self:
        """Run one forward, and give the recorder."""

        def hide(record: OnModuleCall) -> OnModuleCall:
            return lambda module, call, value: run_unseen(partial(record, module), call, value)

        with ExitStack() as stack:
            stack.enter_context(attention.AttentionObserver(self._record_attention))
            stack.enter_context(observe_calls(self._module, hide(self._record_inputs), hide(self._record_outputs)))
            if self._has_functions:  # these hooks come after those around calls
                for module in filter(may_call_functions, list_observed(self._module)):
                    ATTACH["function"](stack, module, partial(run_unseen, partial(self._record_function, module)))
            if self._axes is not None:
                self._axes.start(inputs)
                stack.enter_context(self._axes)
            run(inputs)
        return self

    def has_calls_of(self, other: CallRecorder) -> bool:
        """Whether both saw the same calls of modules, with tensors at the same points."""
        return self._list_points(functions=False) == other._list_points(functions=False)

    def find_unlike_functions(self, other: CallRecorder) -> set[tuple[str, int]]:
        """The calls in which the other saw other functions: their numbers do not tell which is which."""
        unlike = self._list_points(functions=True) ^ other._list_points(functions=True)
        return {(point.layer, point.call) for point in unlike}

    def _list_points(self, *, functions: bool) -> set[Point]:
        return {point for point in (*self.orders, *self.tensors) if bool(point.function) == functions}

    def make_boundaries(
        self, infos: Mapping[Point, TensorInfo], get_cost: Callable[[float], float] = lambda order: 0.0
    ) -> dict[Point, CallBoundary]:
        """The sides of all calls with these tensors; ``get_cost`` gives the share of the forward spent by an order."""
        tensors, refused = defaultdict[Point, list[TensorInfo]](list), defaultdict[Point, list[tuple[Path, str]]](list)
        for point, info in infos.items():
            tensors[point.side].append(info)
        for point, kind in self.refused.items():
            refused[point.side].append((point.path, kind))
        return {
            side: CallBoundary(order, get_cost(order), tuple(tensors[side]), tuple(refused[side]))
            for side, order in self.orders.items()
        }

    def find_origins(self) -> dict[Point, Point]:
        """Where inputs come from that other calls read too, which would not see a change of the input.

        Empty if functions, which may read them, are not recorded.
        """
        returned = defaultdict[Point, set[int]](set)
        for value, points in enumerate(self._points):
            for point in points:
                returned[point.side].add(value)
        outputs = {side: replace(side, site="output") for side in self.orders if side.site == "input"}

        def reads(point: Point, value: int) -> bool:
            """Whether a call computes from what it takes: it neither returns it unchanged nor only reads its size."""
            values, function = returned[outputs[point.side]], point.function
            asks = function and (not values or "_like#" in function or function.startswith("new_"))
            return not asks and value not in values

        def find_span(point: Point) -> tuple[float, float]:
            """When the call of an input begins and ends; at once if it raised."""
            begin = self.orders[point.side]
            return begin, self.orders.get(outputs[point.side], begin)

        def is_within(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
            return outer[0] < inner[0] and inner[1] < outer[1]

        origins: dict[Point, Point] = {}
        for value, points in enumerate(self._points if self._has_functions else ()):
            readers = {point: find_span(point) for point in points if point.site == "input" and reads(point, value)}
            spans = set(readers.values())
            whole = None if points[0].site == "output" else find_span(points[0])
            for reader, span in readers.items():
                apart = [
                    each for each in spans if each[1] < span[0] or each[0] > span[1]
                ]  # neither is a part of the other
                if apart and (whole is None or all(is_within(each, whole) for each in (span, *apart))):
                    origins[reader] = points[0]
        return origins

    def _record_inputs(self, module: nn.Module, number: int, value: object) -> None:
        self._running.append((module, number))
        self._record(Point(self._names[module], number, (), "input"), self._tick(), value)

    def _record_outputs(self, module: nn.Module, number: int, value: object) -> None:
        while self._running and self._running.pop() != (module, number):
            pass
        side, order = Point(self._names[module], number, (), "output"), self._tick()
        if value is not None:  # as it is after a call that raised
            self._record_weights(side, order)
        if self._axes is not None and isinstance(module, nn.RNNBase) and value is not None:
            taken = (each for point, each in self.tensors.items() if point.side == replace(side, site="input"))
            self._axes.follow_recurrent(next(taken).axes, value)
        self._record(side, order, value)

    def _record_function(self, module: nn.Module, number: int, function: str, site: Site, value: object) -> None:
        """Note what a function in a call of a module takes, or returns; the tensors may change later."""
        side = Point(self._names[module], number, (), site, function)
        memory = {each.untyped_storage().data_ptr(): get_version(each) for _, each in iterate_tensors(value)}
        if site == "input":
            self._taken = memory
        elif any(address and self._taken.get(address) == memory[address] for address in memory):
            self.views.add(side)
        # Between two calls of modules, whose orders are whole numbers whether functions are recorded or not.
        self._functions_since += 1
        self._record(side, self._order + 1 - 1 / (1 + self._functions_since), value)

    def _record(self, side: Point, order: float, value: object) -> None:
        """Note tensors at one side of a call."""
        self.orders[side] = order
        self.refused |= {replace(side, path=path): kind for path, kind in find_refused(value)}
        with attention.disable_observers():
            for path, tensor in iterate_tensors(value):
                point = replace(side, path=path)
                earlier = self._alone.tensors.get(point) if self._alone else None
                observation = self.tensors[point] = self._observe(path, tensor, earlier)
                self._points[self._number_value(tensor)].append(point)
                if self._axes is not None:
                    observation.axes = self._axes.find(tensor)
                if isinstance(value, Arguments) and value.lone:
                    observation.info = replace(observation.info, argument=value.get_parameter(value.lone))

    def _observe(self, path: Path, tensor: Tensor, earlier: Observation | None) -> Observation:
        """A tensor, compared with ``earlier``: the same one in the forward of one row, None in that forward."""
        shape = tuple(tensor.shape)
        if earlier is None:
            other = 0 if self._single and shape else None
            axis = next((axis for axis in (0, self._batch_axis) if shape[axis : axis + 1] == (1,)), other)
            info = TensorInfo(path, shape, dtype_name(tensor.dtype), axis, crosses_rows=axis is None)
            return Observation(info, self._look(tensor))
        one = earlier.info
        if shape == (ROWS, *one.shape):  # the model squeezes the axis away where it has a single row
            one = replace(one, shape=(1, *one.shape))
        axis = _find_row_axis(shape, one.shape)
        part = tensor if axis is None else tensor.narrow(axis, QUIET * one.shape[axis], one.shape[axis])
        sketch = self._look(part)
        crosses_rows = tuple(part.shape) != one.shape or not sketch.matches(earlier.sketch)
        return Observation(replace(one, row_axis=axis, crosses_rows=crosses_rows), sketch)

    def _record_attention(self, event: attention.AttentionEvent) -> None:
        """Note attention by its shape alone: weights of many tokens are large, and not wanted yet."""
        if not self._running:
            return
        module = attention.find_owner([module for module, _ in self._running])
        number = next(number for running, number in reversed(self._running) if running is module)
        call = self._names[module], number
        heads = attention.list_heads_around(self._modules, module)
        shape, found = attention.unfold_weights(event.shape, module, heads), self._weights[call]
        if shape is None:
            if heads or attention.list_heads(module):  # with another number of rows it might fit
                found.append(None)
            return
        known = self._alone._weights[call][len(found) :][:1] if self._alone else []
        earlier = known[0] if known else None
        evidence = self._observe((), event.evidence, earlier[1] if earlier else None)
        info, crosses_rows = TensorInfo((), shape, dtype_name(event.dtype), source=event.source), False
        axis = _find_row_axis(shape, earlier[0].shape if earlier else None)
        if earlier:
            info, crosses_rows = earlier[0], evidence.info.crosses_rows
            axis = axis if axis == evidence.info.row_axis else None
        layout = ATTENTION if axis == 0 else None
        info = replace(info, row_axis=axis, crosses_rows=crosses_rows or axis is None, layout=layout)
        found.append((info, evidence, event.sinks))

    def _record_weights(self, output: Point, order: float) -> None:
        """Note the attention of a call that has ended: its sinks are counted. The path is empty if there is one."""
        found = self._weights[output.layer, output.call]
        weights = [each for each in found if each is not None]
        for index, (info, evidence, sinks) in enumerate(weights if len(weights) == len(found) else ()):
            path = (str(index),) if len(found) > 1 else ()
            *outer, keys = info.shape
            parts: dict[Site, int] = {"attention": keys - sinks.count, "attention_sink": sinks.count}
            for site, count in parts.items():
                if count:
                    point = Point(output.layer, output.call, path, site)
                    self.orders[point.side] = order
                    self.tensors[point] = Observation(replace(info, path=path, shape=(*outer, count)), evidence.sketch)

    def _number_value(self, tensor: Tensor) -> int:
        """The number of what a tensor holds, another one after it was written to."""
        version, number = self._values.get(tensor, (-1, 0))
        if version != get_version(tensor):
            number = len(self._points)
            self._points.append([])
            self._values[tensor] = get_version(tensor), number
        return number

    def _tick(self) -> int:
        self._order += 1
        self._functions_since = 0
        return self._order


def _find_row_axis(shape: Shape, one: Shape | None) -> int | None:
    """The axis that grew with the rows since a forward of one; without that the first, if it has one entry."""
    if one is None:
        return 0 if shape[:1] == (1,) else None
    if len(one) != len(shape):
        return None
    grown = [axis for axis, (a, b) in enumerate(zip(one, shape, strict=True)) if a != b]
    return grown[0] if len(grown) == 1 and shape[grown[0]] == ROWS * one[grown[0]] else None


def _sum_bits(tensor: Tensor) -> int:
    """A sum of a tensor's memory, in integers as wide as fit."""
    memory = view_bytes(tensor)
    if memory.storage_offset() % WIDTHS[0].itemsize:  # a wider view must begin at a multiple of its width
        memory = memory.clone()
    width = next(dtype for dtype in WIDTHS if memory.numel() % dtype.itemsize == 0)
    return int(memory.view(width).sum(dtype=torch.int64))


@lru_cache
def _make_weights() -> Tensor:
    """As many numbers as are looked at, as good as random, and everywhere the same."""
    weights = torch.arange(1, MAX_NUMBERS + 1, dtype=torch.float32)  # from 1: that of 0 would be 0
    return weights.mul_(12.9898).sin_().mul_(43758.5453).frac_()


def _get_tolerance(dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return TOLERANCE_INTEGER
    return TOLERANCE_FLOAT32 if dtype.itemsize >= 4 else TOLERANCE_HALF

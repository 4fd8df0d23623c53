"""Whether rows may share a forward: a row has the same bits beside other neighbours, and nothing is shared by rows.

Each tensor of the model is looked at, since inner layers may hold rows in another order than the output does.

Rows affect each other through values that are computed from several rows and have no axis for them: a flag
(``(x > 50).any()``), a maximum over all rows, a number that Python reads, a size that depends on data. A model takes
another branch only after Python read a tensor. A flag is inverted, and the two forwards are compared; after any other
number or size that Python reads, nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.catalog.row_tensor import RowTensor
from layertap.models.catalog.taint import MarkedMemory, Taint, find_tensors
from layertap.models.catalog.trials import has_same_values, try_forward
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.hooks.attach import Modules, observe_calls
from layertap.models.hooks.tensor_tree import Path, TensorsByPath, iterate_tensors
from layertap.models.inputs.noise import QUIET, ROWS, copy_rows, replace_neighbours
from layertap.models.points import Point, Site
from layertap.models.spec import InputSpec

MAX_FLAGS = 6  # that are inverted, one forward for each


def prove_rows(
    module: nn.Module,
    run: Forward,
    rows: Inputs,
    inputs: Sequence[InputSpec],
    several: CallRecorder,
    create_recorder: Callable[[], CallRecorder],
    tolerance: float,
) -> frozenset[Point] | None:
    """The tensors whose rows are not known to be their own; None if that is so of what the model returns.

    What ``several`` recorded of a forward of these rows, three or more, is compared with the same row beside others.
    """
    fewer = TrackedForward(module, run, {name: value[:2] for name, value in rows.items()})
    whole = TrackedForward(module, run, rows, fewer)

    def watch(rows: Inputs) -> CallRecorder | None:
        return try_forward(create_recorder().watch, run, rows)

    def list_different(other: CallRecorder, *, exact: bool) -> list[Point]:
        pairs = ((point, one.sketch, other.tensors.get(point)) for point, one in several.tensors.items())
        return [
            point
            for point, one, same in pairs
            if same is None or not (one.bits == same.sketch.bits if exact else one.matches(same.sketch))
        ]

    outputs = {
        point.path: one.info
        for point, one in several.tensors.items()
        if replace(point, path=()) == Point(".", 0, (), "output")
    }
    if whole.crosses_rows or not all(_is_same_inverted(whole, flag, outputs, tolerance) for flag in whole.flags):
        return None
    # Beside milder ones if a model takes no such numbers.
    beside = watch(replace_neighbours(rows, inputs)) or watch(replace_neighbours(rows, inputs, scaled=False))
    if beside is None:
        return None
    different = list_different(beside, exact=True)
    if different:  # some devices add in another order each time: the very same forward has other bits
        again = create_recorder().watch(run, copy_rows(rows))
        if list_different(again, exact=True):
            different = list_different(beside, exact=False)
    return frozenset([*whole.shared_points, *different])


class TrackedForward(Taint):
    """A forward of these rows, followed while this is created; ``output`` is None if the model raises.

    ``flags`` are the numbers of the operations that return a truth value. Given the forward of ``fewer`` rows,
    ``shared_points`` are the tensors that depend on other values that rows share. ``inverted``: the flag that has its
    other value.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Forward,
        rows: Inputs,
        fewer: TrackedForward | None = None,
        inverted: int | None = None,
    ) -> None:
        super().__init__()
        self.flags: list[int] = []
        self.shared_points = set[Point]()
        self.sigmoids = MarkedMemory()
        self._given = module, run, rows
        self._fewer = fewer
        self._inverted = inverted
        self._shared = MarkedMemory()
        self._shapes: list[tuple[str, tuple[torch.Size, ...]]] = []
        self._calls: list[tuple[str, frozenset[Path]]] = []  # as they end, each with the paths of its tensors
        self._decides_sizes = False
        self._names = Modules(module).names
        own = copy_rows(rows)
        self.marked.mark(own.values())
        with observe_calls(module, partial(self._note_side, "input"), partial(self._note_side, "output")), self:
            self.output = try_forward(run, own)

    @property
    def may_branch(self) -> bool:
        """Whether rows of other values may make other calls, or return other structures."""
        if self.output is None or self.has_read or self._decides_sizes or len(self.flags) > MAX_FLAGS:
            return True
        return any(self.invert(flag)._calls != self._calls for flag in self.flags)

    @property
    def crosses_rows(self) -> bool:
        """Whether numbers other than flags are shared, and the model's output depends on them, or may."""
        unlike = self._fewer is None or len(self._fewer._shapes) != len(self._shapes)
        is_unknown = self.output is None or unlike or self.has_read or len(self.flags) > MAX_FLAGS
        return is_unknown or self._shared.has_any(find_tensors(self.output))

    def invert(self, flag: int) -> TrackedForward:
        """The same forward with one flag inverted."""
        return TrackedForward(*self._given, inverted=flag)

    def note_read(self, args: object) -> None:
        """Note that Python reads numbers other than flags, which are found where they are computed."""
        tensors = list(find_tensors(args))
        if not (len(tensors) == 1 and _is_flag(tensors[0])):
            super().note_read(args)

    def follow(
        self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any], result: Any, is_tainted: bool
    ) -> Any:
        """Note what an operation returns, and invert the flag."""
        results = list(find_tensors((result,)))
        if func is torch.ops.aten.native_batch_norm.default and not args[5]:
            results = results[:1]  # some devices return the running statistics too, which are not of the rows
        number = len(self._shapes)
        self._shapes.append((func._schema.name, tuple(each.shape for each in results)))
        self._shared.note(func, args, options, result)
        if func._schema.name.startswith("aten::sigmoid"):
            self.sigmoids.mark(results)
        elif func._schema.is_mutable:
            self.sigmoids.unmark(results)
        self._decides_sizes |= is_tainted and _has_data_sizes(func, args)
        if is_tainted and results and not self._has_rows(number):
            if len(results) == 1 and _is_flag(results[0]):
                self.flags.append(number)  # both of its values are tried
                self._shared.unmark(results)
            elif self._fewer is not None:  # of a view, what is computed from it counts
                taken = {tensor.untyped_storage()._cdata for tensor in find_tensors((args, options))}
                self._shared.mark(each for each in results if each.untyped_storage()._cdata not in taken)
        return result.logical_not() if number == self._inverted else result

    def _has_rows(self, number: int) -> bool:
        """Whether each result of an operation has an axis that grew with the rows."""
        if self._fewer is None or number >= len(self._fewer._shapes):
            return False
        (name, fewer), (own, shapes) = self._fewer._shapes[number], self._shapes[number]
        return name == own and len(fewer) == len(shapes) and all(map(_grows, fewer, shapes))

    def _note_side(self, site: Site, module: nn.Module, call: int, value: object) -> None:
        name, found = self._names[module], dict(iterate_tensors(value))
        shared = (path for path, tensor in found.items() if self._shared.has_any([tensor]))
        self.shared_points |= {Point(name, call, path, site) for path in shared}
        if site == "output":
            self._calls.append((name, frozenset(found)))


def _has_data_sizes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the sizes of a result depend on values; of an index on masks only."""
    is_index = func.overloadpacket is torch.ops.aten.index
    masks = any(each.dtype in (torch.bool, torch.uint8) for each in find_tensors(args[1:]))
    return torch.Tag.dynamic_output_shape in func.tags and (masks or not is_index)


def _is_flag(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool and tensor.numel() == 1


def _grows(two: torch.Size, three: torch.Size) -> bool:
    """Whether one axis has as many entries for each row in both batches: of two rows, and of three."""
    return 0 in three or (len(two) == len(three) and any(3 * a == 2 * b for a, b in zip(two, three, strict=True)))


def _is_same_inverted(whole: TrackedForward, flag: int, outputs: Mapping[Path, TensorInfo], tolerance: float) -> bool:
    """Whether the quiet row's output is the same with a flag inverted."""
    inverted = whole.invert(flag).output
    if inverted is None:
        return False
    return has_same_values(_select_quiet(whole.output, outputs), _select_quiet(inverted, outputs), tolerance)


def _select_quiet(output: object, infos: Mapping[Path, TensorInfo]) -> TensorsByPath:
    """The quiet row of each tensor that a model returned; all of one that is not as ``infos`` says."""
    return TensorsByPath(
        (path, RowTensor(tensor, infos[path]).select((QUIET, QUIET + 1)).value)
        if path in infos and tuple(tensor.shape) == infos[path].shape_for(ROWS)
        else (path, tensor)
        for path, tensor in iterate_tensors(output)
    )

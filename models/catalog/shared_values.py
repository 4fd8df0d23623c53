"""What the rows of one forward share, and which way through a model they choose, followed operation by operation.

Batch mates see one another through what is computed from several rows and has no axis for them: a flag
(``(x > 50).any()``), a maximum over all rows, a number that Python reads, a size that the data decides. Python goes
another way only by what it reads of a forward's tensors: a model that reads nothing has one way. Truth values are
turned round, and what then happens is compared; after any other number, or such a size, everything may be otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.catalog.observations import Place
from layertap.models.catalog.taint import MarkedMemory, Taint, find_tensors
from layertap.models.catalog.trials import try_forward
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.hooks.attach import observe_calls
from layertap.models.hooks.tensor_tree import Path, iterate_tensors
from layertap.models.inputs.noise import copy_rows
from layertap.models.points import Site

MAX_FLAGS = 6  # that are turned round, one forward for each


class TrackedForward(Taint):
    """A forward of these rows, followed while this is created; ``output`` is None if the model raises.

    ``flags`` are the numbers of the operations that give a truth value. Given the forward of ``fewer`` rows, ``places``
    are the tensors that depend on other values that rows share. ``turned``: the flag that has its other value.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Forward,
        rows: Inputs,
        fewer: TrackedForward | None = None,
        turned: int | None = None,
    ) -> None:
        super().__init__()
        self.flags: list[int] = []
        self.places: set[Place] = set()
        self.sigmoids = MarkedMemory()
        self._given = module, run, rows
        self._fewer = fewer
        self._turned = turned
        self._shared = MarkedMemory()
        self._shapes: list[tuple[str, tuple[torch.Size, ...]]] = []
        self._calls: list[tuple[nn.Module, frozenset[Path]]] = []  # as they end, each with the paths of its tensors
        self._decides_sizes = False
        own = copy_rows(rows)
        self.marked.mark(own.values())
        with observe_calls(module, partial(self._note_side, "input"), partial(self._note_side, "output")), self:
            self.output = try_forward(run, own)

    def turn(self, flag: int) -> TrackedForward:
        """The same forward where one flag has the other value."""
        return TrackedForward(*self._given, turned=flag)

    @property
    def may_branch(self) -> bool:
        """Whether rows of other values may make other calls, or return other structures."""
        if self.output is None or self.has_read or self._decides_sizes or len(self.flags) > MAX_FLAGS:
            return True
        return any(self.turn(flag)._calls != self._calls for flag in self.flags)

    @property
    def crosses_rows(self) -> bool:
        """Whether numbers other than flags are shared, and the model's output depends on them, or may."""
        unlike = self._fewer is None or len(self._fewer._shapes) != len(self._shapes)
        is_unknown = self.output is None or unlike or self.has_read or len(self.flags) > MAX_FLAGS
        return is_unknown or self._shared.has_any(find_tensors(self.output))

    def note_read(self, args: object) -> None:
        """Python reads numbers; flags are found where they are made."""
        tensors = list(find_tensors(args))
        if not (len(tensors) == 1 and _is_flag(tensors[0])):
            super().note_read(args)

    def follow(
        self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any], result: Any, is_tainted: bool
    ) -> Any:
        """Note what an operation returns; a flag that is turned goes on with its other value."""
        results = list(find_tensors((result,)))
        number = len(self._shapes)
        self._shapes.append((func._schema.name, tuple(each.shape for each in results)))
        self._shared.note(func, args, options, result)
        self._note_sigmoid(func, results)
        self._decides_sizes |= is_tainted and _has_data_sizes(func, args)
        if is_tainted and results and (self._fewer is None or not self._has_rows(number)):
            if len(results) == 1 and _is_flag(results[0]):
                self.flags.append(number)  # both of its values are tried
                self._shared.unmark(results[0])
            elif self._fewer is not None:  # a view is what it is of: what is computed from it is looked at
                taken = {tensor.untyped_storage()._cdata for tensor in find_tensors((args, options))}
                self._shared.mark(each for each in results if each.untyped_storage()._cdata not in taken)
        return result.logical_not() if number == self._turned else result

    def _note_sigmoid(self, func: Any, results: list[Tensor]) -> None:
        if func._schema.name.startswith("aten::sigmoid"):
            self.sigmoids.mark(results)
        elif func._schema.is_mutable:
            for each in results:
                self.sigmoids.unmark(each)

    def _has_rows(self, number: int) -> bool:
        """Whether each result of an operation has an axis that grew with the rows."""
        if self._fewer is None or number >= len(self._fewer._shapes):
            return False
        (name, fewer), (own, shapes) = self._fewer._shapes[number], self._shapes[number]
        return name == own and len(fewer) == len(shapes) and all(map(_grows, fewer, shapes))

    def _note_side(self, boundary: Site, module: nn.Module, call: int, value: object) -> None:
        found = dict(iterate_tensors(value))
        self.places |= {((module, call, ""), boundary, path) for path in found if self._shared.has_any([found[path]])}
        if boundary == "output":
            self._calls.append((module, frozenset(found)))


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

"""Values that several rows of a batch share: what a forward computes from rows and holds no axis for them.

Batch mates would see one another through them: a flag (``(x > 50).any()``), a maximum over all rows, a number that
Python reads, a size that the data decides. Two forwards of different batch sizes are compared, operation by operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from layertap.models.catalog.observations import Boundary
from layertap.models.devices.memory import Forward, Inputs, is_device_error
from layertap.models.dispatch_mode import DispatchMode
from layertap.models.hooks.attach import observe_calls
from layertap.models.hooks.tensor_tree import Path, iterate_tensors
from layertap.models.taint import MarkedMemory, find_tensors, is_read

MAX_FLAGS = 6  # that are turned round, one forward for each
READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})  # that no dispatch mode sees
Place = tuple[nn.Module, int, Boundary, Path]  # a tensor that enters or leaves a call


@dataclass(frozen=True)
class SharedValues:
    """What the rows of a forward share: ``places`` depend on it; ``flags`` are the operations that give a truth value.

    ``crosses_rows``: numbers other than flags are shared, and the model's output depends on them, or may.
    """

    crosses_rows: bool = False
    flags: tuple[int, ...] = ()
    places: frozenset[Place] = frozenset()


def find_shared_values(module: nn.Module, run: Forward, rows: Inputs) -> SharedValues:
    """Compare a forward of all rows, three or more, with one of two of them."""
    fewer = Tracker(None)
    fewer.watch(module, run, {name: value[:2].clone() for name, value in rows.items()})
    whole = Tracker(fewer.shapes)
    whole.watch(module, run, {name: value.clone() for name, value in rows.items()})
    unlike = len(fewer.shapes) != len(whole.shapes)
    crosses_rows = unlike or whole.reads or whole.reaches_output or len(whole.flags) > MAX_FLAGS
    return SharedValues(crosses_rows, tuple(whole.flags), frozenset(whole.places))


def run_turned(run: Forward, rows: Inputs, flag: int) -> object:
    """What a forward returns in which one flag has the other value; None if it raises."""
    own = {name: value.clone() for name, value in rows.items()}  # outside: operations are counted
    try:
        with _Turn(flag):
            return run(own)
    except Exception as error:
        if is_device_error(error):
            raise
        return None


class Tracker(DispatchMode):
    """Follows what is computed from rows, and from values that they share, given the shapes of a smaller batch."""

    def __init__(self, fewer: list[tuple[str, tuple[torch.Size, ...]]] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[str, tuple[torch.Size, ...]]] = []
        self.flags: list[int] = []
        self.places: set[Place] = set()
        self.reads = False
        self.decides_sizes = False
        self.reaches_output = False
        self._fewer = fewer
        self._of_rows, self._shared = MarkedMemory(), MarkedMemory()

    def watch(self, module: nn.Module, run: Forward, rows: Inputs) -> None:
        """Run one forward."""
        self._of_rows.mark(rows.values())
        with _Reads(self), observe_calls(module, self._enter, self._leave), self:
            output = run(rows)
        self.reaches_output = self._shared.has_any(find_tensors(output))

    def note_read(self, args: object) -> None:
        """Python reads numbers."""
        tensors = list(find_tensors(args))
        is_flag = len(tensors) == 1 and _is_flag(tensors[0])
        self.reads |= self._of_rows.has_any(tensors) and not is_flag

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and note its results."""
        options = kwargs or {}
        result = func(*args, **options)
        results = list(find_tensors((result,)))
        number = len(self.shapes)
        self.shapes.append((func._schema.name, tuple(each.shape for each in results)))
        is_of_rows = self._of_rows.note(func, args, options, result)
        self._shared.note(func, args, options, result)
        self.decides_sizes |= is_of_rows and _has_data_sizes(func, args)
        if is_of_rows and is_read(func, result):
            self.note_read(args)
        elif is_of_rows and self._fewer is None and len(results) == 1 and _is_flag(results[0]):
            self.flags.append(number)
        elif is_of_rows and self._fewer is not None and not self._has_rows(number, results):
            if len(results) == 1 and _is_flag(results[0]):
                self.flags.append(number)  # both of its values are tried
                self._shared.unmark(results[0])
            else:  # a view is what it is of: what is computed from it is looked at
                taken = {tensor.untyped_storage()._cdata for tensor in find_tensors((args, options))}
                self._shared.mark(each for each in results if each.untyped_storage()._cdata not in taken)
        return result

    def _has_rows(self, number: int, results: list[Tensor]) -> bool:
        """Whether each result of an operation has an axis that grew with the rows."""
        if self._fewer is None or number >= len(self._fewer):
            return False
        (name, fewer), (own, shapes) = self._fewer[number], self.shapes[number]
        if name != own or len(fewer) != len(shapes):
            return False
        return all(map(_grows, fewer, shapes))

    def _enter(self, module: nn.Module, call: int, value: object) -> None:
        self._note_places(module, call, "input", value)

    def _leave(self, module: nn.Module, call: int, value: object) -> None:
        self._note_places(module, call, "output", value)

    def _note_places(self, module: nn.Module, call: int, boundary: Boundary, value: object) -> None:
        for path, tensor in iterate_tensors(value):
            if self._shared.has_any([tensor]):
                self.places.add((module, call, boundary, path))


class _Turn(DispatchMode):
    """Turns the truth value round that one operation gives."""

    def __init__(self, flag: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = flag

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        result = func(*args, **(kwargs or {}))
        self._left -= 1
        return result.logical_not() if self._left == -1 else result


class _Reads(TorchFunctionMode):
    """Notes reads that are no operations."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            self._tracker.note_read(args)
        return func(*args, **(kwargs or {}))


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

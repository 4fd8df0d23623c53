"""Whether a copy of a module runs as the module does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_recorder import CallRecorder
from layertap.models.catalog.observations import CallObservation
from layertap.models.hooks.tensor_tree import view_bytes
from layertap.models.inputs.noise import ROWS, copy_row


def has_same_calls(
    module: nn.Module, copy: nn.Module, forward: Callable[..., object], rows: Mapping[str, Tensor]
) -> bool:
    """Whether every part of a copy is called as the module's is, and returns the same, for ``ROWS`` rows of noise.

    Nothing that they share may change on the way: two threads will run them at once.
    """
    before = _WriteMarks.read(module)
    try:
        with torch.no_grad():
            calls = _record_calls(module, forward, rows)
            # Another row than that, and than a copy brings along: what one tree left in the other must show.
            forward(copy_row(rows, 0), module)
            copy_calls = _record_calls(copy, forward, rows)
    except Exception:  # a copy may lack what its constructor set up elsewhere
        return False
    return _WriteMarks.read(module).matches(before) and all(
        _is_same(*pair) for pair in zip(calls, copy_calls, strict=True)
    )


def _record_calls(
    module: nn.Module, forward: Callable[..., object], rows: Mapping[str, Tensor]
) -> list[list[CallObservation]]:
    """The calls of each part of a module, in a forward of a row that no other forward at loading ends with."""
    recorder = CallRecorder(module)
    recorder.watch(partial(forward, module=module), copy_row(rows, ROWS - 1))
    return [recorder.calls.get(part, []) for part in module.modules()]


@dataclass(frozen=True)
class _WriteMarks:
    """What tells whether something was written to a module's tensors. Not all of it leaves a new version behind."""

    versions: list[int]
    buffers: list[Tensor]

    @classmethod
    def read(cls, module: nn.Module) -> _WriteMarks:
        tensors = (*module.parameters(), *module.buffers())
        # A tensor that a forward made, a cache for one, has no version.
        versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
        return cls(versions, [view_bytes(buffer).clone() for buffer in module.buffers()])

    def matches(self, other: _WriteMarks) -> bool:
        is_same = self.versions == other.versions and len(self.buffers) == len(other.buffers)
        return is_same and all(torch.equal(*pair) for pair in zip(self.buffers, other.buffers, strict=True))


def _is_same(calls: Sequence[CallObservation], other_calls: Sequence[CallObservation]) -> bool:
    """Whether two modules were called at the same places of a forward and returned the same."""
    orders, other_orders = ([(call.start, call.end) for call in each] for each in (calls, other_calls))
    return orders == other_orders and all(
        call.output.keys() == other.output.keys()
        and all(call.output[path].sketch.matches(other.output[path].sketch) for path in call.output)
        for call, other in zip(calls, other_calls, strict=True)
    )

"""The same row again and again: whether a model gives the same answer, and what its forwards leave behind."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_observer import Run
from layertap.models.catalog.same_values import has_same_values
from layertap.models.hooks.tensor_tree import TensorsByPath, iterate_tensors
from layertap.models.module_state import ModuleState, StateKey

Rows = Mapping[str, Tensor]


class RepeatedRun:
    """Runs forwards of a module, and compares those of the first row with the first of them.

    ``is_same``: whether all returned the same, within ``tolerance`` of a tensor's largest number.
    """

    def __init__(self, module: nn.Module, run: Run, tolerance: float) -> None:
        self.is_same = True
        self._module = module
        self._run = run
        self._tolerance = tolerance
        self._loaded = ModuleState(module)
        self._settled: ModuleState | None = None
        self._row: Rows = {}
        self._output = TensorsByPath()

    def __call__(self, rows: Rows) -> object:
        """Run one forward."""
        given = _clone(rows)  # a model may write to its input
        output = self._run(rows)
        if self._settled is None:
            self._row, self._output = given, _copy_tensors(output)
            self._settled = ModuleState(self._module)
        elif given.keys() == self._row.keys() and all(torch.equal(given[name], self._row[name]) for name in given):
            self.is_same = self.is_same and has_same_values(self._output, output, self._tolerance)
        return output

    def repeat(self) -> None:
        """Run the first row again."""
        self(_clone(self._row))

    def put_back_state(self) -> tuple[StateKey, ...]:
        """Give what changed after the first forward the values that it had before; its names.

        The first one may fill a cache, which need not be put back where answers are the same.
        """
        earlier = self._settled if self.is_same and self._settled is not None else self._loaded
        changed = earlier.find_changes()
        self._loaded.put_back(changed)
        return changed


def _clone(rows: Rows) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in rows.items()}


def _copy_tensors(value: object) -> TensorsByPath:
    return TensorsByPath((path, tensor.clone()) for path, tensor in iterate_tensors(value))

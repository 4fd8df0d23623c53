"""The same row again and again: whether a model gives the same answer, and what its forwards leave behind."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor, nn

from layertap.models.catalog.call_observer import Run
from layertap.models.catalog.same_values import has_same_values
from layertap.models.devices.threads import use_threads
from layertap.models.hooks.tensor_tree import TensorsByPath, iterate_tensors
from layertap.models.module_state import ModuleState, StateKey

Rows = Mapping[str, Tensor]


class RepeatedRun:
    """Runs forwards of a module between two of the same row, which are compared.

    Both run on one thread and without hooks: kernels that differ only round otherwise. ``is_same``: whether both
    returned the same, within ``tolerance`` of a tensor's largest number. ``seconds``: CPU time of the first.
    """

    def __init__(self, module: nn.Module, run: Run, tolerance: float, row: Rows) -> None:
        self.is_same = True
        self._module = module
        self._run = run
        self._tolerance = tolerance
        self._loaded = ModuleState(module)
        self._row = row
        start = time.thread_time()
        self._output = self._run_alone()
        self.seconds = time.thread_time() - start
        self._settled = ModuleState(module)

    def __call__(self, rows: Rows) -> object:
        """Run one forward."""
        return self._run(rows)

    def repeat(self) -> None:
        """Run the first row again, and compare."""
        self.is_same = has_same_values(self._output, self._run_alone(), self._tolerance)

    def _run_alone(self) -> TensorsByPath:
        with use_threads(1):
            return _copy_tensors(self._run(_clone(self._row)))  # a model may write to its input

    def put_back_state(self) -> tuple[StateKey, ...]:
        """Give what changed after the first forward the values that it had before; its names.

        The first one may fill a cache, which need not be put back where answers are the same.
        """
        earlier = self._settled if self.is_same else self._loaded
        changed = earlier.find_changes()
        self._loaded.put_back(changed)
        return changed


def _clone(rows: Rows) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in rows.items()}


def _copy_tensors(value: object) -> TensorsByPath:
    return TensorsByPath((path, tensor.clone()) for path, tensor in iterate_tensors(value))

"""A model's module tree, once for each thread that may run it, over parameters that are stored once.

Hooks on a module are seen by every forward through it, so what several threads run at once must be several trees.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.hooks import attach
from layertap.models.module_state import StateKey, keep_state


@dataclass(frozen=True, eq=False)
class Replica:
    """One module tree; everything that runs it happens in one thread. ``own_hooks`` counts those it brought along."""

    module: nn.Module
    extractor: FeatureExtractor
    own_hooks: int

    @property
    def hooks(self) -> int:
        """Hooks of ours on it now: 0 when idle."""
        return attach.count_hooks(self.module) - self.own_hooks


def call_module(rows: Mapping[str, Tensor], module: nn.Module, state: Sequence[StateKey] = ()) -> object:
    """One forward of a module tree for a batch; a single argument goes by position, several by name.

    The ``state`` that it changes is put back when it ends.
    """
    if state:
        with keep_state(module, state):
            return call_module(rows, module)
    arguments = _make_arguments(rows)
    return module(*arguments.values()) if len(arguments) == 1 else module(**arguments)


def _make_arguments(rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Inputs as a forward takes them: ``batch.ids`` is the entry ``ids`` of a dictionary ``batch``."""
    arguments: dict[str, Any] = {}
    for name, value in rows.items():
        *outer, last = name.split(".")
        inner = arguments
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return arguments


def create_replica(module: nn.Module) -> Replica:
    """A replica that is the module itself."""
    return Replica(module, FeatureExtractor(module), attach.count_hooks(module))


def copy_module(module: nn.Module) -> nn.Module | None:
    """Another tree over the same parameters and buffers; None where a module can't be copied like that.

    Whether a forward of the copy stays inside the copy is not told by this: a closure may lead back to the original.
    """
    shared = {id(tensor): tensor for tensor in _iterate_tensors(module)}
    try:
        duplicate = copy.deepcopy(module, dict(shared))
    except Exception:  # locks, sockets, generators: whatever a third party's module holds
        return None
    return (
        duplicate
        if _list_addresses(duplicate) == _list_addresses(module) and _share_no_modules(duplicate, module)
        else None
    )


def _iterate_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _list_addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in _iterate_tensors(module)]


def _share_no_modules(one: nn.Module, other: nn.Module) -> bool:
    return not {id(part) for part in one.modules()} & {id(part) for part in other.modules()}

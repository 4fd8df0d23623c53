"""Whether rows of other values may take another way through a model: make other calls, or return other structures.

Python goes another way only by what it reads of a forward's tensors: a model that reads nothing has one way. Truth
values are turned round, and the calls compared; after any other number, or a size that the data decides, all may be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from layertap.models.catalog.shared_values import MAX_FLAGS, Tracker, run_turned
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.hooks.attach import observe_calls
from layertap.models.hooks.tensor_tree import Path, iterate_tensors

Calls = list[tuple[nn.Module, frozenset[Path]]]  # as they end, each with the paths of its tensors


def may_branch(module: nn.Module, run: Forward, row: Inputs) -> bool:
    """Whether a forward may make other calls for a row of other values."""
    tracker = Tracker(None)
    tracker.watch(module, run, _copy(row))
    if tracker.reads or tracker.decides_sizes or len(tracker.flags) > MAX_FLAGS:
        return True
    calls = _list_calls(module, lambda: run(_copy(row))) if tracker.flags else []
    return any(_list_calls(module, partial(run_turned, run, row, flag)) != calls for flag in tracker.flags)


def _list_calls(module: nn.Module, forward: Callable[[], object]) -> Calls:
    calls: Calls = []

    def leave(part: nn.Module, number: int, value: object) -> None:
        calls.append((part, frozenset(path for path, _ in iterate_tensors(value))))

    with observe_calls(module, lambda *_: None, leave):
        forward()
    return calls


def _copy(row: Inputs) -> Inputs:
    return {name: value.clone() for name, value in row.items()}

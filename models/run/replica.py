"""A model's module tree, once for each thread that may run it, over parameters that are stored once.

Hooks on a module run in every forward through it, so threads that run at once need separate trees.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layertap.models.catalog.call_recorder import CallRecorder, Sketch
from layertap.models.devices.dispatch_mode import disable_compiled_functions
from layertap.models.errors import LoadError, escape
from layertap.models.hooks import attach
from layertap.models.inputs.noise import ROWS, copy_row, copy_rows
from layertap.models.points import Point
from layertap.models.run.module_state import ModuleState

NO_AXES: Mapping[str, int] = {}
STOPS = 8  # calls at which a forward is left
MAX_LOOKS = 32  # at weights in a forward, one at each begin and end of a call
# A module's forward hooks, its forward pre-hooks, and its own ``forward`` if it has one.
Methods = tuple[dict[int, Any], dict[int, Any], dict[str, Any]]
WRAPPER = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]  # it hands on whatever it gets
_bindings: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], bool]] = WeakKeyDictionary()


class Replica(ModuleState):
    """A module tree, which only one thread runs: each forward from the state that it had when this was created."""

    def __init__(
        self, module: nn.Module, batch_axes: Mapping[str, int] = NO_AXES, like: ModuleState | None = None
    ) -> None:
        super().__init__(module, like)
        self.batch_axes = batch_axes  # as ``call_module`` takes them
        self.modules = attach.Modules(module)
        self._own_hooks = attach.count_hooks(module)  # that the model came with

    def __call__(self, rows: Mapping[str, Tensor]) -> object:
        """One forward for a batch; what the last one has changed is put back first."""
        self.begin()
        return call_module(rows, self.module, self.batch_axes)

    def settle(self) -> None:
        """After the first runs: keep the modules, parameters and hooks that they made, put back all else."""
        super().settle()
        self.modules = attach.Modules(self.module)
        self._own_hooks = attach.count_hooks(self.module)

    @property
    def hooks(self) -> int:
        """The number of our hooks on it now: 0 when idle."""
        return attach.count_hooks(self.module) - self._own_hooks


def may_stop(replica: Replica, rows: Mapping[str, Tensor]) -> bool:
    """Whether a forward may be left midway: what it has changed until then can be put back, wherever that is.

    Weights that are overwritten for a while can't, nor can hooks and methods that a forward puts on and takes off. What
    else some stops show, from the last to the first, is looked at after each run from then on.
    """
    if _is_ever(replica, rows, replica.has_overwritten):
        return False
    calls = []
    with attach.observe_calls(replica.module, lambda *_: None, lambda *given: calls.append(given[1])):
        replica(copy_rows(rows))
    methods = {part: _list_methods(part) for part in replica.module.modules()}
    return all(_leave(replica, rows, len(calls) * number // STOPS, methods) for number in reversed(range(STOPS)))


def _leave(replica: Replica, rows: Mapping[str, Tensor], at: int, methods: Mapping[nn.Module, Methods]) -> bool:
    """Leave a forward at a call, and put everything back; whether that left no part, hook or method behind."""
    calls = itertools.count()

    def leave(*_: object) -> None:
        if next(calls) == at:
            raise attach.StopForward

    with suppress(attach.StopForward), attach.observe_calls(replica.module, lambda *_: None, leave):
        replica(copy_rows(rows))
    replica.restore(thorough=True)
    is_same = methods.keys() == set(replica.module.modules())
    for part, before in methods.items():
        if _list_methods(part) != before:
            is_same = False
            part._forward_hooks.clear()
            part._forward_hooks.update(before[0])
            part._forward_pre_hooks.clear()
            part._forward_pre_hooks.update(before[1])
            vars(part).pop("forward", None)
            vars(part).update(before[2])
    return is_same


def _list_methods(part: nn.Module) -> Methods:
    """The hooks of a module's forward, and its forward where that is not its class's."""
    own = {name: value for name, value in vars(part).items() if name == "forward"}
    return dict(part._forward_hooks), dict(part._forward_pre_hooks), own


def _is_ever(replica: Replica, rows: Mapping[str, Tensor], condition: Callable[[], bool]) -> bool:
    """Whether something holds where a call begins or ends in a forward."""
    calls, found = itertools.count(1), []

    def look(*_: object) -> None:
        if (call := next(calls)) <= MAX_LOOKS or call & (call - 1) == 0:  # each of many would take long
            found.append(condition())

    with attach.observe_calls(replica.module, look, look):
        replica(copy_rows(rows))
    return any(found) or condition()


def call_module(rows: Mapping[str, Tensor], module: nn.Module, batch_axes: Mapping[str, int] = NO_AXES) -> object:
    """One forward of a module tree for a batch; arguments are passed as ``takes_by_position`` says.

    Everywhere else rows are on axis 0 of an input; ``batch_axes`` has the axis of inputs where the module has another.
    """
    disable_compiled_functions()
    if batch_axes:
        rows = {name: value.movedim(0, batch_axes.get(name, 0)).contiguous() for name, value in rows.items()}
    arguments = _make_arguments(rows)
    return module(*arguments.values()) if takes_by_position(module, tuple(arguments)) else module(**arguments)


def takes_by_position(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a forward takes its inputs by position, else by name; LoadError if it has no parameters for them.

    A single input goes by position where it is the first parameter, or has another name than the only one that a
    forward needs.
    """
    known = _bindings.setdefault(module, {})
    if names not in known:
        known[names] = _bind(module, names)
    return known[names]


def _bind(module: nn.Module, names: tuple[str, ...]) -> bool:
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # compiled code does not tell
        return len(names) == 1
    parameters = list(signature.parameters.values())
    children = list(module.children())
    if [each.kind for each in parameters] == WRAPPER and len(children) == 1:
        return _bind(children[0], names)
    by_position = len(names) == 1 and bool(parameters) and parameters[0].kind <= inspect.Parameter.VAR_POSITIONAL
    if by_position and parameters[0].name != names[0]:
        by_position = names[0] not in signature.parameters and parameters[0].default is inspect.Parameter.empty
    try:
        signature.bind(None) if by_position else signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        detail = f"forward of {escape(type(module).__name__)} does not take inputs of these names: {error}"
        raise LoadError(detail, hint=f"its parameters are {', '.join(map(str, parameters))}") from error
    return by_position


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


def copy_module(module: nn.Module) -> nn.Module | None:
    """Another tree over the same parameters and buffers; None if a module can't be copied like that.

    This does not prove that a forward of the copy stays inside it: a closure may lead back to the original.
    """
    shared = _list_tensors(module)
    try:
        duplicate = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    except Exception:  # locks, sockets, generators: whatever a third party's module holds
        return None
    has_same_tensors = [*map(id, _list_tensors(duplicate))] == [*map(id, shared)]
    return duplicate if has_same_tensors and set(duplicate.modules()).isdisjoint(module.modules()) else None


def has_same_calls(one: Replica, copy: Replica, rows: Mapping[str, Tensor]) -> bool:
    """Whether a copy makes the same calls with the same outputs as the module, for ``ROWS`` rows of noise.

    Tensors that they share must not change in the forward: two threads will run them at once.
    """
    try:
        with torch.no_grad():
            if _is_ever(one, copy_row(rows), one.has_changed_tensors):
                return False
            calls = _sketch_calls(one, rows)
            # Another row than in both sketches and in a copy's state: what one tree leaves in the other must show.
            one(copy_row(rows, 0))
            copy_calls = _sketch_calls(copy, rows)
    except Exception:  # a copy may lack what its constructor set up elsewhere
        return False
    finally:
        one.restore()
        copy.restore()
    return list(calls) == list(copy_calls) and all(sketch.matches(copy_calls[point]) for point, sketch in calls.items())


def _sketch_calls(replica: Replica, rows: Mapping[str, Tensor]) -> dict[Point, Sketch]:
    """All tensors of a forward, whose row no other forward at loading runs last."""
    recorder = CallRecorder(replica.module).watch(replica, copy_row(rows, ROWS - 1))
    return {point: each.sketch for point, each in recorder.tensors.items()}


def _list_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]

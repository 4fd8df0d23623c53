"""Outputs that a model keeps on the side: a hook that hands on another tensor must change these too.

A part may keep what it returns for a later one, as an attribute, ``self.skip = out``, or the model's hooks gather it.
"""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.hooks.tensor_tree import iterate_tensors, replace_tensor

MAX_LOOKED_AT = 100_000  # objects
OWN = "layertap."  # hooks of ours, which hold what they take
OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}
ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
Slot = tuple[Any, Any, Any]  # an entry of a dictionary, a list or a closure's cell: what holds it, its key, its value


class KeptOutputs:
    """The places in a module tree, in what its own hooks hold and in context variables where tensors are kept."""

    def __init__(self, root: nn.Module, *, restores: bool) -> None:
        """``restores``: whether ``restore`` is to put originals back, which are held until then."""
        self._root = root
        self._undo: list[Slot] | None = [] if restores else None
        earlier = (tensor for _, _, value in self._list_slots() for _, tensor in iterate_tensors(value))
        self._earlier = {id(tensor): weakref.ref(tensor) for tensor in earlier}  # nothing of these is a call's own
        self._originals: list[weakref.ref[Tensor]] = []

    def replace(self, original: Tensor, changed: Tensor, arguments: object) -> None:
        """Have a call's changed output wherever the call has kept its original one.

        Nothing is done where that is one of its ``arguments``, or was kept before: others hold it rightly.
        """
        earlier = self._earlier.get(id(original), lambda: None)()
        if earlier is original or any(each is original for _, each in iterate_tensors(arguments)):
            return
        self._originals.append(weakref.ref(original))
        for holder, key, value in list(self._list_slots()):
            new = value
            for path, tensor in iterate_tensors(value):
                new = replace_tensor(new, path, changed) if tensor is original else new
            if new is not value:
                _put(holder, key, new)
                if self._undo is not None:
                    self._undo.append((holder, key, value))

    def restore(self) -> None:
        """Have originals again where they were kept: a later forward may read them."""
        for slot in self._undo or ():
            _put(*slot)

    def has_lost_any(self) -> bool:
        """Whether an original is still held, somewhere else: whoever reads it there sees no change."""
        return any(each() is not None for each in self._originals)

    def _list_slots(self) -> Iterator[Slot]:
        """All entries that are tensors, or tuples, which can't be written to."""
        modules = [*self._root.modules()]
        hooks = chain.from_iterable(
            (*each._forward_hooks.values(), *each._forward_pre_hooks.values()) for each in modules
        )
        own = (hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(OWN))
        rest, seen = [*modules, *own, *contextvars.copy_context().values()], set[int]()
        while rest and len(seen) < MAX_LOOKED_AT:
            held = rest.pop()
            if id(held) not in seen:
                seen.add(id(held))
                holder, items = _open(held)
                for key, value in items:
                    kind = type(value)
                    if (
                        kind in ATOMS
                        or key in OF_TORCH
                        or (kind is tuple and all(type(each) in ATOMS for each in value))
                    ):
                        continue
                    if isinstance(value, (Tensor, tuple)):
                        yield holder, key, value
                    else:
                        rest.append(value)


def _open(value: Any) -> tuple[Any, Iterable[tuple[Any, Any]]]:
    """What has the entries of an object, and these."""
    if isinstance(value, dict):
        return value, value.items()
    if isinstance(value, (list, deque)):
        return value, enumerate(value)
    if isinstance(value, types.CellType):
        return value, [("", value.cell_contents)] if value != types.CellType() else ()  # it may be filled later
    if isinstance(value, types.FunctionType):
        found = ((name, value.__globals__.get(name)) for name in value.__code__.co_names)
        gathered = [each for each in found if isinstance(each[1], (dict, list))]
        return value.__globals__, [*gathered, *(("", cell) for cell in value.__closure__ or ())]
    if isinstance(value, types.MethodType):
        return value, [("", value.__self__)]
    if isinstance(value, functools.partial):
        return value, [("", each) for each in (value.func, *value.args)]
    is_plain = hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType))
    return (vars(value), vars(value).items()) if is_plain else (value, ())


def _put(holder: Any, key: Any, value: object) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, dict) or (isinstance(holder, (list, deque)) and key < len(holder)):
        holder[key] = value

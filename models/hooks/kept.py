"""Outputs that a model keeps on the side: a hook that hands on another tensor must change these too.

A part may keep what it returns for a later one, as an attribute, ``self.skip = out``, or the model's hooks gather it.
"""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from layertap.models.hooks.tensor_tree import iterate_tensors

MAX_LOOKED_AT = 100_000  # objects
OWN = "layertap."  # hooks of ours, which hold what they take
OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}
Holder = dict[Any, Any] | list[Any] | types.CellType
Slot = tuple[Holder, Any, Any]  # an entry of a holder: its key there, and its value


class KeptOutputs:
    """The places in a module tree, in what its own hooks hold and in context variables where tensors are kept."""

    def __init__(self, root: nn.Module, *, restores: bool) -> None:
        """``restores``: whether ``restore`` is to put originals back, which are held until then."""
        self._root = root
        self._undo: list[Slot] | None = [] if restores else None
        # Of what is kept already nothing is a call's own output.
        earlier = (tensor for _, _, value in self._list_slots() for tensor in _own(value))
        self._earlier = {id(tensor): weakref.ref(tensor) for tensor in earlier}
        self._originals: list[weakref.ref[Tensor]] = []

    def replace(self, original: Tensor, changed: Tensor, arguments: object) -> None:
        """Have a call's changed output wherever the call has kept its original one.

        Nothing is done where that is one of its ``arguments``, or was kept before: others hold it rightly.
        """
        earlier = self._earlier.get(id(original), lambda: None)()
        if earlier is original or any(each is original for each in _own(arguments)):
            return
        self._originals.append(weakref.ref(original))
        for holder, key, value in list(self._list_slots()):
            if any(each is original for each in _own(value)):
                _put(holder, key, _substitute(value, original, changed))
                if self._undo is not None:
                    self._undo.append((holder, key, value))

    def restore(self) -> None:
        """Have originals again where they are kept still: a later forward may read them."""
        for holder, key, value in self._undo or ():
            _put(holder, key, value)

    def has_lost_any(self) -> bool:
        """Whether an original is still held, somewhere else: whoever reads it there sees no change."""
        return any(each() is not None for each in self._originals)

    def _list_slots(self) -> Iterator[Slot]:
        """All entries that are tensors, or tuples, which can't be written to."""
        modules = [*self._root.modules()]
        hooks = chain.from_iterable(
            chain(each._forward_hooks.values(), each._forward_pre_hooks.values()) for each in modules
        )
        own = (hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(OWN))
        rest: list[object] = [*modules, *own, *contextvars.copy_context().values()]
        seen: set[int] = set()
        while rest and len(seen) < MAX_LOOKED_AT:
            holder = rest.pop()
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            for slot in _open(holder):
                if isinstance(slot[2], (Tensor, tuple)):
                    yield slot
                elif not isinstance(slot[2], (str, int, float, type, types.ModuleType)) and slot[2] is not None:
                    rest.append(slot[2])


def _open(holder: Any) -> Iterator[Slot]:
    """What an object holds."""
    if isinstance(holder, nn.Module):
        for name, value in vars(holder).items():
            if name not in OF_TORCH:
                yield vars(holder), name, value
    elif isinstance(holder, dict):
        yield from ((holder, key, value) for key, value in holder.items())
    elif isinstance(holder, list):
        yield from ((holder, index, value) for index, value in enumerate(holder))
    elif isinstance(holder, types.FunctionType):
        for cell in holder.__closure__ or ():
            try:
                yield cell, None, cell.cell_contents
            except ValueError:  # not filled yet
                continue
    elif isinstance(holder, (types.MethodType, functools.partial)):
        yield [], 0, holder.__self__ if isinstance(holder, types.MethodType) else [holder.func, *holder.args]
    elif hasattr(holder, "__dict__") and not isinstance(holder, Tensor):
        yield from ((vars(holder), name, value) for name, value in vars(holder).items())


def _put(holder: Holder, key: Any, value: object) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, dict) or key < len(holder):
        holder[key] = value


def _own(value: object) -> Iterator[Tensor]:
    return (tensor for _, tensor in iterate_tensors(value))


def _substitute(value: Any, original: Tensor, changed: Tensor) -> Any:
    if isinstance(value, tuple):
        items = [_substitute(item, original, changed) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return changed if value is original else value

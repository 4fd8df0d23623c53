"""Outputs that a model keeps on the side, ``self.skip = out`` or gathered by its hooks: replaced with the output."""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from layertap.models.hooks.tensor_tree import iterate_tensors, replace_tensor

MAX_LOOKED_AT = 100_000  # objects
OWN = "layertap."  # modules of our hooks, which hold tensors too
OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}
ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
Put = Callable[[Any, Any, Any], object]
Slot = tuple[Put, Any, Any, Any]  # an entry: how it is replaced, its container, key and value


class KeptOutputs:
    """Tensors that are kept in a module tree, by its own hooks, or in context variables."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._earlier = WeakIdKeyDictionary()  # nothing of these is a call's own
        for *_, value in self._list_slots():
            for _, tensor in iterate_tensors(value):
                self._earlier[tensor] = None
        self._originals: list[weakref.ref[Tensor]] = []

    def replace(self, original: Tensor, changed: Tensor, arguments: object) -> None:
        """Replace a call's original output wherever the call has kept it.

        Nothing is done if the original is one of its ``arguments`` or was kept before: others hold it rightly.
        """
        if original in self._earlier or any(each is original for _, each in iterate_tensors(arguments)):
            return
        self._originals.append(weakref.ref(original))
        for put, holder, key, value in list(self._list_slots()):
            new = value
            for path, tensor in iterate_tensors(value):
                new = replace_tensor(new, path, changed) if tensor is original else new
            if new is not value:
                put(holder, key, new)

    def has_lost_any(self) -> bool:
        """Whether an original is still held somewhere else, where the model may read it unchanged."""
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
            if id(held) in seen:
                continue
            seen.add(id(held))
            put, holder, items = _open(held)
            for key, value in items:
                kind = type(value)
                if kind in ATOMS or key in OF_TORCH or (kind is tuple and all(type(each) in ATOMS for each in value)):
                    continue
                if isinstance(value, (Tensor, tuple)):
                    yield put, holder, key, value
                else:
                    rest.append(value)


def _open(value: Any) -> tuple[Put, Any, Iterable[tuple[Any, Any]]]:
    """How an entry of an object is replaced, in which container, and all entries.

    References of a function are in a list of ours: these are not replaced.
    """
    if isinstance(value, types.CellType):  # it may be filled later
        return setattr, value, [("cell_contents", value.cell_contents)] if value != types.CellType() else ()
    if isinstance(value, types.FunctionType):
        named = map(value.__globals__.get, value.__code__.co_names)
        value = [*(each for each in named if isinstance(each, (dict, list))), *(value.__closure__ or ())]
    elif isinstance(value, types.MethodType):
        value = [value.__self__]
    elif isinstance(value, functools.partial):
        value = [value.func, *value.args]
    elif not isinstance(value, (dict, list, deque, type, types.ModuleType)):
        value = getattr(value, "__dict__", {})
    if isinstance(value, (list, deque)):
        return setitem, value, enumerate(value)
    return setitem, value, value.items() if isinstance(value, dict) else ()

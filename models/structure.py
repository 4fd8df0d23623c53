"""Tensors inside structured values: what modules take and return, leaf by leaf.

A leaf's path is the chain of keys that leads to it: ``()`` for a bare tensor, ``("logits",)`` in a dictionary, a
named tuple or a dataclass, ``("0", "1")`` in nested sequences. Written down: ``[logits]``, ``[0][1]``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Path = tuple[str, ...]


class Named(dict[Path, torch.Tensor]):
    """Tensors whose paths are known already."""


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every dense tensor in a value with its path, in the value's own order; anything else is passed over."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield path, value
        return
    if isinstance(value, Named):
        yield from value.items()
        return
    for key, item in _items(value):
        yield from leaves(item, (*path, key))


def call_value(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What a module was called with, as one value: a lone argument stands for itself, several by index and name.

    Arguments that hold no tensor (flags, None) do not count, so ``attn(x, mask=None)`` is simply ``x``.
    """
    named: dict[str, Any] = {str(index): value for index, value in enumerate(args)} | dict(kwargs)
    carrying = {key: value for key, value in named.items() if next(leaves(value), None) is not None}
    if len(carrying) == 1:
        return next(iter(carrying.values()))
    return carrying


def call_with(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], changes: Mapping[Path, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with other tensors at paths of their ``call_value``."""
    named: dict[str, Any] = {str(index): value for index, value in enumerate(args)} | dict(kwargs)
    carrying = [key for key, value in named.items() if next(leaves(value), None) is not None]
    lone: Path = tuple(carrying) if len(carrying) == 1 else ()
    for path, tensor in changes.items():
        key, *rest = (*lone, *path)
        named[key] = with_leaf(named[key], tuple(rest), tensor)
    return tuple(named[str(index)] for index in range(len(args))), {key: named[key] for key in kwargs}


def with_leaf(value: Any, path: Path, tensor: torch.Tensor) -> Any:
    """A value with another tensor at a path; what lies around it is copied, and of the kind it was."""
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        name = next(name for name in value if str(name) == key)
        copied: Any = copy.copy(value)
        copied[name] = with_leaf(value[name], rest, tensor)
        return copied
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        # A frozen one says no to plain assignment. The name is one of the dataclass's own fields.
        name = next(field.name for field in fields(value) if field.name == key)
        object.__setattr__(twin, name, with_leaf(dict(_items(value))[name], rest, tensor))
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        place = value._fields.index(key)
        items = [*value[:place], with_leaf(value[place], rest, tensor), *value[place + 1 :]]
        return type(value)(*items)
    listed = list(value)
    listed[int(key)] = with_leaf(listed[int(key)], rest, tensor)
    return type(value)(listed)


def _items(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield field.name, getattr(value, field.name, None)  # a field may not have been set yet
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield str(index), item

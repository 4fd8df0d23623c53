"""State: buffers, submodules and attributes that forwards change. It is found by comparison, and restored."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from layertap.models.hooks.tensor_tree import find_refused, view_bytes

StateKey = tuple[str, str]  # the name of a module in the tree, and of one of its buffers, submodules or attributes
Namespace = dict[str, Any]
Memo = dict[int, Any]  # of ``copy.deepcopy``

OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # parts, parameters, hooks
SINGLE = (type(None), bool, int, float, complex, str)
PLAIN = (*SINGLE, Tensor)
ABSENT = object()


@dataclass(frozen=True)
class _Value:
    """A saved buffer or attribute: the dictionary that holds it, the object itself, and a copy of its value."""

    namespace: Namespace
    value: object
    copy: object


class ModuleState:
    """A snapshot of the buffers, submodules and plain attributes of a module tree.

    Plain attributes are numbers, strings, tensors and containers of these. Submodules are saved by identity.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        memo: Memo = {}
        self._values = {key: _Value(*held, _copy(held[1], memo)) for key, held in _iterate_state(module)}

    def find_changes(self) -> tuple[StateKey, ...]:
        """State that was changed, added or removed; nothing inside replaced or new submodules."""
        now = dict(_iterate_state(self._module))
        others = tuple(f"{'.'.join(filter(None, key))}." for key in self.find_other_parts())
        return tuple(
            key
            for key in dict.fromkeys([*self._values, *now])
            if not f"{key[0]}.".startswith(others) and self._is_changed(key, now)
        )

    def find_other_parts(self) -> tuple[StateKey, ...]:
        """Submodules that were replaced: some modules create new ones for inputs of another length."""
        now = dict(_iterate_state(self._module))
        parts = (key for key, held in self._values.items() if isinstance(held.value, nn.Module))
        return tuple(key for key in parts if key in now and now[key][1] is not self._values[key].value)

    def _is_changed(self, key: StateKey, now: Mapping[StateKey, tuple[Namespace, object]]) -> bool:
        if key not in self._values:
            return not isinstance(now[key][1], nn.Module)  # created in the first forward, it stays
        return key not in now or not _is_same(self._values[key].copy, now[key][1])

    def put_back(self, keys: Iterable[StateKey]) -> None:
        """Restore the values of these keys in the same objects; remove new ones."""
        for name, attribute in keys:
            earlier = self._values.get((name, attribute))
            if earlier is None:
                _remove(self._module.get_submodule(name), attribute)
                continue
            value = earlier.value
            if isinstance(value, Tensor) and isinstance(earlier.copy, Tensor) and not _is_same(earlier.copy, value):
                value.copy_(earlier.copy)
            elif not isinstance(value, Tensor):
                value = earlier.copy
            earlier.namespace[attribute] = value


@contextmanager
def keep_state(module: nn.Module, keys: Iterable[StateKey]) -> Iterator[None]:
    """Give a forward copies of these buffers and attributes, and restore the originals when it ends.

    The originals are never written to: trees that share them may run in other threads, and a graph may need them.
    """
    originals = [(module.get_submodule(name), attribute) for name, attribute in keys]
    saved = [(part, attribute, *_find(part, attribute)) for part, attribute in originals]
    memo: Memo = {}
    for _, attribute, namespace, value in saved:
        if value is not ABSENT:
            namespace[attribute] = _copy(value, memo)
    try:
        yield
    finally:
        for part, attribute, namespace, value in saved:
            if value is ABSENT:
                _remove(part, attribute)
            else:
                namespace[attribute] = value


def _iterate_state(module: nn.Module) -> Iterator[tuple[StateKey, tuple[Namespace, object]]]:
    for name, part in module.named_modules():
        for namespace in (part._buffers, part._modules, vars(part)):
            for attribute, value in namespace.items():
                if attribute not in OF_TORCH and (isinstance(value, nn.Module) or _is_plain(value)):
                    yield (name, attribute), (namespace, value)


def _find(part: nn.Module, attribute: str) -> tuple[Namespace, object]:
    namespace = next((each for each in (part._buffers, part._modules) if attribute in each), vars(part))
    return namespace, namespace.get(attribute, ABSENT)


def _remove(part: nn.Module, attribute: str) -> None:
    part._buffers.pop(attribute, None)
    vars(part).pop(attribute, None)


def _is_plain(value: object) -> bool:
    if isinstance(value, SINGLE):  # most are, and walking a tree is slow
        return True
    leaves = tree_leaves(value)
    # Sparse tensors and the like have no bytes to compare.
    return all(isinstance(leaf, PLAIN) for leaf in leaves) and not any(find_refused(leaves))


def _copy(value: object, memo: Memo) -> object:
    """A deep copy; values copied with the same ``memo`` keep sharing what they share."""
    if isinstance(value, SINGLE):
        return value
    with torch.no_grad():
        for leaf in tree_leaves(value):
            if isinstance(leaf, nn.Module):
                memo[id(leaf)] = leaf
            elif isinstance(leaf, Tensor) and id(leaf) not in memo:  # deepcopy refuses tensors with a graph
                memo[id(leaf)] = leaf.clone()
    return copy.deepcopy(value, memo)


def _is_same(one: object, other: object) -> bool:
    (leaves, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    return structure == other_structure and all(_is_same_leaf(*pair) for pair in zip(leaves, others, strict=True))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same_kind = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return same_kind and torch.equal(view_bytes(one), view_bytes(other))  # NaN does not equal itself
    return type(one) is type(other) and bool(one == other or (one != one and other != other))

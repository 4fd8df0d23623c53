"""Tensors inside structured values, which modules take and return, path by path.

A tensor's path is the chain of keys that leads to it: ``()`` for a bare tensor, ``("logits",)`` in a dictionary, a
named tuple or a dataclass, ``("0", "1")`` in nested sequences. Written down: ``[logits]``, ``[0][1]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch

from layertap.models.devices.transfer import is_of_export
from layertap.models.errors import InputError, escape

Path = tuple[str, ...]
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class TensorsByPath(dict[Path, torch.Tensor]):
    """Tensors whose paths are known already."""


def iterate_tensors(value: object, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every dense tensor in a value with its path, in the value's own order; anything else is passed over."""
    return ((path, tensor) for path, tensor in _iterate_all(value, path) if _get_kind(tensor) == "dense")


def find_refused(value: object) -> Iterator[tuple[Path, str]]:
    """The paths of tensors without plain memory, and their kinds in words."""
    return ((path, _get_kind(tensor)) for path, tensor in _iterate_all(value, ()) if _get_kind(tensor) != "dense")


class Arguments(dict[str, Any]):
    """Arguments of a module or function, by index and name; ``parameters`` are the names of positional ones.

    Paths do not name the only argument with tensors: ``attn(x, mask=None)`` is simply ``x``. A sparse tensor counts:
    ``conv(x, adjacency)`` is two values.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameters: tuple[str, ...] = ()) -> None:
        super().__init__({str(index): value for index, value in enumerate(args)} | dict(kwargs))
        self._count = len(args)
        self._parameters = parameters
        with_tensors = [key for key, value in self.items() if any(True for _ in _iterate_all(value, ()))]
        self.lone = with_tensors[0] if len(with_tensors) == 1 else ""

    def get_parameter(self, key: str) -> str:
        """The name of an argument, also where it was passed by its position."""
        index = int(key) if key.isdigit() else len(self._parameters)
        return self._parameters[index] if index < len(self._parameters) else key

    def find_path(self, path: Path, lone: str) -> Path:
        """The path here of an earlier call's tensor; ``lone``: the parameter of that call's lone argument, if any."""
        parameter, rest = (lone, path) if lone else (self.get_parameter(path[0]), path[1:]) if path else ("", path)
        key = next((key for key in self if self.get_parameter(key) == parameter), parameter)
        return rest if key == self.lone else (key, *rest)

    def replace(self, changes: Mapping[Path, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors at some paths."""
        named = dict(self)
        for path, tensor in changes.items():
            key, *rest = (self.lone, *path) if self.lone else path
            named[key] = replace_tensor(named[key], tuple(rest), tensor)
        values = list(named.values())
        return tuple(values[: self._count]), dict(list(named.items())[self._count :])


def get_parameters(module: torch.nn.Module) -> tuple[str, ...]:
    """The names of the positional parameters of a module's class."""
    return _read_parameters(type(module).forward)


@lru_cache
def _read_parameters(forward: Callable[..., object]) -> tuple[str, ...]:
    try:
        parameters = signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in parameters if each.kind in POSITIONAL)[1:]


def replace_tensor(value: Any, path: Path, tensor: torch.Tensor) -> Any:
    """A copy of a value with another tensor at a path; InputError if a container of a model's own can't be copied."""
    if not path:
        return tensor
    items = dict(_iterate_items(value))
    items[path[0]] = replace_tensor(items[path[0]], path[1:], tensor)
    try:
        container = _rebuild(value, path[0], items)
    except Exception:  # a third party's class: whatever its constructor raises
        container = None
    if type(container) is not type(value) or not _has_items(container, items):
        raise InputError(
            f"a {escape(type(value).__name__)} can't be made again with another tensor in it",
            hint="change a layer before it or after it",
        )
    return container


def _rebuild(value: Any, key: str, items: Mapping[str, object]) -> Any:
    """A copy of a container with these items, of which the one at the key is new."""
    kind: Any = type(value)
    if isinstance(value, Mapping):
        name = next(name for name in value if str(name) == key)
        if not isinstance(value, MutableMapping):
            return kind({**value, name: items[key]})
        value = copy.copy(value)
        value[name] = items[key]
    elif is_dataclass(value):
        value = copy.copy(value)
        # A frozen one refuses plain assignment. The name is one of the dataclass's own fields.
        object.__setattr__(value, next(field.name for field in fields(value) if field.name == key), items[key])
    elif isinstance(value, list):
        value = copy.copy(value)
        value[int(key)] = items[key]
    elif hasattr(value, "_fields"):
        return value._make(list(items.values()))
    else:
        return kind(list(items.values()))
    return value


def _has_items(container: object, items: Mapping[str, object]) -> bool:
    present = dict(_iterate_items(container))
    return list(present) == list(items) and all(present[key] is items[key] for key in items)


def _get_kind(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return "sparse" if "sparse" in str(tensor.layout) else "opaque"
    if tensor.is_quantized or tensor.is_meta:
        return "quantized" if tensor.is_quantized else "on the meta device"
    return "wrapped" if _is_wrapped(tensor) else "dense"


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether its numbers are in other tensors: within ``vmap`` and the like, or of a class that computes by itself."""
    if is_of_export(tensor):
        return False
    in_transform: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return in_transform or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _iterate_all(value: object, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, TensorsByPath):
        yield from value.items()
    elif isinstance(value, Arguments) and value.lone:
        yield from _iterate_all(value[value.lone], path)
    else:
        for key, item in _iterate_items(value):
            yield from _iterate_all(item, (*path, key))


def _iterate_items(value: object) -> Iterator[tuple[str, object]]:
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

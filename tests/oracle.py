"""What hooks with immediate copies see, and weights that hide nothing. Knows nothing of the code under test."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Path = tuple[str, ...]
Key = tuple[str, int, Path, str]  # module name ("." for the whole), call, path into the value, site
M = TypeVar("M", bound=nn.Module)


def record(module: nn.Module, *args: Any, **kwargs: Any) -> dict[Key, Tensor]:
    """One forward, and a copy of every tensor that entered or left any module, made before the forward went on.

    Calls of a module are counted in the order in which they begin. The inputs themselves are not written to.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, part in module.named_modules(remove_duplicate=False):
        names[part].append(name or ".")
    seen: dict[Key, Tensor] = {}
    handles = [handle for part, aliases in names.items() for handle in _hooked(part, aliases, seen)]
    try:
        with torch.no_grad():
            module(*_copy(args), **_copy(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def flatten(value: object) -> dict[Path, Tensor]:
    """Tensors by the chain of keys that leads to them."""
    found: dict[Path, Tensor] = {}
    work: list[tuple[Path, object]] = [((), value)]
    while work:
        path, item = work.pop()
        if isinstance(item, Tensor):
            found[path] = item
        else:
            work += [((*path, str(key)), child) for key, child in _children(item)]
    return found


def seeded(module: M, seed: int) -> M:
    """Random parameters and floating buffers, none of them zero or one, of sizes that keep every output finite."""
    generator = torch.Generator().manual_seed(seed)

    def normal(value: Tensor, scale: float) -> Tensor:
        return torch.randn(value.shape, generator=generator) * scale

    with torch.no_grad():
        for name, value in sorted(module.named_parameters()):
            fan_in = math.prod(value.shape[1:])
            if value.ndim < 2 or fan_in == 1:  # norms, biases, layer scales
                value.copy_(normal(value, 0.2) + (0.0 if name.endswith("bias") else 1.0))
            else:
                value.copy_(normal(value, 1 / math.sqrt(fan_in)))
        for name, buffer in sorted(module.named_buffers()):
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
            elif buffer.is_floating_point():
                buffer.copy_(normal(buffer, 0.2))
    return module


def _hooked(part: nn.Module, aliases: list[str], seen: dict[Key, Tensor]) -> Iterator[Any]:
    begun: list[int] = []
    running: list[int] = []

    def store(value: object, call: int, site: str) -> None:
        for path, tensor in flatten(value).items():
            for name in aliases:
                seen[name, call, path, site] = tensor.detach().clone()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun.append(len(begun))
        running.append(begun[-1])
        given = {**{str(index): item for index, item in enumerate(args)}, **kwargs}
        holding = {name: item for name, item in given.items() if flatten(item)}
        store(next(iter(holding.values())) if len(holding) == 1 else holding, running[-1], "input")

    def after(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
        store(output, running.pop(), "output")

    yield part.register_forward_pre_hook(before, with_kwargs=True)
    yield part.register_forward_hook(after, always_call=True)


def _children(item: object) -> list[tuple[object, object]]:
    if isinstance(item, Mapping):
        return list(item.items())
    if dataclasses.is_dataclass(item):
        return [(field.name, getattr(item, field.name, None)) for field in dataclasses.fields(item)]
    if isinstance(item, tuple) and hasattr(item, "_asdict"):
        return list(item._asdict().items())
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    return []


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value


def measure_hsic(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Nguyen et al. 2021, equation 3: the unbiased estimate of HSIC by Song et al. 2012, of linear kernels."""
    count, ones = len(one), np.ones(len(one))
    k, m = one @ one.T, other @ other.T
    np.fill_diagonal(k, 0)
    np.fill_diagonal(m, 0)
    means = (ones @ k @ ones) * (ones @ m @ ones) / ((count - 1) * (count - 2))
    total = np.trace(k @ m) + means - 2 / (count - 2) * (ones @ k @ m @ ones)
    return float(total / (count * (count - 3)))

"""The kinds of hook, one module at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from layertap.models.hooks.attach import ATTACH, count_hooks
from layertap.models.hooks.sites import SITES, Side
from tests.nets import Gate, Recursive

Seen = list[tuple[int, Any]]
KINDS: tuple[Side, ...] = ("output", "input")


def watch(module: nn.Module, site: Side, run: Callable[[], object]) -> Seen:
    """What hooks of a site hand on, tensors copied."""
    seen: Seen = []
    with ExitStack() as stack:
        ATTACH[site](stack, module, lambda call, value: seen.append((call, _copied(value))))
        run()
    assert count_hooks(module) == 0
    return seen


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def test_a_hook_for_each_site() -> None:
    """Every site that a selector can name has its kind of hook, that of its side; functions have one of their own."""
    assert tuple(ATTACH) == (*KINDS, "attention", "sink", "unfused", "function", "changed_function")
    assert {"function", "changed_function"} | {site.side for site in SITES.values()} == set(ATTACH)


def put(module: nn.Module, site: Side, changes: dict[tuple[str, ...], Tensor], *args: Any, **kwargs: Any) -> Any:
    """What a module gives when a hook puts other tensors in place of what it takes or returns."""
    with ExitStack() as stack:
        ATTACH[site](stack, module, lambda call, value: changes)
        return module(*args, **kwargs)


def test_what_is_given_back_goes_on() -> None:
    """Tensors are replaced info by info, by position and by name; what is not named stays."""
    module, x = nn.Tanh(), torch.ones(2)
    assert put(module, "output", {(): x * 5}, x).tolist() == [5, 5]
    assert put(module, "input", {(): x * 0}, x).tolist() == [0, 0]
    assert put(module, "input", {(): x * 0}, input=x).tolist() == [0, 0]
    gate = Gate()
    expected = x * 3 * (x * 4).sigmoid() * 2 + 1
    assert torch.equal(put(gate, "input", {("0",): x * 3, ("gate",): x * 4}, x, gate=x, scale=2.0, bias=x), expected)


def test_calls_are_numbered_as_they_begin() -> None:
    """A module that runs within itself has the same number for a call's input and its output."""
    model = Recursive()
    x = torch.ones(1, 4)
    inputs = watch(model.down, "input", lambda: model(x))
    outputs = watch(model.down, "output", lambda: model(x))
    assert [(call, float(value.mean())) for call, value in inputs] == [(0, 1), (1, 2), (2, 4)]
    assert [(call, float(value.mean())) for call, value in outputs] == [(2, 5), (1, 7), (0, 8)]


def test_count() -> None:
    """Hooks of every kind on every part are counted."""
    inner = nn.Sequential(nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    handles = [
        model.register_forward_hook(print),
        model[0].register_forward_pre_hook(print),
        inner.register_full_backward_hook(print),
        inner[0].register_full_backward_pre_hook(print),
    ]
    assert count_hooks(model) == 4
    for handle in handles:
        handle.remove()
    assert count_hooks(model) == 0

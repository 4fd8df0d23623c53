"""The kinds of hook, one module at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.hooks.attach import ATTACH, count_hooks
from layertap.models.hooks.running_calls import OnCall
from layertap.models.hooks.sites import SITES, Side
from tests.nets import Gate, Recursive, Retries

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
    assert tuple(ATTACH) == (*KINDS, "attention", "sink", "unfused", "function")
    assert {"function"} | {site.side for site in SITES.values()} == set(ATTACH)


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


def test_input_and_output() -> None:
    """The output is what the module returned; the input is what it took, before it wrote over it."""
    module, x = nn.ReLU(inplace=True), torch.tensor([-1.0, 2.0])
    ((call, taken),) = watch(module, "input", lambda: module(x.clone()))
    assert (call, taken.tolist()) == (0, [-1, 2])
    ((call, returned),) = watch(module, "output", lambda: module(x.clone()))
    assert (call, returned.tolist()) == (0, [0, 2])


def test_arguments_by_name() -> None:
    """Arguments come by index and name, and a lone one as itself."""
    gate, x = Gate(), torch.ones(2)
    ((_, value),) = watch(gate, "input", lambda: gate(x, gate=x * 2, scale=3.0))
    assert {key: item.tolist() for key, item in value.items()} == {"0": [1, 1], "gate": [2, 2]}
    act = nn.Tanh()
    ((_, value),) = watch(act, "input", lambda: act(input=x))
    assert value.tolist() == [1, 1]


@pytest.mark.parametrize("site", KINDS)
def test_a_hook_changes_nothing(site: Side) -> None:
    """Whatever is done with what a hook hands on, the forward goes on with the module's own value."""
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    plain = module(x)
    results: list[Tensor] = []
    watch(module, site, lambda: results.append(module(x)))
    assert torch.equal(results[0], plain)


def test_calls_are_numbered_as_they_begin() -> None:
    """A module that runs within itself has the same number for a call's input and its output."""
    model = Recursive()
    x = torch.ones(1, 4)
    inputs = watch(model.down, "input", lambda: model(x))
    outputs = watch(model.down, "output", lambda: model(x))
    assert [(call, float(value.mean())) for call, value in inputs] == [(0, 1), (1, 2), (2, 4)]
    assert [(call, float(value.mean())) for call, value in outputs] == [(2, 5), (1, 7), (0, 8)]


def test_a_call_that_fails_counts() -> None:
    """A call whose exception the model catches has its number, and no value comes out of it."""
    model = Retries()
    x = torch.ones(1, 5)
    assert [call for call, _ in watch(model.picky, "input", lambda: model(x))] == [0, 1]
    outputs = watch(model.picky, "output", lambda: model(x))
    assert [(call, value is None) for call, value in outputs] == [(0, True), (1, False)]


def test_hooks_of_others() -> None:
    """Ours come after a user's: they see the value that the user's hooks made, and leave these in place."""
    module, x = nn.Tanh(), torch.zeros(2)
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    handle = module.register_forward_hook(lambda _, args, output: output * 100)
    seen: Seen = []
    with ExitStack() as stack:
        for site in KINDS:
            ATTACH[site](stack, module, lambda call, value: seen.append((call, _copied(value))))
        module(x)
    assert [value.tolist() for _, value in seen] == [[1, 1], (torch.tensor([1.0, 1.0]).tanh() * 100).tolist()]
    assert count_hooks(module) == 2
    handle.remove()
    assert count_hooks(module) == 1


def test_hooks_go_where_the_forward_raises() -> None:
    """An exception out of the forward, or out of a hook's own work, leaves no hook."""

    def attach(site: Side, take: OnCall, x: Tensor) -> None:
        with ExitStack() as stack:
            ATTACH[site](stack, module, take)
            module(x)

    def fail(call: int, value: object) -> None:
        raise RuntimeError("no memory")

    module = nn.Linear(3, 2)
    for site in KINDS:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            attach(site, lambda call, value: None, torch.ones(1, 4))
        with pytest.raises(RuntimeError, match="no memory"):
            attach(site, fail, torch.ones(1, 3))
        assert count_hooks(module) == 0


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

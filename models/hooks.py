"""The kinds of hook: how each attaches to a module and what it hands on.

A hook of ours only looks. It returns None (anything else would replace the output), and the value it hands on must be
read or copied at once: in-place operations later in the forward write to the same memory. Calls of a module are
numbered in the order in which they begin, so that a call has the same number at each site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count as numbers
from typing import Any

from torch import nn

from models.points import Site
from models.structure import call_value

Take = Callable[[int, object], None]
Attach = Callable[[ExitStack, nn.Module, Take], None]


def _on_output(stack: ExitStack, module: nn.Module, take: Take) -> None:
    calls, running = numbers(), list[int]()

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.append(next(calls))

    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if running:
            take(running.pop(), output)

    stack.callback(module.register_forward_pre_hook(begin).remove)
    # Also after a call that raised, in a model that catches it: the call around it would get its number otherwise.
    stack.callback(module.register_forward_hook(end, always_call=True).remove)


def _on_input(stack: ExitStack, module: nn.Module, take: Take) -> None:
    calls = numbers()

    # A pre-hook: after an in-place module its input is already its output.
    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(next(calls), call_value(args, kwargs))

    stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)


def count(module: nn.Module) -> int:
    """How many hooks of any kind are on a module and everything in it."""
    return sum(
        len(hooks)
        for part in module.modules()
        for hooks in (
            part._forward_hooks,
            part._forward_pre_hooks,
            part._backward_hooks,
            part._backward_pre_hooks,
        )
    )


SITES: Mapping[Site, Attach] = {
    "output": _on_output,
    "input": _on_input,
}

"""The kinds of hook: how each attaches to a module and what it hands on.

What it hands on must be read or copied at once: in-place operations later in the forward write to the same memory.
A hook of ours returns None (anything else replaces the value), unless whoever took it gives back what to put in its
place, leaf by leaf. Calls of a module are numbered in the order in which they begin, so that a call has the same number
on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count as numbers
from typing import Any

from torch import Tensor, nn

from models.points import Side
from models.structure import Path, call_value, call_with, with_leaf

Changes = Mapping[Path, Tensor]
Take = Callable[[int, object], Changes | None]
Attach = Callable[[ExitStack, nn.Module, Take], None]


def _on_output(stack: ExitStack, module: nn.Module, take: Take) -> None:
    calls, running = numbers(), list[int]()

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.append(next(calls))

    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        changes = take(running.pop(), output) if running else None
        if not changes:
            return None
        for path, tensor in changes.items():
            output = with_leaf(output, path, tensor)
        return output

    stack.callback(module.register_forward_pre_hook(begin).remove)
    # Also after a call that raised, in a model that catches it: the call around it would get its number otherwise.
    stack.callback(module.register_forward_hook(end, always_call=True).remove)


def _on_input(stack: ExitStack, module: nn.Module, take: Take) -> None:
    calls = numbers()

    # A pre-hook: after an in-place module its input is already its output.
    def begin(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        changes = take(next(calls), call_value(args, kwargs))
        return call_with(args, kwargs, changes) if changes else None

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


ATTACH: Mapping[Side, Attach] = {
    "output": _on_output,
    "input": _on_input,
}

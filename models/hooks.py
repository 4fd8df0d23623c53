"""The kinds of hook: how each attaches to a module and what it hands on.

What it hands on must be read or copied at once: in-place operations later in the forward write to the same memory.
A hook of ours returns None (anything else replaces the value), unless whoever took it gives back what to put in its
place, leaf by leaf. Calls of a module are numbered in the order in which they begin, so that a call has the same number
on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count as numbers
from typing import Any

from torch import Tensor, nn

from models.points import Side
from models.structure import Path, call_value, call_with, leaves, with_leaf

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
    calls, running = numbers(), list[_Handed]()

    # A pre-hook: after an in-place module its input is already its output.
    def begin(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running.append(_Handed({}))
        changes = take(next(calls), call_value(args, kwargs))
        if not changes:
            return None
        came = dict(leaves(call_value(args, kwargs)))
        running[-1] = _Handed({path: (came[path], tensor, _version(tensor)) for path, tensor in changes.items()})
        return call_with(args, kwargs, changes)

    # Whoever called it may rely on what it does to its input.
    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for came, handed, version in running.pop().tensors.values() if running else ():
            if _version(handed) != version:
                came.copy_(handed)

    stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(end, always_call=True).remove)


@dataclass(frozen=True)
class _Handed:
    """What one call got in place of its tensors: the one that came, its stand-in, the latter's version."""

    tensors: Mapping[Path, tuple[Tensor, Tensor, int]]


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; those of a model's own inference mode do not tell."""
    return 0 if tensor.is_inference() else tensor._version


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

"""The kinds of hook: how each attaches to a module and what it hands on.

A hook of ours only looks. It returns None (anything else would replace the output), and the value it hands on must be
read or copied at once: in-place operations later in the forward write to the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from models.points import Site
from models.structure import call_value

Take = Callable[[object], None]


def _on_output(module: nn.Module, take: Take) -> RemovableHandle:
    def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        take(output)

    return module.register_forward_hook(hook)


def _on_input(module: nn.Module, take: Take) -> RemovableHandle:
    # A pre-hook: after an in-place module its input is already its output.
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(call_value(args, kwargs))

    return module.register_forward_pre_hook(hook, with_kwargs=True)


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


SITES: Mapping[Site, Callable[[nn.Module, Take], RemovableHandle]] = {
    "output": _on_output,
    "input": _on_input,
}

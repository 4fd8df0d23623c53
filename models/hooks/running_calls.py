"""Calls of a module as hooks see them: numbered in the order in which they begin, with the parts that run inside.

A call has the same number whatever looks at it. Scripted modules refuse hooks by their own methods, and run those that
nn.Module's add; their parts run none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from layertap.models.devices.memory import is_device_error
from layertap.models.errors import HookError, LayertapError
from layertap.models.hooks.kept import KeptOutputs
from layertap.models.hooks.tensor_tree import Path
from layertap.models.points import Site

T = TypeVar("T")
Changes = Mapping[Path, Tensor]
# Gets the number of a module's call, a function in it or "", a site and the value there; gives replacements by path.
OnCall = Callable[[int, str, Site, object], Changes | None]
ArgsKwargs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False)
class RunningCall:
    """A call of a module that runs now, for one kind of hook."""

    stack: ExitStack  # ends with the hooks, also where the forward is left midway
    module: nn.Module
    number: int
    on_call: OnCall
    kept: KeptOutputs | None  # what the model keeps on the side
    heads_around: Sequence[int]  # how many heads the module has for which this one computes attention
    depth: int = 0  # how many parts run within it

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgsKwargs | None:
        """The call begins; returns replacements of its arguments, if any."""

    def end(self, output: object) -> object:
        """The call ends; returns a replacement of its output, if any. The output is None also after an error."""

    def enter_part(self) -> None:
        """A part begins within this call."""
        self.depth += 1

    def leave_part(self) -> None:
        """A part ends within this call."""
        self.depth -= 1


def attach_calls(
    stack: ExitStack,
    module: nn.Module,
    on_call: OnCall,
    *,
    kind: Callable[[ExitStack, nn.Module, int, OnCall, KeptOutputs | None, Sequence[int]], RunningCall],
    find_parts: Callable[[nn.Module], Iterable[nn.Module]] = lambda module: (),
    ends_first: bool = False,
    kept: KeptOutputs | None = None,
    heads_around: Sequence[int] = (),
) -> None:
    """Have every call of a module seen as one of a kind, until the stack ends.

    The innermost call hears of its parts too; ``ends_first``: it ends before other hooks see the output.
    """
    numbers, running, on_call = count(), list[RunningCall](), partial(run_own, on_call)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgsKwargs | None:
        running.append(kind(stack, module, next(numbers), on_call, kept, heads_around))
        return running[-1].begin(args, kwargs)

    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        return running.pop().end(output) if running else None

    def enter_part(part: nn.Module, args: tuple[Any, ...]) -> None:
        for call in running[-1:]:
            call.enter_part()

    def leave_part(part: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for call in running[-1:]:
            call.leave_part()

    stack.callback(nn.Module.register_forward_pre_hook(module, begin, with_kwargs=True).remove)
    # Also after a call that raised, in a model that catches it: the call around it would get its number otherwise.
    stack.callback(nn.Module.register_forward_hook(module, end, always_call=True, prepend=ends_first).remove)
    for part in find_parts(module):
        stack.callback(nn.Module.register_forward_pre_hook(part, enter_part, prepend=True).remove)
        stack.callback(nn.Module.register_forward_hook(part, leave_part, always_call=True).remove)


def run_own(function: Callable[..., T], *args: Any) -> T:
    """Run layertap's own code in a model's forward or backward, outside of its autocast.

    HookError if it raises anything but a LayertapError or a device's error.
    """
    try:
        if not torch._C._is_any_autocast_enabled():
            return function(*args)
        with torch._C._DisableAutocast():
            return function(*args)
    except Exception as error:
        if isinstance(error, LayertapError) or is_device_error(error):
            raise
        raise HookError(f"a hook raised {type(error).__name__}") from error


def get_version(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for those of inference mode, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version

"""The kinds of hook: how each attaches to a module and what it hands on.

What it hands on must be read or copied at once: in-place operations later in the forward write to the same memory.
A hook of ours returns None (anything else replaces the value), unless whoever took it gives back what to put in its
place, leaf by leaf. Calls of a module are numbered in the order in which they begin, so that a call has the same number
on each side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import count as numbers
from typing import Any

from torch import Tensor, nn

from layertap.models.errors import InputError
from layertap.models.hooks import attention
from layertap.models.hooks.tensor_tree import (
    Path,
    TensorsByPath,
    iterate_tensors,
    pack_arguments,
    replace_arguments,
    replace_tensor,
)
from layertap.models.selection.hook_points import Side

Changes = Mapping[Path, Tensor]
OnCall = Callable[[int, object], Changes | None]
Attach = Callable[[ExitStack, nn.Module, OnCall], None]


def _on_output(stack: ExitStack, module: nn.Module, take: OnCall) -> None:
    calls, running = numbers(), list[int]()

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.append(next(calls))

    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        changes = take(running.pop(), output) if running else None
        if not changes:
            return None
        for path, tensor in changes.items():
            output = replace_tensor(output, path, tensor)
        return output

    stack.callback(module.register_forward_pre_hook(begin).remove)
    # Also after a call that raised, in a model that catches it: the call around it would get its number otherwise.
    stack.callback(module.register_forward_hook(end, always_call=True, prepend=_is_collected(module)).remove)


def _is_collected(module: nn.Module) -> bool:
    """Whether a model's own hook gathers what the module returns, for a later part of the same forward to use.

    Such a hook only looks. It must see what goes on, or that part would use a value that nobody changed or anchored.
    """
    return any(getattr(hook, "__module__", None) == COLLECTORS for hook in module._forward_hooks.values())


def _on_input(stack: ExitStack, module: nn.Module, take: OnCall) -> None:
    calls, running = numbers(), list[_CallTensors]()

    # A pre-hook: after an in-place module its input is already its output.
    def begin(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running.append(_CallTensors({}))
        changes = take(next(calls), pack_arguments(args, kwargs))
        if not changes:
            return None
        came = dict(iterate_tensors(pack_arguments(args, kwargs)))
        running[-1] = _CallTensors({path: (came[path], tensor, _version(tensor)) for path, tensor in changes.items()})
        return replace_arguments(args, kwargs, changes)

    # Whoever called it may rely on what it does to its input.
    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for came, handed, version in running.pop().tensors.values() if running else ():
            if _version(handed) != version:
                came.copy_(handed)

    stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(end, always_call=True).remove)


@dataclass(frozen=True)
class _CallTensors:
    """What one call got in place of its tensors: the one that came, its stand-in, the latter's version."""

    tensors: Mapping[Path, tuple[Tensor, Tensor, int]]


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; those of a model's own inference mode do not tell."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class _RunningCall:
    """A call of a module whose attention is wanted; ``inside`` counts the parts with attention of their own."""

    number: int
    mode: ExitStack = field(default_factory=ExitStack)
    inside: int = 0
    found: list[Tensor] = field(default_factory=list)
    error: InputError | None = None


def _on_attention(stack: ExitStack, module: nn.Module, take: OnCall) -> None:
    def watched(call: _RunningCall) -> attention.AttentionObserver:
        def see(sight: attention.AttentionEvent) -> None:
            shape = attention.unfold_weights(sight.shape, module)
            if call.inside or call.error or shape is None:
                return
            try:
                call.found.append(sight.weights().reshape(shape))
            except InputError as error:  # not through the model, which may catch it
                call.error = error

        return attention.AttentionObserver(see)

    def done(call: _RunningCall) -> None:
        if call.error is not None:
            raise call.error
        tensors = TensorsByPath()
        for place, weights in enumerate(call.found):
            tensors |= _placed(place, weights)
        take(call.number, tensors)

    _around(stack, module, watched, done)


def _on_unfused(stack: ExitStack, module: nn.Module, take: OnCall) -> None:
    def unfused(call: _RunningCall) -> attention.UnfusedAttention:
        def anchor(weights: Tensor) -> Tensor:
            shape = attention.unfold_weights(tuple(weights.shape), module)
            if shape is None:
                return weights
            call.found.append(weights.reshape(shape))
            changes = take(call.number, _placed(len(call.found) - 1, call.found[-1]))
            return next(iter(changes.values())).reshape(weights.shape) if changes else weights

        return attention.UnfusedAttention(anchor, lambda: call.inside > 0)

    _around(stack, module, unfused, lambda call: None)


def _placed(place: int, weights: Tensor) -> TensorsByPath:
    """One attention of a call by path: its number, the first also none, as it is where a call has only one."""
    return TensorsByPath({(str(place),): weights} if place else {(): weights, ("0",): weights})


def _around(
    stack: ExitStack,
    module: nn.Module,
    mode: Callable[[_RunningCall], AbstractContextManager[object]],
    done: Callable[[_RunningCall], None],
) -> None:
    """Put a mode around a module's own forward, and nothing else."""
    calls, running = numbers(), list[_RunningCall]()

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        call = _RunningCall(next(calls))
        # A forward that is left midway must find modes closed in the order in which they were opened.
        stack.callback(call.mode.close)
        call.mode.enter_context(mode(call))
        running.append(call)

    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if running:
            call = running.pop()
            call.mode.close()
            if output is not None:  # as it is after a call that raised
                done(call)

    def into(part: nn.Module, args: tuple[Any, ...]) -> None:
        for call in running[-1:]:
            call.inside += 1

    def out_of(part: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for call in running[-1:]:
            call.inside -= 1

    stack.callback(module.register_forward_pre_hook(begin).remove)
    stack.callback(module.register_forward_hook(end, always_call=True).remove)
    for part in attention.find_nested_attention(module):
        stack.callback(part.register_forward_pre_hook(into).remove)
        stack.callback(part.register_forward_hook(out_of, always_call=True).remove)


def count_hooks(module: nn.Module) -> int:
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


COLLECTORS = "transformers.utils.output_capturing"
ATTACH: Mapping[Side, Attach] = {
    "output": _on_output,
    "input": _on_input,
    "attention": _on_attention,
    "unfused": _on_unfused,
}

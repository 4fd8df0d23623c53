"""The kinds of hook, a function and a row of a table for each side: how it attaches, what its callback gets.

What a callback gets must be read or copied at once: in-place operations later in the forward write to the same memory.
A hook of ours returns None (anything else replaces the value), unless the callback gives back what to put in its place,
path by path. Calls of a module are numbered in the order in which they begin, so that a call has the same number on
each side. Scripted modules refuse hooks by their own methods, and run those that nn.Module's add; their parts run none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn

from layertap.models.errors import InputError, escape
from layertap.models.hooks import attention
from layertap.models.hooks.functions import attach_functions
from layertap.models.hooks.sites import Side
from layertap.models.hooks.tensor_tree import (
    Path,
    TensorsByPath,
    iterate_tensors,
    pack_arguments,
    replace_arguments,
    replace_tensor,
)

Changes = Mapping[Path, Tensor]
OnCall = Callable[[int, object], Changes | None]  # gets the number of a call and its value
Attach = Callable[[ExitStack, nn.Module, OnCall], None]  # until the stack ends


class StopForward(BaseException):
    """Nothing is pending: leave the forward. Not an Exception, which models catch."""


def _attach_output(stack: ExitStack, module: nn.Module, on_call: OnCall) -> None:
    calls, running = count(), list[int]()

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.append(next(calls))

    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        changes = on_call(running.pop(), output) if running else None
        if not changes:
            return None
        for path, tensor in changes.items():
            output = replace_tensor(output, path, tensor)
        return output

    stack.callback(nn.Module.register_forward_pre_hook(module, begin).remove)
    # Also after a call that raised, in a model that catches it: the call around it would get its number otherwise.
    stack.callback(
        nn.Module.register_forward_hook(module, end, always_call=True, prepend=_has_collector(module)).remove
    )


def _has_collector(module: nn.Module) -> bool:
    """Whether a model's own hook gathers what the module returns, for a later part of the same forward to use.

    Such a hook only looks. It must see what goes on, or that part would use a value that nobody changed or anchored.
    """
    return any(getattr(hook, "__module__", None) == COLLECTORS for hook in module._forward_hooks.values())


def _attach_input(stack: ExitStack, module: nn.Module, on_call: OnCall) -> None:
    calls, running = count(), list[list[_ReplacedTensor]]()

    # A pre-hook: after an in-place module its input is already its output.
    def begin(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        running.append([])
        changes = on_call(next(calls), pack_arguments(args, kwargs))
        if not changes:
            return None
        tensors = dict(iterate_tensors(pack_arguments(args, kwargs)))
        running[-1] = [_ReplacedTensor(tensors[path], tensor, _get_version(tensor)) for path, tensor in changes.items()]
        return replace_arguments(args, kwargs, changes)

    # Whoever called it may rely on what it does to its input.
    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for each in running.pop() if running else ():
            if _get_version(each.replacement) != each.version:
                each.original.copy_(each.replacement)

    stack.callback(nn.Module.register_forward_pre_hook(module, begin, with_kwargs=True).remove)
    stack.callback(nn.Module.register_forward_hook(module, end, always_call=True).remove)


@dataclass(frozen=True)
class _ReplacedTensor:
    """A tensor that a call was given, the one that it got in its place, and the latter's version then."""

    original: Tensor
    replacement: Tensor
    version: int


def _get_version(tensor: Tensor) -> int:
    """How often a tensor was written to; those of a model's own inference mode do not tell."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class _RunningCall:
    """A call of a module whose attention is wanted; ``depth`` counts running parts with attention of their own."""

    number: int
    mode: ExitStack = field(default_factory=ExitStack)
    depth: int = 0
    unfused: attention.UnfusedAttention | None = None
    weights: list[Tensor] = field(default_factory=list)
    sinks: list[attention.Sinks] = field(default_factory=list)
    error: InputError | None = None


def _attach_attention(stack: ExitStack, module: nn.Module, on_call: OnCall, *, of_sinks: bool = False) -> None:
    def make_observer(call: _RunningCall) -> attention.AttentionObserver:
        def observe(event: attention.AttentionEvent) -> None:
            shape = attention.unfold_weights(event.shape, module)
            if call.depth or call.error or shape is None:
                return
            try:
                with attention.disable_observers():
                    call.weights.append(event.weights().reshape(shape))
                call.sinks.append(event.sinks)
            except InputError as error:  # not through the model, which may catch it
                call.error = error

        return attention.AttentionObserver(observe)

    def finish(call: _RunningCall, output: object) -> None:
        if call.error is not None:
            raise call.error
        tensors = TensorsByPath()
        for index, (weights, sinks) in enumerate(zip(call.weights, call.sinks, strict=True)):
            keys = weights.shape[-1] - sinks.count
            tensors |= _label_weights(index, weights[..., keys:] if of_sinks else weights[..., :keys])
        on_call(call.number, tensors)

    _attach_mode(stack, module, make_observer, finish)


def _attach_unfused(stack: ExitStack, module: nn.Module, on_call: OnCall) -> None:
    def make_mode(call: _RunningCall) -> AbstractContextManager[object]:
        def anchor(weights: Tensor) -> Tensor:
            shape = attention.unfold_weights(tuple(weights.shape), module)
            if shape is None:
                return weights
            call.weights.append(weights.reshape(shape))
            changes = on_call(call.number, _label_weights(len(call.weights) - 1, call.weights[-1]))
            return next(iter(changes.values())).reshape(weights.shape) if changes else weights

        def observe(event: attention.AttentionEvent) -> None:
            if not (mode.is_running or call.depth) and attention.unfold_weights(event.shape, module) is not None:
                kind = escape(type(module).__name__)
                call.error = InputError(
                    f"the attention of this {kind} is computed where its weights can't be reached",
                    hint="ask for the layer's output, or change that",
                )

        def check() -> None:  # also where the forward is left midway: nothing of it is what was asked for
            if call.error is not None:
                raise call.error

        mode = call.unfused = attention.UnfusedAttention(anchor, lambda: call.depth > 0)
        stack.callback(check)
        modes = ExitStack()
        modes.enter_context(attention.AttentionObserver(observe))
        modes.enter_context(mode)
        return modes

    def finish(call: _RunningCall, output: object) -> object:
        return call.unfused.settle(output) if call.unfused is not None else None

    _attach_mode(stack, module, make_mode, finish)


def _label_weights(index: int, weights: Tensor) -> TensorsByPath:
    """One attention of a call by path: its number, the first also none, as it is where a call has only one."""
    return TensorsByPath({(str(index),): weights} if index else {(): weights, ("0",): weights})


def _attach_mode(
    stack: ExitStack,
    module: nn.Module,
    make_mode: Callable[[_RunningCall], AbstractContextManager[object]],
    finish: Callable[[_RunningCall, object], object],
) -> None:
    """Put a mode around a module's own forward, and nothing else; ``finish`` may give another output."""
    calls, running = count(), list[_RunningCall]()

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        call = _RunningCall(next(calls))
        # A forward that is left midway must find modes closed in the order in which they were opened.
        stack.callback(call.mode.close)
        call.mode.enter_context(make_mode(call))
        running.append(call)

    def end(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
        call = running.pop() if running else None
        if call is not None:
            call.mode.close()
        # None after a call that raised
        return None if call is None or output is None else finish(call, output)

    def enter_part(part: nn.Module, args: tuple[Any, ...]) -> None:
        for call in running[-1:]:
            call.depth += 1

    def leave_part(part: nn.Module, args: tuple[Any, ...], output: object) -> None:
        for call in running[-1:]:
            call.depth -= 1

    stack.callback(module.register_forward_pre_hook(begin).remove)
    stack.callback(module.register_forward_hook(end, always_call=True).remove)
    for part in attention.find_nested_attention(module):
        stack.callback(part.register_forward_pre_hook(enter_part).remove)
        stack.callback(part.register_forward_hook(leave_part, always_call=True).remove)


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
    "output": _attach_output,
    "input": _attach_input,
    "attention": _attach_attention,
    "sink": partial(_attach_attention, of_sinks=True),
    "unfused": _attach_unfused,
    "function": attach_functions,
}

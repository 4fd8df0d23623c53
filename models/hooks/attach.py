"""The kinds of hook, a class and a table row for each side: how it attaches, what its callback receives.

A callback must read or copy its value at once: later in-place operations in the forward write to the same memory.
A hook of ours returns None (anything else replaces the value), unless the callback gives back what to put in its place,
path by path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from layertap.models.errors import InputError, escape
from layertap.models.hooks import attention, tensor_tree
from layertap.models.hooks.functions import ChangedFunctionsCall, FunctionsCall, list_parts, run_unseen
from layertap.models.hooks.kept import KeptOutputs
from layertap.models.hooks.running_calls import Arguments, Changes, OnCall, RunningCall, attach_calls, get_version
from layertap.models.hooks.tensor_tree import Path, TensorsByPath, get_parameters, iterate_tensors, replace_tensor
from layertap.models.points import CallKey, HookKind

T = TypeVar("T")
Location = tuple[
    nn.Module, HookKind, CallKey, Path
]  # of a tensor: a module, a kind of hook on it, a call, a path there
OnModuleCall = Callable[[nn.Module, int, object], None]  # gets the module, the number of its call, and a value
Attach = Callable[[ExitStack, nn.Module, OnCall], None]  # until the stack ends


class StopForward(BaseException):
    """Raised to leave the forward when nothing is pending. Not an Exception, which models catch."""


class ForwardEnded(BaseException):
    """Raised to end a forward that nobody wants any more. Not an Exception, which models catch."""


class _OutputCall(RunningCall):
    def end(self, output: object) -> object:
        changes = self.on_call(self.number, output) or {}
        for path, tensor in changes.items():
            output = replace_tensor(output, path, tensor)
        return output if changes else None


class _KeptOutputCall(_OutputCall):
    """A call whose output the model may also have kept on the side."""

    def __init__(self, kept: KeptOutputs, *call: Any) -> None:
        super().__init__(*call)
        self.kept = kept

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = args, kwargs

    def end(self, output: object) -> object:
        originals, changed = dict(iterate_tensors(output)), super().end(output)
        for path, tensor in iterate_tensors(changed):
            if tensor is not originals[path]:
                self.kept.replace(originals[path], tensor, self.arguments)
        return changed


class _InputCall(RunningCall):
    replaced: Sequence[tuple[Tensor, Tensor, int]] = ()  # what it was given, what it got, and the latter's version then

    # At the beginning: after an in-place module its input is already its output.
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        arguments = tensor_tree.Arguments(args, kwargs, get_parameters(self.module))
        changes = self.on_call(self.number, arguments)
        if not changes:
            return None
        tensors = dict(iterate_tensors(arguments))
        self.replaced = [(tensors[path], tensor, get_version(tensor)) for path, tensor in changes.items()]
        return arguments.replace(changes)

    # Whoever called it may rely on what it does to its input.
    def end(self, output: object) -> None:
        for original, replacement, version in self.replaced:
            if get_version(replacement) != version:
                original.copy_(replacement)


class _AttentionCall(RunningCall):
    """A call whose attention is observed; that of its submodules is not."""

    of_sinks = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.mode = ExitStack()
        self.weights: list[Tensor] = []
        self.sinks: list[attention.Sinks] = []
        self.error: InputError | None = None
        # A forward that is left midway must find modes closed in the order in which they were opened.
        self.stack.callback(self.mode.close)
        self.mode.enter_context(attention.AttentionObserver(self.observe))

    def observe(self, event: attention.AttentionEvent) -> None:
        """Keep weights that are the module's own."""
        shape = attention.unfold_weights(event.shape, self.module)
        if self.depth or self.error or shape is None:
            return
        try:
            with attention.disable_observers():
                self.weights.append(event.weights().reshape(shape))
            self.sinks.append(event.sinks)
        except InputError as error:  # not through the model, which may catch it
            self.error = error

    def end(self, output: object) -> object:
        self.mode.close()
        return None if output is None else self.finish(output)

    def finish(self, output: object) -> object:
        """The call has returned, and no mode is on any more."""
        if self.error is not None:
            raise self.error
        tensors = TensorsByPath()
        for index, (weights, sinks) in enumerate(zip(self.weights, self.sinks, strict=True)):
            keys = weights.shape[-1] - sinks.count
            tensors |= _label_weights(index, weights[..., keys:] if self.of_sinks else weights[..., :keys])
        self.on_call(self.number, tensors)
        return None


class _SinkCall(_AttentionCall):
    of_sinks = True


class _UnfusedCall(_AttentionCall):
    """A call whose attention runs by its plain formula, so that its weights can be replaced and differentiated."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.callback(self.check)
        super().begin(args, kwargs)
        self.unfused = attention.UnfusedAttention(self.anchor, lambda: self.depth > 0)
        self.mode.enter_context(self.unfused)

    def anchor(self, weights: Tensor) -> Tensor:
        """The weights that go on in place of these."""
        shape = attention.unfold_weights(tuple(weights.shape), self.module)
        if shape is None:
            return weights
        self.weights.append(weights.reshape(shape))
        changes = self.on_call(self.number, _label_weights(len(self.weights) - 1, self.weights[-1]))
        return next(iter(changes.values())).reshape(weights.shape) if changes else weights

    def observe(self, event: attention.AttentionEvent) -> None:
        """Note weights that the formula did not make: they are out of its reach."""
        own = attention.unfold_weights(event.shape, self.module) is not None
        if own and not (self.unfused.is_running or self.depth):
            kind = escape(type(self.module).__name__)
            self.error = InputError(
                f"the attention of this {kind} is computed where its weights can't be reached",
                hint="ask for the layer's output, or change that",
            )

    def check(self) -> None:
        """Raise the error also where the forward is left midway: nothing of it is what was asked for."""
        if self.error is not None:
            raise self.error

    def finish(self, output: object) -> object:
        """The output with the weights that went on."""
        return self.unfused.settle(output)


def _label_weights(index: int, weights: Tensor) -> TensorsByPath:
    """One attention of a call by path: its number, the first also none, as it is where a call has only one."""
    return TensorsByPath({(str(index),): weights} if index else {(): weights, ("0",): weights})


def attach_at(
    stack: ExitStack,
    locations: Mapping[T, Location],
    on_tensor: Callable[[T, Tensor], Tensor | None],
    kept: KeptOutputs | None = None,
) -> None:
    """Until the stack ends, call back with each tensor that passes a location, by its key; what it gives goes on.

    With ``kept`` also where the model keeps the tensor on the side.
    """
    groups: dict[tuple[nn.Module, HookKind], list[tuple[CallKey, Path, T]]] = defaultdict(list)
    for key, (module, side, call, path) in locations.items():
        groups[module, side].append((call, path, key))

    def on_call(group: Sequence[tuple[CallKey, Path, T]], number: CallKey, value: object) -> Changes:
        wanted = [(path, key) for call, path, key in group if call == number]
        tensors = dict(iterate_tensors(value)) if wanted else {}
        given = {path: on_tensor(key, tensors[path]) for path, key in wanted if path in tensors}
        return {path: tensor for path, tensor in given.items() if tensor is not None}

    attach_all(stack, ((module, side, partial(on_call, group)) for (module, side), group in groups.items()), kept)


def attach_all(
    stack: ExitStack, callbacks: Iterable[tuple[nn.Module, HookKind, OnCall]], kept: KeptOutputs | None = None
) -> None:
    """Until the stack ends, call back at each module and side; of all hooks those of functions come last."""
    in_order = sorted(callbacks, key=lambda each: each[1] in OF_FUNCTIONS)
    has_functions = any(side in OF_FUNCTIONS for _, side, _ in in_order)
    for module, side, on_call in in_order:
        attach = ATTACH[side]
        if kept is not None and side == "output":
            attach = partial(attach_calls, kind=partial(_KeptOutputCall, kept))
        attach(stack, module, partial(run_unseen, on_call) if has_functions else on_call)


@contextmanager
def observe_calls(module: nn.Module, enter: OnModuleCall, leave: OnModuleCall) -> Iterator[None]:
    """Until the block ends, ``enter`` gets what each call of each module takes, and ``leave`` what it returns."""
    with ExitStack() as stack:
        for part in list_observed(module):
            ATTACH["input"](stack, part, partial(enter, part))
            ATTACH["output"](stack, part, partial(leave, part))
        yield


@contextmanager
def end_forwards(module: nn.Module, must_end: Callable[[], bool]) -> Iterator[None]:
    """Once ``must_end`` says so, raise ForwardEnded: now, or before the next call of a module, until the block ends."""

    def check(*_: object) -> None:
        if must_end():
            raise ForwardEnded

    check()
    with ExitStack() as stack:
        for part in list_observed(module):
            stack.callback(nn.Module.register_forward_pre_hook(part, check).remove)
        yield


def list_observed(module: nn.Module) -> list[nn.Module]:
    """All modules of a tree but those within a scripted part: their hooks never run, they count as never called."""
    scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    inside = {id(part) for whole in scripted for part in whole.modules() if part is not whole}
    return [part for part in module.modules() if id(part) not in inside]


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


OF_FUNCTIONS: tuple[HookKind, ...] = ("function", "changed_function")
_of_attention = partial(attach_calls, find_parts=attention.find_nested_attention)
_of_functions = partial(attach_calls, find_parts=list_parts, ends_first=lambda module: True)
ATTACH: Mapping[HookKind, Attach] = {
    "output": partial(attach_calls, kind=_OutputCall),
    "input": partial(attach_calls, kind=_InputCall),
    "attention": partial(_of_attention, kind=_AttentionCall),
    "attention_sink": partial(_of_attention, kind=_SinkCall),
    "unfused": partial(_of_attention, kind=_UnfusedCall),
    "function": partial(_of_functions, kind=FunctionsCall),
    "changed_function": partial(_of_functions, kind=ChangedFunctionsCall),
}

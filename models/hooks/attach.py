"""Hooks: a row of a table for each kind, with how it attaches and what its callback receives.

A callback must read or copy its value at once: later in-place operations in the forward write to the same memory.
A hook returns None, or the value with the replacements that its callback returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layertap.models.errors import InputError, escape
from layertap.models.hooks import attention
from layertap.models.hooks.functions import FunctionsCall, list_parts, run_unseen
from layertap.models.hooks.kept import KeptOutputs
from layertap.models.hooks.running_calls import ArgsKwargs, Changes, RunningCall, attach_calls, get_version
from layertap.models.hooks.tensor_tree import Arguments, TensorsByPath, get_parameters, iterate_tensors, replace_tensor
from layertap.models.points import SITES, Point, Site

OnModuleCall = Callable[[nn.Module, int, object], None]  # gets the module, the number of its call, and a value
Attach = Callable[..., None]  # gets the stack that it ends with, a module, an OnCall, and what its kind needs
Kind = Literal["output", "input", "attention", "attention_sink", "unfused", "function", "changed_function"]


class StopForward(BaseException):
    """Raised to leave the forward when nothing is pending. Not an Exception, which models catch."""


class ForwardEnded(BaseException):
    """Raised to end a forward whose requests are gone. Not an Exception, which models catch."""


class _OutputCall(RunningCall):
    """Replaces the output also where the model has ``kept`` it on the side."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = (args, kwargs) if self.kept is not None else None

    def end(self, output: object) -> object:
        changed, changes = output, self.on_call(self.number, "", "output", output) or {}
        for path, tensor in changes.items():
            changed = replace_tensor(changed, path, tensor)
        if self.kept is not None and changes:
            originals = dict(iterate_tensors(output))
            for path, tensor in iterate_tensors(changed):
                if tensor is not originals[path]:
                    self.kept.replace(originals[path], tensor, self.arguments)
        return changed if changes else None


class _InputCall(RunningCall):
    replaced: Sequence[tuple[Tensor, Tensor, int]] = ()  # originals, replacements, and the versions of these

    # At the beginning: after an in-place module its input is already its output.
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgsKwargs | None:
        arguments = Arguments(args, kwargs, get_parameters(self.module))
        changes = self.on_call(self.number, "", "input", arguments)
        if not changes:
            return None
        tensors = dict(iterate_tensors(arguments))
        self.replaced = [(tensors[path], tensor, get_version(tensor)) for path, tensor in changes.items()]
        return arguments.replace(changes)

    # The caller may rely on what the module writes to its input.
    def end(self, output: object) -> None:
        for original, replacement, version in self.replaced:
            if get_version(replacement) != version:
                original.copy_(replacement)


class _AttentionCall(RunningCall):
    """A call whose attention is observed; that of its submodules is not."""

    def __init__(self, site: Site, *call: Any) -> None:
        super().__init__(*call)
        self.site = site

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
        shape = self.unfold(event.shape)
        if self.depth or self.error or shape is None:
            return
        try:
            with attention.disable_observers():
                self.weights.append(event.weights().reshape(shape))
            self.sinks.append(event.sinks)
        except InputError as error:  # not through the model, which may catch it
            self.error = error

    def unfold(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return attention.unfold_weights(shape, self.module, self.heads_around)

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
            part = weights[..., keys:] if self.site == "attention_sink" else weights[..., :keys]
            tensors |= _label_weights(index, part)
        self.on_call(self.number, "", self.site, tensors)
        return None


class _UnfusedCall(_AttentionCall):
    """A call whose attention runs by its plain formula, so that its weights can be replaced and differentiated."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.callback(self.check)
        super().begin(args, kwargs)
        self.unfused = attention.UnfusedAttention(self.anchor, lambda: self.depth > 0)
        self.mode.enter_context(self.unfused)

    def anchor(self, weights: Tensor) -> Tensor:
        """The weights with which the forward goes on."""
        shape = self.unfold(tuple(weights.shape))
        if shape is None:
            return weights
        self.weights.append(weights.reshape(shape))
        changes = self.on_call(self.number, "", self.site, _label_weights(len(self.weights) - 1, self.weights[-1]))
        return next(iter(changes.values())).reshape(weights.shape) if changes else weights

    def observe(self, event: attention.AttentionEvent) -> None:
        """Note weights that the formula did not make: they are out of its reach."""
        own = self.unfold(event.shape) is not None
        if own and not (self.unfused.is_running or self.depth):
            kind = escape(type(self.module).__name__)
            self.error = InputError(
                f"the attention of this {kind} is computed where its weights can't be reached",
                hint="ask for the layer's output, or change that",
            )

    def check(self) -> None:
        """Raise the error also where the forward is left midway."""
        if self.error is not None:
            raise self.error

    def finish(self, output: object) -> object:
        """The output, with the weights that replaced its own."""
        return self.unfused.settle(output)


def _label_weights(index: int, weights: Tensor) -> TensorsByPath:
    """One attention of a call by path: its number; the first also by (), as in a call that has only one."""
    return TensorsByPath({(str(index),): weights} if index else {(): weights, ("0",): weights})


class Modules(dict[str, nn.Module]):
    """The modules of a tree by all of their names, the root as ``.``; a tied module has several.

    ``names``: the first name of each module.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__((name or ".", part) for name, part in root.named_modules(remove_duplicate=False))
        self.names = {part: name for name, part in reversed(self.items())}

    def locate(self, point: Point) -> Point:
        """The same tensor under its module's first name; of a gradient the point of the value itself."""
        return replace(point, layer=self.names[self[point.layer]], site=SITES[point.site])


def attach_tensors(
    stack: ExitStack,
    modules: Modules,
    points: Iterable[Point],
    on_tensor: Callable[[Point, Tensor], Tensor | None],
    kept: KeptOutputs | None = None,
) -> None:
    """Until the stack ends, call back with each tensor that passes a point; what it returns replaces the tensor.

    With ``kept`` also where the model keeps the tensor on the side.
    """
    by_call: dict[Point, list[Point]] = defaultdict(list)
    for point in points:
        by_call[replace(modules.locate(point), path=())].append(point)

    def on_value(call: Point, value: object) -> Changes:
        wanted = by_call.get(call, ())
        tensors = dict(iterate_tensors(value)) if wanted else {}
        given = {point.path: on_tensor(point, tensors[point.path]) for point in wanted if point.path in tensors}
        return {path: tensor for path, tensor in given.items() if tensor is not None}

    attach_values(stack, modules, by_call, on_value, kept=kept)


def attach_values(
    stack: ExitStack,
    modules: Modules,
    points: Iterable[Point],
    on_value: Callable[[Point, object], Changes | None],
    *,
    changed: Collection[Point] = (),
    kept: KeptOutputs | None = None,
) -> None:
    """Until the stack ends, call back with each value at the layers and sites of some located points.

    The callback gets the located point of the call, without a path. ``changed``: points where tensors are replaced or
    differentiated; attention runs unfused there.
    """
    unfused = {point.layer for point in changed if point.site == "attention"}
    rewritten = {point.layer for point in changed if point.function}

    def get_kind(layer: str, site: Site, is_function: bool) -> Kind:
        if is_function:
            return "changed_function" if layer in rewritten else "function"
        return "unfused" if site == "attention" and layer in unfused else SITES[site]

    kinds = dict.fromkeys((each.layer, get_kind(each.layer, each.site, bool(each.function))) for each in points)
    hooks = sorted(kinds, key=lambda hook: hook[1].endswith("function"))  # of all hooks those of functions come last
    for layer, kind in hooks:

        def on_call(number: int, function: str, site: Site, value: object, layer: str = layer) -> Changes | None:
            return on_value(Point(layer, number, (), site, function), value)

        called = partial(run_unseen, on_call) if hooks[-1][1].endswith("function") else on_call
        heads_around = attention.list_heads_around(modules, modules[layer]) if kind in OF_ATTENTION else ()
        ATTACH[kind](stack, modules[layer], called, kept=kept, heads_around=heads_around)


@contextmanager
def observe_calls(module: nn.Module, enter: OnModuleCall, leave: OnModuleCall) -> Iterator[None]:
    """Until the block ends, ``enter`` gets what each call of each module takes, and ``leave`` what it returns."""

    def call_back(part: nn.Module, number: int, function: str, site: Site, value: object) -> None:
        (enter if site == "input" else leave)(part, number, value)

    with ExitStack() as stack:
        for part in list_observed(module):
            ATTACH["input"](stack, part, partial(call_back, part))
            ATTACH["output"](stack, part, partial(call_back, part))
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
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in module.modules() for kind in kinds)


OF_ATTENTION = frozenset({"attention", "attention_sink", "unfused"})
_of_attention = partial(attach_calls, find_parts=attention.find_nested_attention)
_of_functions = partial(attach_calls, find_parts=list_parts, ends_first=True)
ATTACH: Mapping[Kind, Attach] = {
    "output": partial(attach_calls, kind=_OutputCall),
    "input": partial(attach_calls, kind=_InputCall),
    "attention": partial(_of_attention, kind=partial(_AttentionCall, "attention")),
    "attention_sink": partial(_of_attention, kind=partial(_AttentionCall, "attention_sink")),
    "unfused": partial(_of_attention, kind=partial(_UnfusedCall, "attention")),
    "function": partial(_of_functions, kind=FunctionsCall),
    "changed_function": partial(_of_functions, kind=partial(FunctionsCall, may_change=True)),
}

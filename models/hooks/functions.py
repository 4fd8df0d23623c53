"""Functions that a module's own forward calls, ``torch.cat`` or ``+=``: name, observe and change them.

Named as torch names them, one name for a function, its method, its operator and what these do in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from layertap.models.hooks.running_calls import Changes, RunningCall, get_version
from layertap.models.hooks.tensor_tree import Arguments, iterate_tensors, replace_tensor

T = TypeVar("T")
# Layers of torch's own whose parts may be anybody's.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Reading or writing an attribute, and what only asks for a class: nothing is computed.
LEFT_OUT = frozenset({"__get__", "__set__", "__delete__", "__setitem__", "__instancecheck__"})
# Operators by the name that their function has in torch; each also in place and reflected.
OPERATORS = {
    f"__{kind}{operator}__": name
    for operator, name in {
        **{name: name for name in ("add", "sub", "mul", "div", "matmul", "pow")},
        "truediv": "div",
        "floordiv": "floor_divide",
        "mod": "remainder",
        "and": "bitwise_and",
        "or": "bitwise_or",
        "xor": "bitwise_xor",
        "invert": "bitwise_not",
        "lshift": "bitwise_left_shift",
        "rshift": "bitwise_right_shift",
    }.items()
    for kind in ("", "i", "r")
} | {"rsub": "sub"}


def get_function_name(function: object) -> str | None:
    """``add`` of ``torch.add``, ``Tensor.add_`` and ``Tensor.__iadd__``; None if it is no function of torch's."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or name in LEFT_OUT:
        return None
    return OPERATORS.get(name) or name.strip("_") or None


def may_call_functions(module: nn.Module) -> bool:
    """Whether functions in a module's forward count: a layer of torch's own is one with its output."""
    kind = type_before_parametrizations(module)
    return not isinstance(module, torch.jit.ScriptModule) and not kind.__module__.startswith("torch.nn.")


class FunctionsCall(RunningCall, TorchFunctionMode):
    """A module's call that reports each function that it calls, before and after: ``add#0``, "input" or "output".

    ``may_change``: the callback may return replacements. The mode is left while parts run, which have their own. To be
    attached after all other hooks: these would be taken for what the module does.
    """

    def __init__(self, *call: Any, may_change: bool = False) -> None:
        RunningCall.__init__(self, *call)
        TorchFunctionMode.__init__(self)
        self._may_change = may_change
        self._numbers = Counter[str]()
        self._is_entered = False

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the mode."""
        self.stack.callback(self._leave)  # where the forward is left midway
        self._enter()

    def end(self, output: object) -> None:
        """Leave the mode."""
        self._leave()

    def enter_part(self) -> None:
        """Leave the mode: it must be gone, not only silent, as some of torch's layers compute otherwise under any."""
        super().enter_part()
        if self.depth == 1 and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._leave()

    def leave_part(self) -> None:
        """Enter the mode again behind the outermost part."""
        super().leave_part()
        if self.depth == 0 and not self._is_entered:
            self._enter()

    def _enter(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True

    def _leave(self) -> None:
        if self._is_entered:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_entered = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call back with what a function takes, then with what it returns, and put the replacements in."""
        options, name = kwargs or {}, get_function_name(func)
        if name is None or self.depth:
            return func(*args, **options)
        function = f"{name}#{self._numbers[name]}"
        self._numbers[name] += 1
        taken = Arguments(tuple(args), options)
        held = dict(iterate_tensors(taken))  # what the forward has, which it sees written to
        changes = self.on_call(self.number, function, "input", taken) or {}
        if changes:
            args, options = taken.replace(changes)
        given = [(tensor, changes.get(path, tensor)) for path, tensor in held.items()]
        versions = [get_version(tensor) for _, tensor in given]
        with _keep_saved(func, args, options) if self._may_change else nullcontext():
            out = func(*args, **options)
        changes = self.on_call(self.number, function, "output", out) or {}
        written = [pair for pair, version in zip(given, versions, strict=True) if get_version(pair[1]) != version]
        return _put_in(out, changes, written)


def _put_in(out: object, changes: Changes, written: Sequence[tuple[Tensor, Tensor]]) -> object:
    """What a function returned, with changes; ``written``: pairs (original, replacement) of tensors that it wrote to.

    The changes are copied to the originals: other holders see them there, as after the function itself.
    """
    for path, tensor in iterate_tensors(out):
        own = next((original for original, given in written if given is tensor), None)
        changed = changes.get(path, tensor)
        if own is None:
            out = replace_tensor(out, path, changed) if changed is not tensor else out
            continue
        if changed is not own:
            own.copy_(changed)
        out = replace_tensor(out, path, own) if tensor is not own else out
        written = [pair for pair in written if pair[0] is not own]
    for original, given in written:  # and is not returned
        if given is not original:
            original.copy_(given)
    return out


def _keep_saved(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> AbstractContextManager[object]:
    """Copy the tensors that an in-place function saves for a backward: its result may be changed.

    Only then: hooks of a model that checkpoints do not see tensors that are saved under these.
    """
    may_write = func.__name__.endswith("_") or any(each is True for each in (*args, *options.values()))
    if not (may_write and torch.is_grad_enabled()):
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda saved: saved)


def run_unseen(on_call: Callable[..., T], *args: Any) -> T:
    """Run a hook so that no mode sees it: its module may run within one of a module that it is no part of."""
    with torch._C.DisableTorchFunction():
        return on_call(*args)


def list_parts(module: nn.Module) -> Iterator[nn.Module]:
    """What a module may call: all within it, but nothing within a layer of torch's own."""
    for part in module.children():
        if not isinstance(part, torch.jit.ScriptModule):
            yield part
        if may_call_functions(part) or isinstance(part, CONTAINERS):
            yield from list_parts(part)

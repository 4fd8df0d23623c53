"""Forwards that begin in the middle: a layer's output is given, and only what comes after it runs.

Python decides while it runs what a forward calls, so nobody can enter one in the middle. It is run from its beginning,
and every module that would have ended before the layer is skipped: it gives NaN in the shapes that it has. What follows
from the layer's output alone comes out as in a whole forward; ``prover.py`` finds out what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.devices.devices import DTYPES
from layertap.models.errors import SelectorError, escape
from layertap.models.hooks.tensor_tree import iterate_tensors, replace_tensor
from layertap.models.selection.hook_points import HookPoint, Selector, format_path
from layertap.models.selection.matches import find_matches
from layertap.models.selection.plan import Tap
from layertap.models.spec import InputDType, InputSpec

Inputs = Mapping[str, Tensor]
Forward = Callable[[Inputs, nn.Module], object]


@dataclass(frozen=True)
class Placeholder:
    """What a call returned, without the numbers in its tensors."""

    value: object
    tensors: tuple[TensorInfo, ...]

    def fill(self, rows: int, device: torch.device) -> Any:
        """As it would be for so many rows, of NaN, or zeros where a dtype has none; its memory is the caller's."""
        value, dtypes = self.value, {path: tensor.dtype for path, tensor in iterate_tensors(self.value)}
        for info in self.tensors:
            value = replace_tensor(value, info.path, _make_empty(info.shape_for(rows), dtypes[info.path], device))
        return value


SkippedCalls = tuple[Placeholder | None, ...]  # of one module, from its first call on; None where one runs


@dataclass(frozen=True)
class Resumption:
    """Forwards that begin with what leaves one call of a layer.

    ``start`` is the tensor that is sent. ``catalog`` knows what follows from that alone, and what it costs. ``skipped``
    has, by name, the modules that are skipped, each for so many calls; the last of the layer's own is the one whose
    output is sent. ``inputs`` are the model's, in ``dtype`` where they are floating.
    """

    start: Tap
    catalog: Catalog
    inputs: tuple[InputSpec, ...]
    dtype: torch.dtype
    skipped: Mapping[str, SkippedCalls]

    @property
    def takes(self) -> InputSpec:
        """What a request sends for each row: the layer's output without its axis of rows, of a text of any length."""
        info = self.start.info
        spec = InputSpec(escape_point(self.start.point), info.shape[1:], cast("InputDType", info.dtype))
        longest = next((each.longest for each in self.inputs if each.longest is not None), None)
        if longest is None or len(info.token_axes) != 1:
            return spec
        return replace(spec, longest=longest, long_axis=info.token_axes[0] - 1)

    def forward(self, run: Forward, module: nn.Module, sent: Tensor) -> object:
        """What the model returns when it goes on from a layer's output; the module is left as it was.

        ``sent`` has its rows on axis 0, and is the model's to write to.
        """
        with ExitStack() as stack:
            for name, calls in self.skipped.items():
                _skip_calls(stack, module.get_submodule(name), self._make_returns(name, calls, sent), len(calls))
            return run(self._make_inputs(sent), module)

    def _make_returns(self, name: str, calls: SkippedCalls, sent: Tensor) -> Callable[[int], Callable[[], Any] | None]:
        """What each call of a module returns, None where it runs."""

        def get_return(number: int) -> Callable[[], Any] | None:
            placeholder = calls[number]
            if placeholder is None:
                return None
            if name != self.start.point.layer or number < len(calls) - 1:
                return lambda: placeholder.fill(len(sent), sent.device)
            output = _begin_graph(sent.to(DTYPES[self.start.info.dtype]))
            return lambda: replace_tensor(placeholder.fill(len(sent), sent.device), self.start.point.path, output)

        return get_return

    def _make_inputs(self, sent: Tensor) -> Inputs:
        """Inputs for those parts of a forward that run and do not matter: NaN, or zeros."""

        def dtype(spec: InputSpec) -> torch.dtype:
            return self.dtype if DTYPES[spec.dtype].is_floating_point else DTYPES[spec.dtype]

        return {each.name: _make_empty((len(sent), *each.shape), dtype(each), sent.device) for each in self.inputs}


def find_start(selector: Selector, catalog: Catalog) -> Tap:
    """The one tensor that a forward is to go on from; UnknownLayerError, SelectorError where there is no such one."""
    matches, _ = find_matches(selector, catalog)
    if len(matches) != 1 or matches[0].point.site != "output":
        raise SelectorError(
            f"{escape(selector.text)} does not name the output of one layer",
            hint="name a layer without a site; where it returns several tensors, one of them: 'LAYER[path]'",
        )
    point, info = matches[0].point, matches[0].info
    if point.layer == ".":
        raise SelectorError("nothing runs after the model's own output", hint="resume from a layer inside")
    if info.dtype not in DTYPES:
        raise SelectorError(
            f"'{escape_point(point)}' is of dtype {info.dtype}, which can't be sent",
            hint="resume from a layer after it",
        )
    if info.row_axis != 0 or info.entries_per_row != 1 or info.crosses_rows:
        raise SelectorError(
            f"'{escape_point(point)}' does not return one entry for each input, so none can be sent",
            hint="resume from a layer around it, or after it",
        )
    return Tap(point, info)


def not_resumable_error(point: HookPoint) -> SelectorError:
    """The error where a model can't go on from a point."""
    return SelectorError(
        f"this model's forward can't be resumed from '{escape_point(point)}'",
        hint="resume from a layer around it, or after it",
    )


def format_point(point: HookPoint) -> str:
    """An output as a request would name it, however long: what tells one from another."""
    call = f"#{point.call}" if point.call else ""
    return f"{point.layer}{call}{format_path(point.path)}"


def escape_point(point: HookPoint) -> str:
    """The same, safe to show."""
    return escape(format_point(point))[1:-1]


def _skip_calls(
    stack: ExitStack, module: nn.Module, get_return: Callable[[int], Callable[[], Any] | None], calls: int
) -> None:
    """Until the stack ends, some of a module's first calls return something else, and run nothing."""
    numbers, own_forward, run = count(), vars(module).get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        make_value = get_return(number) if number < calls else None
        return run(*args, **kwargs) if make_value is None else make_value()

    def restore() -> None:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward

    module.forward = forward
    stack.callback(restore)


def _begin_graph(sent: Tensor) -> Tensor:
    """What is sent, as the beginning of a graph where one is kept: what depends on nothing else then shows that."""
    if not torch.is_grad_enabled() or not sent.is_floating_point():
        return sent
    return sent.detach().requires_grad_().clone()


def _make_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)

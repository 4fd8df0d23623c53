"""Forwards that resume from a given layer's output, and run only what follows.

A forward is Python code and can't be entered in the middle. It runs from the beginning, and every module that would
end before the layer is skipped: it returns NaN in the shapes of its output. Values that depend only on the layer's
output are the same as in a whole forward; ``resumption_proof.py`` determines which these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.devices.devices import DTYPES
from layertap.models.devices.memory import Forward, Inputs
from layertap.models.errors import SelectorError, escape
from layertap.models.hooks.attach import Modules, attach_tensors
from layertap.models.hooks.tensor_tree import iterate_tensors, replace_tensor
from layertap.models.plan.matches import find_matches
from layertap.models.plan.plan import Tap
from layertap.models.plan.requested import Selector
from layertap.models.points import Point
from layertap.models.spec import InputDType, InputSpec

Placeholder = tuple[object, tuple[TensorInfo, ...]]  # the structure of a call's output, its tensors empty; their infos
SkippedCalls = tuple[Placeholder | None, ...]  # for each call of a module, from the first; None: it runs


@dataclass(frozen=True)
class Resumption:
    """Forwards that resume from the output of one call of a layer."""

    start: Tap  # the tensor that is sent
    catalog: Catalog  # of the tensors that depend on it alone, with the costs of what runs
    inputs: tuple[InputSpec, ...]  # the model's, floating ones in ``dtype``
    dtype: torch.dtype
    # By module. The layer's own last skipped call is the one whose output is sent, unless ``start`` is a function's.
    skipped: Mapping[str, SkippedCalls]

    @property
    def takes(self) -> InputSpec:
        """What a request sends for each row: the layer's output without the row axis; a text's may have any length."""
        info = self.start.info
        spec = InputSpec(escape_point(self.start.point), info.shape[1:], cast("InputDType", info.dtype))
        longest = next((each.longest for each in self.inputs if each.longest is not None), None)
        if longest is None or len(info.token_axes) != 1:
            return spec
        return replace(spec, longest=longest, long_axis=info.token_axes[0] - 1)

    def forward(self, run: Forward, modules: Modules, sent: Tensor) -> object:
        """What the model returns when it resumes from a layer's output; its modules are restored afterwards.

        ``sent`` has its rows on axis 0; the model may write to it.
        """
        point = self.start.point
        with ExitStack() as stack:
            if point.function:
                attach_tensors(stack, modules, [point], lambda *_: self._begin(sent))
            for name, calls in self.skipped.items():
                is_own = name == point.layer
                _skip_calls(stack, modules[name or "."], calls, partial(self._fill, sent, is_own))
            return run(self._make_inputs(sent))

    def _fill(self, sent: Tensor, is_own: bool, placeholder: Placeholder, is_last: bool) -> Any:
        """What a skipped call returns, in new memory; the layer's own last call returns the sent tensor in it."""
        value, infos = placeholder
        dtypes = {path: tensor.dtype for path, tensor in iterate_tensors(value)}
        for info in infos:
            empty = _make_empty(info.shape_for(len(sent)), dtypes[info.path], sent.device)
            value = replace_tensor(value, info.path, empty)
        return replace_tensor(value, self.start.point.path, self._begin(sent)) if is_own and is_last else value

    def _begin(self, sent: Tensor) -> Tensor:
        """The sent tensor; with grad enabled it requires grad, so that the graph shows what depends on it."""
        sent = sent.to(DTYPES[self.start.info.dtype])
        if not torch.is_grad_enabled() or not sent.is_floating_point():
            return sent
        return sent.detach().requires_grad_().clone()

    def _make_inputs(self, sent: Tensor) -> Inputs:
        """Inputs for the parts of a forward that run although their results are not used: NaN, or zeros."""
        dtypes = {each.name: DTYPES[each.dtype] for each in self.inputs}
        dtypes = {name: self.dtype if dtype.is_floating_point else dtype for name, dtype in dtypes.items()}
        shapes = {each.name: (len(sent), *each.shape) for each in self.inputs}
        return {name: _make_empty(shape, dtypes[name], sent.device) for name, shape in shapes.items()}


def find_start(selector: Selector, catalog: Catalog) -> Tap:
    """The tensor that a forward resumes from; UnknownLayerError or SelectorError if there is not exactly one."""
    matches, _ = find_matches(selector, catalog)
    if len(matches) != 1 or matches[0].point.site != "output":
        raise SelectorError(
            f"{escape(selector.text)} does not name the output of one layer",
            hint="name a layer without a site; where it returns several tensors, one of them: 'LAYER[path]'",
        )
    point, info = matches[0].point, matches[0].info
    if point.layer == "." and not point.function:
        raise SelectorError("nothing runs after the model's own output", hint="resume from a layer inside")
    if info.dtype not in DTYPES:
        raise SelectorError(
            f"'{escape_point(point)}' is of dtype {info.dtype}, which can't be sent",
            hint="resume from a layer after it",
        )
    if info.row_axis != 0 or info.entries_per_row != 1 or info.crosses_rows or info.alone:
        raise SelectorError(
            f"'{escape_point(point)}' does not return one entry for each input, so none can be sent",
            hint="resume from a layer around it, or after it",
        )
    return matches[0]


def not_resumable_error(point: Point) -> SelectorError:
    """The error if a model can't resume from a point."""
    return SelectorError(
        f"this model's forward can't be resumed from '{escape_point(point)}'",
        hint="resume from a layer around it, or after it",
    )


def format_point(point: Point) -> str:
    """An output as a request names it, unescaped and not shortened."""
    return point.format_name(f"#{point.call}" if point.call else "")


def escape_point(point: Point) -> str:
    """``format_point``, safe to show."""
    return escape(format_point(point))[1:-1]


def _skip_calls(
    stack: ExitStack, module: nn.Module, calls: SkippedCalls, fill: Callable[[Placeholder, bool], Any]
) -> None:
    """Until the stack closes, a module's calls that have a placeholder return it filled instead of running.

    ``fill`` takes the placeholder, and whether it is the last one.
    """
    numbers, own_forward, run = count(), vars(module).get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        placeholder = calls[number] if number < len(calls) else None
        return run(*args, **kwargs) if placeholder is None else fill(placeholder, number == len(calls) - 1)

    def restore() -> None:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward

    module.forward = forward
    stack.callback(restore)


def _make_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, or zeros if the dtype has no NaN."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)

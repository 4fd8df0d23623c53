"""Whether a graph leads from a model's input to what is differentiated: where the model cut it, zero is no answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import nn

from layertap.models.devices.memory import is_device_error
from layertap.models.hooks.attach import ATTACH, Changes
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.selection.hook_points import HookPoint


class _StopForward(BaseException):
    """Everything has been seen: leave the forward."""


def find_unreachable(
    forward: Callable[[], object], modules: Mapping[str, nn.Module], points: Collection[HookPoint]
) -> list[HookPoint]:
    """Those of some outputs that no graph leads to, though one began at the model's input, or where it looks up tables.

    Runs a forward up to the last of them, with a graph, where there are any. The list is empty where no graph could
    begin; it names all of them where the forward does not run with one.
    """
    if not points:
        return []
    begun: list[bool] = []
    linked: dict[HookPoint, bool] = {}

    def begin(call: int, value: object) -> Changes:
        # In a mode of the model's own nothing would come of it.
        found = {
            path: leaf for path, leaf in iterate_tensors(value) if torch.is_grad_enabled() and not leaf.requires_grad
        }
        fit = {path: leaf for path, leaf in found.items() if leaf.is_floating_point() or leaf.is_complex()}
        begun.extend(True for _ in fit)
        return {path: leaf.detach().clone().requires_grad_().clone() for path, leaf in fit.items()}

    def look(wanted: Collection[HookPoint], call: int, value: object) -> None:
        given = dict(iterate_tensors(value))
        linked.update(
            (point, given[point.path].requires_grad) for point in wanted if point.call == call and point.path in given
        )
        if len(linked) == len(points):
            raise _StopForward

    wanted: dict[nn.Module, list[HookPoint]] = defaultdict(list)
    for point in points:
        wanted[modules[point.layer]].append(point)
    with ExitStack() as stack:
        ATTACH["input"](stack, modules["."], begin)
        for table in {part for part in modules.values() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}:
            ATTACH["output"](stack, table, begin)
        for module, looked_at in wanted.items():
            ATTACH["output"](stack, module, partial(look, looked_at))
        try:
            with suppress(_StopForward), torch.enable_grad():
                forward()
        except RuntimeError as error:
            if is_device_error(error):
                raise
            return list(points)  # what can't be computed with a graph is computed without one
    return [point for point, is_linked in linked.items() if begun and not is_linked]

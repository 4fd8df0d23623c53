"""Whether a graph leads from a model's input to what is differentiated: where the model cut it, zero is no answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import nn

from layertap.models.devices.memory import is_device_error
from layertap.models.hooks.attach import ATTACH, Changes, StopForward
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.selection.group_by_call import group_by_call
from layertap.models.selection.hook_points import HookPoint


def find_unreachable(
    forward: Callable[[], object], modules: Mapping[str, nn.Module], points: Collection[HookPoint]
) -> list[HookPoint]:
    """Those of some outputs that no graph leads to, though one began at the model's input, or where it looks up tables.

    Runs a forward up to the last of them, with a graph, where there are any. The list is empty where no graph could
    begin; it names all of them where the forward does not run with one.
    """
    if not points:
        return []
    graph_began = False
    reached: dict[HookPoint, bool] = {}

    def begin_graph(call: int, value: object) -> Changes:
        nonlocal graph_began
        # In a mode of the model's own nothing would come of it.
        tensors = dict(iterate_tensors(value)) if torch.is_grad_enabled() else {}
        changes = {
            path: tensor.detach().clone().requires_grad_().clone()
            for path, tensor in tensors.items()
            if not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        }
        graph_began = graph_began or bool(changes)
        return changes

    def check_points(calls: Mapping[int, Collection[HookPoint]], call: int, value: object) -> None:
        tensors = dict(iterate_tensors(value)) if call in calls else {}
        for point in calls.get(call, ()):
            if point.path in tensors:
                reached[point] = tensors[point.path].requires_grad
        if len(reached) == len(points):
            raise StopForward

    with ExitStack() as stack:
        ATTACH["input"](stack, modules["."], begin_graph)
        for table in {part for part in modules.values() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}:
            ATTACH["output"](stack, table, begin_graph)
        for (module, side), calls in group_by_call(zip(points, points, strict=True), modules).items():
            ATTACH[side](stack, module, partial(check_points, calls))
        try:
            with suppress(StopForward), torch.enable_grad():
                forward()
        except RuntimeError as error:
            if is_device_error(error):
                raise
            return list(points)  # what can't be computed with a graph is computed without one
    return [point for point, is_reached in reached.items() if graph_began and not is_reached]

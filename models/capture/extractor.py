"""FeatureExtractor: attach, run the forward, change and reduce inside the hooks, detach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor, nn

from layertap.models.capture.batch_slices import BatchActivations, RequestSlice
from layertap.models.capture.collector import Collector
from layertap.models.capture.reduction import ReducedTensor
from layertap.models.errors import InputError
from layertap.models.gradients.anchors import find_unreachable
from layertap.models.hooks.attach import ATTACH, StopForward
from layertap.models.hooks.running_calls import Changes
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.selection.hook_points import HookPoint, group_by_call
from layertap.models.selection.plan import Capture


class FeatureExtractor:
    """Takes tensors and gradients out of a module's forward, changes values in it; the module is left as it was.

    Not for several threads at once: hooks are seen by every forward through the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = {name or ".": part for name, part in module.named_modules(remove_duplicate=False)}

    def __call__(
        self, forward: Callable[[], object], captures: Iterable[Capture], rows: int
    ) -> dict[Capture, ReducedTensor]:
        """Run a forward of so many rows and return each capture reduced: ``extract_slices`` for a single request."""
        request_slice = RequestSlice(0, rows, frozenset(captures))
        return self.extract_slices(forward, [request_slice], rows).select(request_slice)

    def extract_slices(
        self, forward: Callable[[], object], slices: Iterable[RequestSlice], rows: int, token_mask: Tensor | None = None
    ) -> BatchActivations:
        """Run one forward for several requests: the hooks are the union, each reduces only the rows that asked.

        ``token_mask`` (rows, tokens), on the host, is False where a token only pads its row.
        The tensors are the caller's; they are on the model's device and not to be differentiated. The forward ends as
        soon as nothing is pending; a backward follows where a slice has an objective. Where that finds no graph the
        forward may run once more: it takes its inputs anew each time. LayerNotReachedError if it ends earlier,
        InputError if a tensor is not as its catalogue says; whatever the forward raises goes through. In every case
        the hooks are gone.
        """
        collector = Collector(tuple(slices), rows, self._modules, token_mask)
        with ExitStack() as cleanup, collector.set_grad_mode():
            cleanup.callback(collector.release_graph)
            with ExitStack() as stack:
                for module, side, on_call in collector.list_callbacks():
                    ATTACH[side](stack, module, on_call)
                with suppress(StopForward):
                    forward()
            collector.check()
            with ExitStack() as stack:
                for module, side, on_call in collector.list_recompute_callbacks():
                    ATTACH[side](stack, module, on_call)
                with suppress(StopForward):
                    collector.backward()
            collector.check()
            for point in find_unreachable(forward, self._modules, collector.find_unreached()):
                raise InputError(
                    f"between its input and {point.escaped_text} the model computes without gradients",
                    hint="take an objective before the model's own torch.no_grad() or detach()",
                )
        return BatchActivations(collector.results)

    def run_with_replacements(
        self, forward: Callable[[], object], values: Mapping[HookPoint, Tensor]
    ) -> dict[HookPoint, Tensor]:
        """Run a whole forward with other tensors in place of those that leave some calls.

        Gives the tensors of its output, and those that were about to leave these calls.
        """
        replaced: dict[HookPoint, Tensor] = {}

        def replace(points: Mapping[int, Iterable[HookPoint]], call: int, value: object) -> Changes | None:
            tensors = dict(iterate_tensors(value))
            changes = {}
            for point in points.get(call, ()):
                replaced[point] = tensors[point.path].clone()
                # In the order of memory of what was there: in another, kernels round otherwise.
                changes[point.path] = torch.empty_like(tensors[point.path]).copy_(values[point])
            return changes

        with ExitStack() as stack, torch.no_grad():
            for (module, side), points in group_by_call(zip(values, values, strict=True), self._modules).items():
                ATTACH[side](stack, module, partial(replace, dict(points)))
            output = forward()
            outputs = {HookPoint(".", 0, path, "output"): tensor.clone() for path, tensor in iterate_tensors(output)}
        return outputs | replaced

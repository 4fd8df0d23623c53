"""FeatureExtractor: attach, run the forward, change and reduce inside the hooks, detach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress

import torch
from torch import Tensor, nn

from layertap.models.errors import InputError
from layertap.models.hooks.attach import StopForward, attach_all, attach_at
from layertap.models.hooks.kept import KeptOutputs
from layertap.models.hooks.tensor_tree import iterate_tensors
from layertap.models.points import Point
from layertap.models.run.batch_slices import BatchActivations, RequestSlice
from layertap.models.run.collector import Collector
from layertap.models.run.gradient_anchors import find_unreachable
from layertap.models.run.verification import not_verified_error


class FeatureExtractor:
    """Captures tensors and gradients in a module's forward, and changes values; the module is left as it was.

    Not thread-safe: hooks run in every forward through the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = {name or ".": part for name, part in module.named_modules(remove_duplicate=False)}

    def extract_slices(
        self,
        forward: Callable[[], object],
        slices: Iterable[RequestSlice],
        row_count: int,
        token_mask: Tensor | None = None,
        stops: bool = True,
    ) -> BatchActivations:
        """Run one forward for several requests: the hooks are the union, each reduces only the rows that asked.

        ``token_mask`` (rows, tokens), on the host, is False where a token only pads its row.
        The tensors are the caller's; they are on the model's device and not to be differentiated. The forward ends as
        soon as nothing is pending, if it ``stops``; a backward follows where a slice has an objective. Where that
        finds no graph the forward may run once more: it takes its inputs anew each time. LayerNotReachedError if it
        ends earlier, InputError if a tensor is not as its catalog says; whatever the forward raises goes through. In
        every case the hooks are gone.
        """
        collector = Collector(tuple(slices), row_count, self._modules, token_mask, stops)
        with collector.set_grad_mode():
            kept = KeptOutputs(self._modules["."]) if collector.changes_outputs else None
            with ExitStack() as stack:
                attach_all(stack, collector.list_callbacks(), kept)
                with suppress(StopForward):
                    forward()
            collector.check()
            with ExitStack() as stack:
                attach_all(stack, collector.list_recompute_callbacks())
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
        self, forward: Callable[[], object], values: Mapping[Point, Tensor]
    ) -> dict[Point, Tensor]:
        """Run a whole forward with other tensors in place of those that leave some calls.

        Gives the tensors of its output, and those that were about to leave these calls. RequestError if the model
        keeps one of these where it can't be replaced.
        """
        replaced: dict[Point, Tensor] = {}

        def replace(point: Point, tensor: Tensor) -> Tensor:
            replaced[point] = tensor.clone()
            # In the order of memory of what was there: in another, kernels round otherwise.
            return torch.empty_like(tensor).copy_(values[point])

        kept = KeptOutputs(self._modules["."])
        with ExitStack() as stack, torch.no_grad():
            attach_at(stack, {point: point.locate(self._modules) for point in values}, replace, kept)
            output = forward()
            outputs = {Point(".", 0, path, "output"): tensor.clone() for path, tensor in iterate_tensors(output)}
            del output
        if kept.has_lost_any():
            raise not_verified_error(
                "not verified: the model keeps a layer's output, and reads it where it can't be replaced",
                "ask for a layer after it, or leave 'verify' out",
            )
        return outputs | replaced

"""FeatureExtractor: attach hooks, run the forward, change and reduce inside the hooks, detach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress

import torch
from torch import Tensor, nn

from layertap.models.errors import InputError
from layertap.models.hooks.attach import Modules, StopForward, attach_tensors
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
        self.modules = Modules(module)

    def extract_slices(
        self,
        forward: Callable[[], object],
        slices: Iterable[RequestSlice],
        row_count: int,
        token_mask: Tensor | None = None,
        stops: bool = True,
    ) -> BatchActivations:
        """Run one forward for several requests: the hooks are the union, each reduces only the rows that asked.

        ``token_mask`` (rows, tokens), on the host, is False for padding. The forward ends as soon as nothing is
        pending, if it ``stops``; a backward follows if a slice has an objective. If that finds no graph ``forward``
        runs once more. The results are on the model's device, without a graph. LayerNotReachedError if the forward ends
        earlier, InputError if a tensor is not as its catalog says; errors of the forward pass through. In every case
        the hooks are gone.
        """
        collector = Collector(tuple(slices), row_count, self.modules, token_mask, stops)
        with collector.set_grad_mode():
            with ExitStack() as stack:
                collector.attach(stack)
                with suppress(StopForward):
                    forward()
            collector.check()
            with ExitStack() as stack:
                collector.attach_recompute(stack)
                with suppress(StopForward):
                    collector.backward()
            collector.check()
            for point in find_unreachable(forward, self.modules, collector.find_unreached()):
                raise InputError(
                    f"between its input and {point.escaped_text} the model computes without gradients",
                    hint="take an objective before the model's own torch.no_grad() or detach()",
                )
        return BatchActivations(collector.results)

    def run_with_replacements(
        self, forward: Callable[[], object], values: Mapping[Point, Tensor]
    ) -> dict[Point, Tensor]:
        """Run a whole forward in which the outputs of some calls are replaced.

        Returns the tensors of its output and the replaced ones. RequestError if the model keeps one of these where it
        can't be replaced.
        """
        replaced: dict[Point, Tensor] = {}

        def replace(point: Point, tensor: Tensor) -> Tensor:
            replaced[point] = tensor.clone()
            # In the original's memory order: in another, kernels round otherwise.
            return torch.empty_like(tensor).copy_(values[point])

        kept = KeptOutputs(self.modules["."])
        with ExitStack() as stack, torch.no_grad():
            attach_tensors(stack, self.modules, values, replace, kept)
            output = forward()
            outputs = {Point(".", 0, path, "output"): tensor.clone() for path, tensor in iterate_tensors(output)}
            del output
        if kept.has_lost_any():
            raise not_verified_error(
                "not verified: the model keeps a layer's output, and reads it where it can't be replaced",
                "ask for a layer after it, or leave 'verify' out",
            )
        return outputs | replaced

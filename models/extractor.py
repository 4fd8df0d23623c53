"""FeatureExtractor: attach, run the forward, reduce inside the hooks, detach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count

import torch
from torch import nn

from models.errors import LayerNotReachedError, quoted
from models.hooks import SITES
from models.plan import Capture
from models.points import Site, path_text
from models.pooling import Reduced, reduce
from models.structure import leaves


class _Complete(BaseException):
    """Nothing is pending: leave the forward. Not an Exception, which models catch."""


class FeatureExtractor:
    """Takes tensors out of a module's forward; the module is left as it was found.

    Not for several threads at once: hooks are seen by every forward through the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = {name or ".": part for name, part in module.named_modules(remove_duplicate=False)}

    def __call__(self, forward: Callable[[], object], captures: Iterable[Capture]) -> dict[Capture, Reduced]:
        """Run ``forward`` and return each capture reduced, in tensors that the caller owns, on the model's device.

        The forward ends as soon as nothing is pending. LayerNotReachedError if it ends earlier; whatever the forward
        raises goes through. In every case the hooks are gone.
        """
        collector = _Collector(captures)
        with ExitStack() as stack:
            for site, module, taken in self._taps(collector):
                stack.callback(SITES[site](module, taken).remove)
            try:
                with torch.inference_mode():
                    forward()
            except _Complete:
                pass
        collector.check()
        return collector.results

    def _taps(self, collector: _Collector) -> Iterable[tuple[Site, nn.Module, Callable[[object], None]]]:
        """One tap for each module and site, though a tied module may be asked for under several names."""
        groups: dict[tuple[Site, nn.Module], list[Capture]] = defaultdict(list)
        for capture in collector.pending:
            groups[capture.point.site, self._modules[capture.point.layer]].append(capture)
        for (site, module), wanted in groups.items():
            yield site, module, collector.tap(wanted)


class _Collector:
    """What one forward owes: hooks close over it, nothing of it is stored on the model."""

    def __init__(self, captures: Iterable[Capture]) -> None:
        self.pending = dict.fromkeys(captures)
        self.results: dict[Capture, Reduced] = {}

    def tap(self, wanted: list[Capture]) -> Callable[[object], None]:
        """A function that takes the wanted captures out of one module's values, call by call."""
        numbers = count()
        by_call: dict[int, list[Capture]] = defaultdict(list)
        for capture in wanted:
            by_call[capture.point.call].append(capture)

        def take(value: object) -> None:
            if wanted_now := by_call.get(next(numbers)):
                self._take(value, wanted_now)

        return take

    def check(self) -> None:
        """LayerNotReachedError if anything is still pending."""
        for capture in self.pending:
            point = capture.point
            where = f"{point.layer}#{point.call}{path_text(point.path)}:{point.site}"
            raise LayerNotReachedError(f"this input's forward never reached {quoted(where)}")

    def _take(self, value: object, wanted: list[Capture]) -> None:
        found = dict(leaves(value))
        for capture in wanted:
            if capture.point.path in found:
                self.results[capture] = reduce(found[capture.point.path], capture.leaf, capture.reduction)
                del self.pending[capture]
        if not self.pending:
            raise _Complete

"""FeatureExtractor: attach, run the forward, reduce inside the hooks, detach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from models.dtypes import dtype_name
from models.errors import InputError, LayerNotReachedError, quoted
from models.hooks import SITES, Take
from models.plan import Capture
from models.points import Site, path_text
from models.pooling import Reduced, reduce
from models.structure import leaves
from models.union import Share, Span, Taken, rows_of, spans_of


class _Complete(BaseException):
    """Nothing is pending: leave the forward. Not an Exception, which models catch."""


class FeatureExtractor:
    """Takes tensors out of a module's forward; the module is left as it was found.

    Not for several threads at once: hooks are seen by every forward through the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = {name or ".": part for name, part in module.named_modules(remove_duplicate=False)}

    def __call__(self, forward: Callable[[], object], captures: Iterable[Capture], rows: int) -> dict[Capture, Reduced]:
        """Run a forward of so many rows and return each capture reduced: ``shared`` for a single request."""
        share = Share(0, rows, frozenset(captures))
        return self.shared(forward, [share], rows).of(share)

    def shared(self, forward: Callable[[], object], shares: Iterable[Share], rows: int) -> Taken:
        """Run one forward for several requests: the hooks are the union, each reduces only the rows that asked.

        The tensors are the caller's; they are on the model's device and, as results of inference mode, not to be
        differentiated. The forward ends as soon as nothing is pending. LayerNotReachedError if it ends earlier,
        InputError if a tensor is not as its catalogue says; whatever the forward raises goes through. In every case
        the hooks are gone.
        """
        collector = _Collector(spans_of(shares, rows), rows)
        with ExitStack() as stack:
            for site, module, take in self._taps(collector):
                SITES[site](stack, module, take)
            try:
                with torch.inference_mode():
                    forward()
            except _Complete:
                pass
        collector.check()
        return Taken(collector.results)

    def _taps(self, collector: _Collector) -> Iterable[tuple[Site, nn.Module, Take]]:
        """One tap for each module and site, though a tied module may be asked for under several names."""
        groups: dict[tuple[Site, nn.Module], list[Capture]] = defaultdict(list)
        for capture in collector.pending:
            groups[capture.point.site, self._modules[capture.point.layer]].append(capture)
        for (site, module), wanted in groups.items():
            yield site, module, collector.tap(wanted)


class _Collector:
    """What one forward owes: hooks close over it, nothing of it is stored on the model."""

    def __init__(self, spans: dict[Capture, tuple[Span, ...]], rows: int) -> None:
        self.pending = dict(spans)
        self.results: dict[tuple[Capture, Span], Reduced] = {}
        self._rows = rows
        self._misfit: InputError | None = None

    def tap(self, wanted: list[Capture]) -> Take:
        """A function that takes the wanted captures out of one module's values, call by call."""
        by_call: dict[int, list[Capture]] = defaultdict(list)
        for capture in wanted:
            by_call[capture.point.call].append(capture)

        def take(call: int, value: object) -> None:
            if wanted_now := by_call.get(call):
                self._take(value, wanted_now)

        return take

    def check(self) -> None:
        """InputError if a tensor was not as promised, LayerNotReachedError if anything is still pending."""
        if self._misfit is not None:
            raise self._misfit
        for capture in self.pending:
            raise LayerNotReachedError(f"this input's forward never reached {_where(capture)}")

    def _take(self, value: object, wanted: list[Capture]) -> None:
        found = dict(leaves(value))
        for capture in wanted:
            tensor = found.get(capture.point.path)
            if tensor is None:
                continue
            self._misfit = _misfit(tensor, capture, self._rows)
            if self._misfit is not None:
                raise _Complete
            for span in self.pending.pop(capture):
                part = rows_of(tensor, capture, span, self._rows)
                self.results[capture, span] = reduce(part, capture.leaf, capture.reduction)
        if not self.pending:
            raise _Complete


def _misfit(tensor: Tensor, capture: Capture, rows: int) -> InputError | None:
    """Why a tensor can't be handed out by what its catalogue says; rows would be cut in the wrong places."""
    leaf, shape = capture.leaf, tuple(tensor.shape)
    if shape == leaf.shape_for(rows) and dtype_name(tensor.dtype) == leaf.dtype:
        return None
    found = f"{dtype_name(tensor.dtype)} {list(shape)}, not {leaf.dtype} {list(leaf.shape_for(rows))}"
    hint = "send one input at a time" if rows > 1 else "its size depends on the input's values: ask for another layer"
    return InputError(f"with this input {_where(capture)} is {found}", hint=hint)


def _where(capture: Capture) -> str:
    point = capture.point
    return quoted(f"{point.layer}#{point.call}{path_text(point.path)}:{point.site}")

"""Which specs a worker knows: each is sent once, and named by its place in a table from then on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from layertap.service.engine.forward_batch import ForwardSpec
from layertap.service.workers.messages import SentSpec

MAX_SPECS = 64  # a batch with more has a larger table
Key = tuple[int, int, int, int]


class SpecTable:
    """The places of the specs used most recently; for one thread at a time."""

    def __init__(self) -> None:
        self._places: OrderedDict[Key, tuple[int, ForwardSpec]] = OrderedDict()

    def take_places(self, specs: Iterable[ForwardSpec]) -> tuple[list[int], dict[int, SentSpec]]:
        """The places of a batch's specs, and by place those that the worker does not know yet."""
        specs = list(specs)
        for spec in specs:  # what the batch has stays, whatever else has to go
            if _make_key(spec) in self._places:
                self._places.move_to_end(_make_key(spec))
        size = max(MAX_SPECS, len(specs))
        new: dict[int, SentSpec] = {}
        for spec in specs:
            key = _make_key(spec)
            if key not in self._places:
                place = len(self._places) if len(self._places) < size else self._places.popitem(last=False)[1][0]
                self._places[key] = place, spec
                new[place] = SentSpec(spec, tuple(spec.plan.captures))
        return [self._places[_make_key(spec)][0] for spec in specs], new


def _make_key(spec: ForwardSpec) -> Key:
    """What tells specs apart: plans are used again, and what an entry keeps has an id that nothing else has."""
    return id(spec.plan), id(spec.verified_by), id(spec.resumption), id(spec.compiled)

"""What the server and a worker know both: specs, which cross once, and captures, which cross as their numbers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

from layertap.models.selection.plan import Capture
from layertap.service.engine.batch import Batch, ForwardSpec

MAX_SPECS = 64  # a batch with more has a larger table
RESET = -1  # comes with the first specs of a table: a worker forgets what it knew from another one
Key = tuple[int, int, int, int]
Known = tuple[ForwardSpec, tuple[Capture, ...]]  # a spec, and its captures in one order: a set has another elsewhere
CaptureNumber = tuple[int, int]  # of a spec, and among its captures


class ServerReferences:
    """What a worker knows: the specs used most recently. Results come back under the numbers of captures."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[Key, tuple[int, Known]] = OrderedDict()
        self._captures: dict[int, tuple[Capture, ...]] = {}

    def take_new(self, message: object) -> Mapping[int, object]:
        """Number a batch's specs; those that the worker does not know yet, by number."""
        if not isinstance(message, Batch):
            return {}
        specs = {_make_key(each.spec): each.spec for each in message.slices}
        for key in specs:  # what the batch has stays, whatever else has to go
            if key in self._numbers:
                self._numbers.move_to_end(key)
        size = max(MAX_SPECS, len(specs))
        new: dict[int, object] = {} if self._numbers else {RESET: None}
        for key, spec in specs.items():
            if key not in self._numbers:
                full = len(self._numbers) >= size
                number = self._numbers.popitem(last=False)[1][0] if full else len(self._numbers)
                known = spec, tuple(spec.plan.captures)
                self._numbers[key], self._captures[number], new[number] = (number, known), known[1], known
        return new

    def learn(self, new: Mapping[int, object]) -> None:
        """Nothing: a worker has no specs of its own."""

    def find(self, value: object) -> int | None:
        """The number of a spec of the batch."""
        return self._numbers[_make_key(value)][0] if type(value) is ForwardSpec else None

    def get(self, reference: CaptureNumber) -> Capture:
        """The capture of a result."""
        spec, capture = reference
        return self._captures[spec][capture]


class WorkerReferences:
    """The specs that a worker knows, as many as the server has numbers for."""

    def __init__(self) -> None:
        self._specs: dict[int, Known] = {}
        self._captures: dict[Capture, CaptureNumber] = {}

    def take_new(self, message: object) -> Mapping[int, object]:
        """Nothing: all captures are the server's."""
        return {}

    def learn(self, new: Mapping[int, object]) -> None:
        """Know what came with a batch."""
        if RESET in new:
            self._specs.clear()
        if new:
            self._specs |= {number: cast("Known", known) for number, known in new.items() if number != RESET}
            self._captures = {
                capture: (number, index)
                for number, (_, captures) in self._specs.items()
                for index, capture in enumerate(captures)
            }

    def find(self, value: object) -> CaptureNumber | None:
        """The number of a capture."""
        return self._captures[value] if type(value) is Capture else None

    def get(self, reference: int) -> ForwardSpec:
        """The spec of a number."""
        return self._specs[reference][0]


def _make_key(spec: Any) -> Key:
    """What tells specs apart: plans are used again, and what an entry keeps has an id that nothing else has."""
    return id(spec.plan), id(spec.verified_by), id(spec.resumption), id(spec.compiled)

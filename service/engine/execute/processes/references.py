"""What the server and a worker both know: specs, which cross once, and captures, which cross as their numbers."""

from __future__ import annotations

from typing import Any

from layertap.models.selection.plan import Capture
from layertap.models.selection.projections import count_weights
from layertap.service.engine.batch import ForwardSpec
from layertap.service.engine.execute.processes.channel import References

MAX_SPECS = 64  # that a worker keeps when it gets a batch
MAX_WEIGHTS = 2**26  # numbers of their projections: 256 MiB
Captures = tuple[Capture, ...]  # of a spec, in one order: a set has another elsewhere
Key = tuple[int, int, int, int]
CaptureNumber = tuple[int, int]  # of a spec, and among its captures


class ServerReferences(References):
    """The specs that a worker has been sent. Results come back under the numbers of captures."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._specs: list[tuple[ForwardSpec, Captures]] = []
        self._weights = 0

    def clear(self) -> None:
        """Begin anew; the worker forgets its specs with the next one that it gets."""
        self._numbers.clear()
        self._specs.clear()
        self._weights = 0

    @property
    def is_full(self) -> bool:
        """Whether they should begin anew with the next batch."""
        return len(self._specs) >= MAX_SPECS or self._weights > MAX_WEIGHTS

    def find(self, value: object) -> Any:
        """The number of a spec; the first time what a worker makes of it, too.

        One that changes or differentiates never comes again, and may have large tensors: it crosses as it is.
        """
        if type(value) is not ForwardSpec or value.plan.resolved_interventions or value.plan.objective is not None:
            return None
        key = id(value.plan), id(value.verified_by), id(value.resumption), id(value.compiled)  # plans are used again
        if (number := self._numbers.get(key)) is not None:
            return number
        number, captures = len(self._specs), tuple(value.plan.captures)
        self._numbers[key] = number
        self._specs.append((value, captures))  # and its parts: nothing else has their ids
        self._weights += sum(count_weights(capture.reduction.project) for capture in captures)
        return number, vars(value), captures

    def get(self, reference: CaptureNumber) -> Capture:
        """The capture of a result."""
        spec, capture = reference
        return self._specs[spec][1][capture]


class WorkerReferences(References):
    """The specs that the server has sent; with number 0 it begins anew, and all others are forgotten."""

    def __init__(self) -> None:
        self._specs: list[ForwardSpec] = []
        self._captures: dict[Capture, CaptureNumber] = {}

    def find(self, value: object) -> CaptureNumber | None:
        """The number of a capture of a spec that has one."""
        return self._captures.get(value) if type(value) is Capture else None

    def get(self, reference: Any) -> ForwardSpec:
        """The spec of a number, which may be new."""
        if isinstance(reference, int):
            return self._specs[reference]
        number, parts, captures = reference
        if number == 0:
            self._specs.clear()
            self._captures.clear()
        spec = ForwardSpec(**parts)
        self._specs.append(spec)
        self._captures |= {capture: (number, index) for index, capture in enumerate(captures)}
        return spec

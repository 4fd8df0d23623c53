"""References that the server and a worker share: specs, each sent once, and captures, sent as numbers."""

from __future__ import annotations

from typing import Any

from layertap.models.selection.plan import Capture
from layertap.models.selection.projections import count_weights
from layertap.service.engine.execute.processes.channel import References
from layertap.service.engine.prepared_request import ForwardSpec

MAX_SPECS = 64  # that a worker keeps when it gets a batch
MAX_WEIGHTS = 2**26  # numbers of their projections: 256 MiB
Captures = tuple[Capture, ...]  # of a spec, in the order of one process: a set's order differs in another
Key = tuple[int, int, int, int]
CaptureNumber = tuple[int, int]  # the spec's number, and the index among its captures


class ServerReferences(References):
    """The specs that a worker has received. Results come back under the numbers of captures."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._specs: list[tuple[ForwardSpec, Captures]] = []
        self._weights = 0

    def clear(self) -> None:
        """Forget all specs; the worker forgets its own when it receives the next one."""
        self._numbers.clear()
        self._specs.clear()
        self._weights = 0

    @property
    def is_full(self) -> bool:
        """Whether to call ``clear`` before the next batch."""
        return len(self._specs) >= MAX_SPECS or self._weights > MAX_WEIGHTS

    def find(self, value: object) -> Any:
        """The number of a spec; the first time, with its content.

        A spec with interventions or an objective is never used again, and may have large tensors: it is sent as it is.
        """
        if type(value) is not ForwardSpec or value.plan.resolved_interventions or value.plan.objective is not None:
            return None
        key = id(value.plan), id(value.verified_by), id(value.resumption), id(value.compiled)  # plans are used again
        if (number := self._numbers.get(key)) is not None:
            return number
        number, captures = len(self._specs), tuple(value.plan.captures)
        self._numbers[key] = number
        self._specs.append((value, captures))  # keeps the parts alive, so that their ids stay unique
        self._weights += sum(count_weights(capture.reduction.project) for capture in captures)
        return number, vars(value), captures

    def get(self, reference: CaptureNumber) -> Capture:
        """The capture of a result."""
        spec, capture = reference
        return self._specs[spec][1][capture]


class WorkerReferences(References):
    """The specs that the server has sent; a spec with number 0 replaces all earlier ones."""

    def __init__(self) -> None:
        self._specs: list[ForwardSpec] = []
        self._captures: dict[Capture, CaptureNumber] = {}

    def find(self, value: object) -> CaptureNumber | None:
        """The number of a capture, if its spec has one."""
        return self._captures.get(value) if type(value) is Capture else None

    def get(self, reference: Any) -> ForwardSpec:
        """The spec of a reference, stored if it is new."""
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

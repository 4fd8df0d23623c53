"""A batch as a forward takes it, and what comes of it: plain data, which may go to another process and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from layertap.models.capture.joined_rows import JoinedRows
from layertap.models.capture.reduction import ReducedTensor
from layertap.models.catalog.catalog import Catalog
from layertap.models.compiled.compiled_plan import CompiledPlan
from layertap.models.errors import LayertapError
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.plan import Capture, Plan
from layertap.service.engine.rows.rows import Rows
from layertap.service.inputs.items import ImageItem

Results = dict[Capture, ReducedTensor]
Interval = tuple[float, float]


@dataclass(frozen=True, eq=False)
class ForwardSpec:
    """What a request wants of its forwards, the same for all of its rows.

    ``resumption`` and ``compiled`` are the same for all that wait in a queue. Where outputs are put back to see whether
    the model's own come out again, ``verified_by`` is the catalogue that tells how.
    """

    plan: Plan
    verified_by: Catalog | None = None
    resumption: Resumption | None = None
    compiled: CompiledPlan | None = None


class UndecodedError(RuntimeError):
    """A picture that its batch was to decode could not be; ``refusal`` says why.

    ``row`` is its number in the request; None where it is one of several, and not known which.
    """

    def __init__(self, refusal: LayertapError, row: int | None = None) -> None:
        super().__init__(refusal, row)  # what it is made of again in another process
        self.refusal = refusal
        self.row = row


@dataclass(frozen=True, eq=False)
class ForwardSlice:
    """Rows ``start`` to ``stop`` of the job at a place among those of a batch.

    ``joined`` takes their results to those of its other rows. ``inputs`` holds just these rows; in their place there
    may be the pictures that become them, ``encoded``.
    ``first_row`` is the number in the request of the job's first row.
    """

    place: int
    start: int
    stop: int
    inputs: Rows
    spec: ForwardSpec
    joined: JoinedRows | None = None
    encoded: tuple[ImageItem, ...] = ()
    first_row: int = 0

    @property
    def rows(self) -> int:
        """How many rows these are."""
        return self.stop - self.start

    def take(self, start: int, stop: int) -> ForwardSlice:
        """Some of its rows, by their numbers in the request."""
        first, last = start - self.start, stop - self.start
        inputs = {name: value[first:last] for name, value in self.inputs.items()}
        return replace(self, start=start, stop=stop, inputs=inputs)

    def keep(self, start: int, stop: int, results: Results) -> Results:
        """The job's results, with those of some of these rows among them."""
        return results if self.joined is None else self.joined.add(start, stop, results)


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """Rows that share a forward, on so many ``threads`` of a CPU.

    Where only one row is left of several, it has a forward on ``threads_alone``: other threads would make other bits.
    With ``padded_rows`` the forward has so many rows; one that is ``unsplittable`` has all rows or fails. Nobody waits
    for it beyond ``deadline``, in seconds on the clock of ``time.monotonic``.
    """

    slices: tuple[ForwardSlice, ...]
    threads: int
    threads_alone: int
    padded_rows: int | None = None
    unsplittable: bool = False
    deadline: float = math.inf

    @property
    def rows(self) -> int:
        """Rows of requests; padding is not counted."""
        return sum(each.rows for each in self.slices)


@dataclass(frozen=True)
class SliceResult:
    """What became of rows ``start`` to ``stop`` of the request at a place: their results, or why there are none.

    Results are in the host's memory, and may be the whole job's, with rows that are not there yet. ``rows`` shared the
    forward. ``forward``, ``copy`` to the host, and ``decode`` where that was part of it, began and ended then, on the
    clock of ``time.perf_counter``, in seconds.
    """

    place: int
    start: int
    stop: int
    results: Results | LayertapError | RuntimeError
    rows: int
    forward: Interval = (0.0, 0.0)
    copy: Interval = (0.0, 0.0)
    decode: Interval = (0.0, 0.0)


@dataclass(frozen=True)
class BatchFailures:
    """What went wrong: forwards without enough memory, how often the batch was split for that, and for other errors.

    ``too_many_rows``: rows that memory does not hold, though it holds each of them.
    """

    out_of_memory: int = 0
    memory_splits: int = 0
    error_splits: int = 0
    too_many_rows: int | None = None


@dataclass(frozen=True)
class BatchOutcome:
    """What became of a batch: one result or several for each slice.

    ``failure`` says why nothing can be answered any more, where that is so.
    """

    results: list[SliceResult] = field(default_factory=list)
    failures: BatchFailures = BatchFailures()
    failure: str = ""

    @property
    def decode_seconds(self) -> float:
        """How long its pictures were decoded."""
        return sum(end - begin for begin, end in {result.decode for result in self.results})

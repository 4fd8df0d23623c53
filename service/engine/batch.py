"""Plain data passed between the server and its workers: jobs, batches and their results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torch import Tensor

from layertap.models.errors import Fault, LayertapError, OtherForwardError, RequestError, TooLargeError
from layertap.models.inputs.model_inputs import read_mask
from layertap.models.plan.plan import Capture, Plan
from layertap.models.run.batch_slices import JoinedRows
from layertap.models.run.reduction import ReducedArray
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.prepared_request import ForwardSpec, PreparedRequest
from layertap.service.engine.rows import Origin, Rows
from layertap.service.inputs.items import EncodedItem
from layertap.service.timings import Timings
from layertap.service.types import BatchReason, Priority

LOST_DEVICE = "a device gives nothing but errors"
CPU = "cpu"  # the device on which pictures are decoded
Results = dict[Capture, ReducedArray]
Interval = tuple[float, float]
NEVER: Interval = (0.0, 0.0)  # of a forward that failed, or of decoding where nothing was decoded


class UndecodedError(RuntimeError):
    """A picture that its batch should decode is bad; ``refusal`` says why.

    ``row`` is its number in the request; None if it is unknown which of several pictures is bad.
    """

    def __init__(self, refusal: LayertapError, row: int | None = None) -> None:
        super().__init__(refusal, row)  # the arguments to unpickle it with
        self.refusal = refusal
        self.row = row


@dataclass(eq=False)
class Job:
    """Rows of a prepared request, with the results of their forwards. The batcher sets the times on its own clock."""

    prepared: PreparedRequest
    rows: int
    priority: Priority = "interactive"
    deadline: float = math.inf
    inputs: Rows = field(default_factory=dict)
    encoded: tuple[EncodedItem, ...] = ()  # instead of ``inputs``: pictures that the batch decodes, one per row
    first_row: int = 0  # the first row's number in the request
    work_rows: int = 0  # rows of all jobs of a request that queues a few at a time
    joined: JoinedRows | None = None  # the results of several forwards

    answer: asyncio.Future[Results] = field(init=False)  # done when ``missing_rows`` is 0
    parts: list[SliceResult] = field(init=False)  # results of its forwards so far
    missing_rows: int = field(init=False)
    waiting_rows: int = field(init=False)  # in no batch yet
    enqueued_at: float = 0.0
    due_at: float = 0.0  # the job with the least is first
    slowdown: float = 1.0  # measured seconds of its last batch, divided by the expected ones

    # For the reply
    timings: Timings = field(default_factory=Timings)
    faults: tuple[Fault, ...] = ()  # of inputs that were left out
    input_index: int | None = None  # if each input is a separate job
    tokens: int = 0  # in its texts, without padding
    cut: tuple[int, ...] = ()  # how many tokens of each text, or samples of each sound, were left out
    origins: tuple[Origin, ...] = ()  # where rows of sounds and videos are from
    warnings: tuple[str, ...] = ()
    # Makes the job of the same rows, never run, for a forward that makes other numbers of calls.
    plan_again: Callable[[OtherForwardError], Awaitable[Job]] | None = None

    def __post_init__(self) -> None:
        self.waiting_rows = self.missing_rows = self.rows
        self.parts = []

    def add(self, result: SliceResult) -> None:
        """Store the results of some rows: the first error, or the last rows, set the answer."""
        self.parts.append(result)
        outcome = result.results
        self.missing_rows -= result.stop - result.start
        if isinstance(outcome, (RequestError, TooLargeError)) and self.input_index is not None:
            outcome = outcome.of_input(self.input_index)
        if isinstance(outcome, Exception):
            self.fail(outcome)
        elif not self.missing_rows:
            self.answer.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Set the answer to an error, if there is none yet."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def with_plan(self, **changes: Any) -> Job:
        """The same rows with other fields of its plan."""
        return replace(self, prepared=self.prepared.with_plan(**changes))

    @property
    def plan(self) -> Plan:
        """What its forwards compute."""
        return self.prepared.spec.plan

    @property
    def token_mask(self) -> Tensor | None:
        """True for tokens, False for padding; None if rows have no mask."""
        name = self.prepared.mask
        return read_mask(name, self.inputs[name]) if name is not None and name in self.inputs else None

    @property
    def nbytes(self) -> int:
        """Bytes of its rows, of its results and of their text in the reply."""
        plan = self.prepared.spec.plan
        size = plan.nbytes(self.rows) + self.prepared.reply_bytes
        for capture in plan.extra:
            size += capture.nbytes(self.rows)
        for value in self.inputs.values():
            size += value.nbytes
        return size


@dataclass(eq=False)
class RowSlice:
    """Rows ``start`` to ``stop`` of a job."""

    job: Job
    start: int
    stop: int
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.stop - self.start

    @property
    def inputs(self) -> Rows:
        """The rows' inputs; views."""
        return {name: value[self.start : self.stop] for name, value in self.job.inputs.items()}

    @property
    def spec(self) -> ForwardSpec:
        """What the forward computes for them."""
        return self.job.prepared.spec

    @property
    def encoded(self) -> tuple[EncodedItem, ...]:
        """The pictures that become these rows."""
        return self.job.encoded[self.start : self.stop]

    @property
    def first_row(self) -> int:
        """The first row's number in the request."""
        return self.job.first_row + self.start


@dataclass(eq=False)
class Batch:
    """Rows that share a forward; if pictures are decoded first, others may join until it begins."""

    key: BatchKey
    device: str
    slices: tuple[RowSlice, ...]
    slots: int  # of its ``device``
    single_row_slots: int  # that one of its rows would take
    depth: float  # of its deepest request
    seconds: float  # expected
    reason: BatchReason  # why it has these rows
    padded_rows: int | None = None  # to which its forward is padded
    tries: int = 0  # how often its process died before
    rows: int = field(init=False, default=0)  # without padding
    deadline: float = field(init=False, default=-math.inf)  # the latest of its jobs, as ``time.monotonic``

    def __post_init__(self) -> None:
        self._count(self.slices)

    def grow(self, slices: Sequence[RowSlice]) -> None:
        """Add slices to it."""
        self.slices += tuple(slices)
        self._count(slices)

    @property
    def unsplittable(self) -> bool:
        """Whether it must run in one forward."""
        return self.slices[0].job.prepared.unsplittable

    def take(self, slices: Sequence[RowSlice], tries: int = 0) -> Batch:
        """A batch of some of its slices."""
        is_single = sum(map(attrgetter("rows"), slices)) == 1
        return replace(
            self,
            slices=tuple(slices),
            slots=self.single_row_slots if is_single else self.slots,
            tries=tries,
            reason="isolated",
        )

    def _count(self, slices: Sequence[RowSlice]) -> None:
        for each in slices:
            self.rows += each.rows
            self.deadline = max(self.deadline, each.job.deadline)


@dataclass(frozen=True)
class SliceResult:
    """Results of rows ``start`` to ``stop`` of a job, or their error."""

    index: int  # of the slice in the batch
    start: int
    stop: int
    results: Results | LayertapError | RuntimeError  # in host memory; may be the whole job's, with rows still missing
    rows: int  # in the forward
    forward: Interval = NEVER  # on the clock of ``time.perf_counter``
    copy: Interval = NEVER  # to the host
    decode: Interval = NEVER

    @property
    def nbytes(self) -> int:
        """Bytes of its results."""
        if isinstance(self.results, Exception):
            return 0
        scales = [each.scale for each in self.results.values() if each.scale is not None]
        return sum(each.values.nbytes for each in self.results.values()) + sum(each.nbytes for each in scales)


@dataclass
class BatchFailures:
    """Failures of a batch: forwards out of memory, splits because of memory, and splits because of other errors.

    ``too_many_rows``: the size of a batch that ran out of memory although its rows fit one by one.
    """

    out_of_memory: int = 0
    memory_splits: int = 0
    error_splits: int = 0
    too_many_rows: int | None = None


@dataclass(frozen=True)
class LastingFailure:
    """Why a model can't answer any more in this process; ``of_device``: no other model of the process can, either.

    ``ended``: where something of the model hangs, done once that has ended after all; until then it holds its thread
    and its slots.
    """

    reason: str
    of_device: bool = False
    ended: asyncio.Future[Any] | None = None


@dataclass(frozen=True)
class BatchResult:
    """Outcome of a batch: one result or several for each slice that is not in ``again``; none if it hangs.

    ``again``: batches to rerun because their process died. ``failure``: why the model can't answer any more, if so.
    ``crossing``: which layer showed that rows of this model affect each other, if one did.
    """

    results: Sequence[SliceResult] = ()
    failures: BatchFailures = field(default_factory=BatchFailures)
    failure: LastingFailure | None = None
    again: Sequence[Batch] = ()
    crossing: str = ""

    @property
    def decode_seconds(self) -> float:
        """How long decoding its pictures took."""
        seconds = 0.0
        for begin, end in set(map(attrgetter("decode"), self.results)):
            seconds += end - begin
        return seconds

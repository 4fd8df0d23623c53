"""A server of one model: the real batcher, with simulated time, processor, front, decoding and forwards."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from bench.policy.models import SimulatedModel
from bench.policy.processor import Processor
from bench.policy.rules import RETURN_S, Expected, Rule
from layertap.service.engine.batch import CPU, Batch, Job
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.prepared_request import PreparedRequest
from layertap.service.engine.schedule.batcher import Batcher
from layertap.service.engine.schedule.waiting import DeviceSlots, SlotWait
from layertap.service.types import Priority

MODEL = "model"
MAX_ROWS = 64
CAPTURED_BYTES_PER_S = 1e9  # reduced, copied and kept
SPREAD = 0.1  # of every time that something takes: the deviation of its logarithm
Callback = Callable[[], None]


@dataclass(eq=False)
class SimulatedRequest:
    """Pictures on their way: when they were sent, and what their client does with the answer.

    ``row_bytes``: what is captured of each.
    """

    priority: Priority
    sent_at: float
    on_reply: Callback = lambda: None
    rows: int = 1
    row_bytes: int = 0
    answered_rows: int = 0


@dataclass(eq=False, kw_only=True)
class Picture(SlotWait):
    """What is decoded for a request before it has a batch."""

    request: SimulatedRequest


@dataclass(eq=False)
class RunningBatch:
    """A batch that a replica works on: since when, how many of its rows are decoded, how long its forward may wait."""

    batch: Batch
    started_at: float
    decoded_rows: int
    wait_until: float | None = None  # of one that waits for others, or has waited


@dataclass
class Record:
    """What has come of it: seconds until each answer, answered rows, and forwards by their rows as they begin.

    ``seconds`` are by priority, those of requests of several rows in ``large_seconds``.
    """

    seconds: dict[Priority, list[float]] = field(default_factory=lambda: {"interactive": [], "bulk": []})
    large_seconds: list[float] = field(default_factory=list)
    rows: int = 0
    forwards: Counter[int] = field(default_factory=Counter)


class SimulatedServer:
    """Time passes in ``run``; what is sent is answered by and by, and ``record`` tells how soon."""

    def __init__(self, model: SimulatedModel, rule: Rule, cores: int, seed: int) -> None:
        self.now = 0.0
        self.record = Record()
        self.random = Random(seed)
        self._model = model
        self._rule = rule
        self._batcher = Batcher({CPU: DeviceSlots(cores)}, lambda: self.now)
        self._key = BatchKey(MODEL, (CPU,), model.costs, MAX_ROWS)
        self._cores = cores
        self._processor = Processor(cores)
        self._idle_replicas = cores
        self._arriving = 0  # requests that have been sent, and not received
        self._requests: dict[Job, SimulatedRequest] = {}
        self._waiting_batches: list[RunningBatch] = []  # decoded, and not in their forward
        self._running_rows = 0
        self._returning: deque[float] = deque()  # answers after which no request has come, until they count no more
        self._callbacks: deque[tuple[float, Callback]] = deque()  # of the front; the first one runs
        self._timers: list[tuple[float, int, Callback]] = []
        self._timer_numbers = itertools.count()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            next_timer = self._timers[0][0] if self._timers else end
            step = max(min(self._processor.seconds_to_next_end, next_timer - self.now, end - self.now), 0.0)
            self.now += step
            self._processor.advance(step)
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()

    def call_at(self, moment: float, callback: Callback) -> None:
        """Call something later."""
        heapq.heappush(self._timers, (moment, next(self._timer_numbers), callback))

    def vary(self, seconds: float) -> float:
        """About so many seconds."""
        return seconds * self.random.lognormvariate(0, SPREAD)

    def send(self, request: SimulatedRequest) -> None:
        """A request has arrived at the server's socket."""
        self._arriving += 1
        self._call_soon(self._model.receive, partial(self._receive, request))

    # The front's event loop: one thing after the other

    def _call_soon(self, seconds: float, callback: Callback) -> None:
        self._callbacks.append((seconds, callback))
        if len(self._callbacks) == 1:
            self._run_callback()

    def _run_callback(self) -> None:
        self._processor.run(self.vary(self._callbacks[0][0]), self._end_callback)

    def _end_callback(self) -> None:
        self._callbacks[0][1]()
        self._callbacks.popleft()
        if self._callbacks:
            self._run_callback()

    # The road of a request

    def _receive(self, request: SimulatedRequest) -> None:
        self._arriving -= 1
        if self._returning:
            self._returning.popleft()
        if self._rule.grows:
            self._enqueue(request)
        else:
            self._batcher.add_wait(Picture(request.priority, request=request))
        self._dispatch()

    def _end_decode(self, picture: Picture) -> None:
        self._batcher.finish(picture, self._model.decode * picture.request.rows)
        self._enqueue(picture.request)
        self._dispatch()

    def _enqueue(self, request: SimulatedRequest) -> None:
        queued = Job(PreparedRequest(key=self._key, row_bytes=request.row_bytes), request.rows, request.priority)
        self._requests[queued] = request
        self._batcher.add(queued)

    def _reply(self, request: SimulatedRequest) -> None:
        seconds = self.record.large_seconds if request.rows > 1 else self.record.seconds[request.priority]
        seconds.append(self.now - request.sent_at)
        self._returning.append(self.now + RETURN_S)
        self.call_at(self.now + RETURN_S, self._dispatch)
        request.on_reply()

    def _dispatch(self) -> None:
        """Let batches that wait go on, and start what may start."""
        waiting, self._waiting_batches = self._waiting_batches, []
        for running in waiting:
            self._continue(running)
        while (task := self._batcher.start_next({MODEL: {CPU: self._idle_replicas}})) is not None:
            if isinstance(task, Batch):
                self._start(task)
            elif isinstance(task, Picture):
                seconds = self._model.decode * task.request.rows
                self._processor.run(self.vary(seconds), partial(self._end_decode, task))

    # The road of a batch

    def _start(self, batch: Batch) -> None:
        self._idle_replicas -= 1
        self._running_rows += batch.rows
        self._continue(RunningBatch(batch, self.now, decoded_rows=0 if self._rule.grows else batch.rows))

    def _continue(self, running: RunningBatch) -> None:
        """Decode the next picture of a batch; run the forward once all are, nothing joins and it waits for nothing."""
        if self._rule.grows and running.decoded_rows == running.batch.rows:
            self._extend(running)
        if running.decoded_rows < running.batch.rows:
            self._processor.run(self.vary(self._model.decode), partial(self._end_decode_in_batch, running))
        elif self._waits(running):
            self._waiting_batches.append(running)
        else:
            self._run_forward(running)

    def _extend(self, running: RunningBatch) -> None:
        rows = running.batch.rows
        self._batcher.extend(running.batch)
        self._running_rows += running.batch.rows - rows

    def _end_decode_in_batch(self, running: RunningBatch) -> None:
        running.decoded_rows += 1
        self._continue(running)
        self._dispatch()  # a batch of several rows may need fewer slots than one of a single row

    def _waits(self, running: RunningBatch) -> bool:
        """Whether a batch's forward waits for rows that are expected, of which each batch has its share."""
        while self._returning and self._returning[0] <= self.now:
            self._returning.popleft()
        expected = self._rule.count_expected(Expected(self._arriving, len(self._returning)))
        share = (self._running_rows + expected) / self._cores
        if not expected or running.batch.rows >= min(share, self._key.efficient_rows):
            return False
        if running.wait_until is None:
            seconds = self._model.costs.base if self._rule.seconds is None else self._rule.seconds
            running.wait_until = self.now + seconds
            self.call_at(running.wait_until, self._dispatch)
        return self.now < running.wait_until

    def _run_forward(self, running: RunningBatch) -> None:
        batch = running.batch
        self.record.forwards[batch.rows] += 1
        seconds = self._model.costs.estimate_seconds(batch.rows)
        if batch.slots > 1:
            seconds /= self._model.costs.speedup
        seconds += sum(each.rows * each.job.prepared.row_bytes for each in batch.slices) / CAPTURED_BYTES_PER_S
        self._processor.run(self.vary(seconds), partial(self._end_batch, running), batch.slots)

    def _end_batch(self, running: RunningBatch) -> None:
        decode_seconds = self._model.decode * running.batch.rows if self._rule.grows else 0.0
        self._batcher.finish(running.batch, self.now - running.started_at, decode_seconds)
        self._idle_replicas += 1
        self._running_rows -= running.batch.rows
        for row_slice in running.batch.slices:
            request = self._requests[row_slice.job]
            self.record.rows += row_slice.rows
            request.answered_rows += row_slice.rows
            if request.answered_rows == request.rows:
                del self._requests[row_slice.job]
                self._call_soon(self._model.reply, partial(self._reply, request))
        self._dispatch()

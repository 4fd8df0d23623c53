"""A server of one model: the real batcher, with simulated time, processor, event loop, decoders and forwards."""

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
from layertap.service.engine.batch import CPU, Batch, BatchQueue, DecodeTask, DeviceSlots, QueuedRequest
from layertap.service.engine.batcher import Batcher
from layertap.service.types import Priority

MODEL = "model"
MAX_ROWS = 64
SPREAD = 0.1  # of every time that something takes: the deviation of its logarithm
Callback = Callable[[], None]


@dataclass(eq=False)
class SimulatedRequest:
    """A picture on its way: when it was sent, and what its client does with the answer."""

    priority: Priority
    sent_at: float
    on_reply: Callback = lambda: None


@dataclass(eq=False, kw_only=True)
class Picture(DecodeTask):
    """What is decoded for a request."""

    request: SimulatedRequest


@dataclass
class Record:
    """What has come of it: seconds until each answer, by priority, and forwards by their rows."""

    seconds: dict[Priority, list[float]] = field(default_factory=lambda: {"interactive": [], "bulk": []})
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
        self._queue = BatchQueue(MODEL, CPU, model.costs, MAX_ROWS)
        self._processor = Processor(cores)
        self._idle_replicas = cores
        self._pictures = 0  # received, and not decoded
        self._requests: dict[QueuedRequest, SimulatedRequest] = {}
        self._held: list[tuple[float, SimulatedRequest]] = []  # rows, since when
        self._returning: deque[float] = deque()  # answers after which no request has come, until they count no more
        self._callbacks: deque[tuple[float, Callback]] = deque()  # of the event loop; the first one runs
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
        self._call_soon(self._model.receive, partial(self._receive, request))

    # The event loop: one thing after the other

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
        if self._returning:
            self._returning.popleft()
        self._pictures += 1
        self._batcher.add_decode(Picture(request.priority, request=request))
        self._dispatch()

    def _end_decode(self, picture: Picture) -> None:
        self._pictures -= 1
        self._batcher.finish(picture, self._model.decode)
        self._held.append((self.now, picture.request))
        self._dispatch()

    def _enqueue(self, request: SimulatedRequest) -> None:
        queued = QueuedRequest(self._queue, 1, priority=request.priority)
        self._requests[queued] = request
        self._batcher.add(queued)

    def _end_batch(self, batch: Batch, started: float) -> None:
        self._batcher.finish(batch, self.now - started)
        self._idle_replicas += 1
        for row_slice in batch.slices:
            self._returning.append(self.now + RETURN_S)
            self._call_soon(self._model.reply, partial(self._reply, self._requests.pop(row_slice.request)))
        self._dispatch()

    def _reply(self, request: SimulatedRequest) -> None:
        self.record.seconds[request.priority].append(self.now - request.sent_at)
        request.on_reply()

    # What starts

    def _dispatch(self) -> None:
        self._release_held()
        while (task := self._batcher.start_next({MODEL: self._idle_replicas})) is not None:
            if isinstance(task, Batch):
                self._start_batch(task)
            elif isinstance(task, Picture):
                self._processor.run(self.vary(self._model.decode), partial(self._end_decode, task))

    def _release_held(self) -> None:
        """Give the batcher the rows that are held back, if it is time, and come again when it is if not."""
        if not self._held:
            return
        while self._returning and self._returning[0] <= self.now:
            self._returning.popleft()
        costs, expected = self._model.costs, Expected(self._pictures, len(self._returning))
        release_at = self._held[0][0] + self._rule.get_hold_seconds(costs.base, expected)
        others_wait = self._batcher.count_waiting_rows(MODEL) > 0
        if others_wait or release_at <= self.now or len(self._held) >= self._queue.efficient_rows:
            for _, request in self._held:
                self._enqueue(request)
            self._held.clear()
        else:
            self.call_at(release_at, self._dispatch)

    def _start_batch(self, batch: Batch) -> None:
        self._idle_replicas -= 1
        self.record.forwards[batch.rows] += 1
        seconds = self.vary(self._model.costs.estimate_seconds(batch.rows))
        if batch.slots > 1:
            seconds /= self._model.costs.speedup
        self._processor.run(seconds, partial(self._end_batch, batch, self.now), batch.slots)

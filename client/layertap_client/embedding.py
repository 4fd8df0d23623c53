"""Many inputs, some in each request: batches, what became of them, and their order; no input or output here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from layertap_client.arrays import Array
from layertap_client.bodies import MEDIA_TYPES, build_items_request
from layertap_client.errors import (
    Fault,
    FingerprintChangedError,
    InputError,
    InvalidRequestError,
    ProblemError,
    TooLargeError,
)
from layertap_client.exchange import Session
from layertap_client.inputs import AnyItem, Input, Item, read_item
from layertap_client.messages import Compute, Request, Steps
from layertap_client.pace import Pace
from layertap_client.results import Result, read_result

AHEAD = 2  # times as many batches as are under way may wait for one that is slow
MAX_GROUPS = 1024  # kinds of input whose fingerprint is remembered
HEADERS = {"Accept": MEDIA_TYPES["safetensors"]}
OF_INPUT = re.compile(r"/inputs/(\d{1,9})(?:/|$)")  # where in a JSON body an input stands


@dataclass(frozen=True)
class Embedded:
    """What became of one input: its arrays, without an axis of rows, or why there are none.

    ``index`` is its place among all inputs, from 0. Arrays are views that share memory with those of their batch.
    """

    index: int
    arrays: Mapping[str, Array] = field(default_factory=dict)
    fingerprint: str = ""
    error: Fault | None = None

    @property
    def vector(self) -> Array:
        """The only array; ValueError where there are several, or none."""
        if len(self.arrays) != 1:
            why = self.error or ", ".join(self.arrays)
            raise ValueError(f"input {self.index} has {len(self.arrays)} arrays: {why}")
        return next(iter(self.arrays.values()))


@dataclass(frozen=True)
class Batch:
    """Inputs of one request by their places, and those that could not be read; ``number`` counts batches."""

    number: int
    items: tuple[tuple[int, AnyItem], ...]
    unreadable: tuple[Embedded, ...] = ()
    group: object = None


@dataclass(frozen=True)
class BatchOutcome:
    """What became of a batch's inputs; ``largest`` is how many went at once where more were too large."""

    batch: Batch
    embedded: tuple[Embedded, ...]
    refusals: int = 0
    largest: int | None = None


@dataclass
class BatchBuilder:
    """Makes batches of inputs as they come: of one kind, of at most the pace's rows and bytes."""

    pace: Pace
    count: int = 0
    _batches: int = 0
    _items: list[tuple[int, AnyItem]] = field(default_factory=list)
    _unreadable: list[Embedded] = field(default_factory=list)
    _bytes: int = 0
    _group: object = None

    def add(self, value: Input) -> Batch | None:
        """Take an input; reads it, which may take a while. A batch where one is full."""
        place, self.count = self.count, self.count + 1
        try:
            item = read_item(value)
        except Exception as error:  # whatever a broken picture or file raises: it is one input of many
            self._unreadable.append(Embedded(place, error=Fault(str(error) or type(error).__name__, input=place)))
            return self.finish() if len(self._unreadable) >= self.pace.max_rows else None
        group = _find_group(item)
        full = None
        too_many = len(self._items) >= self.pace.rows or self._bytes + item.nbytes > self.pace.max_bytes
        if self._items and (group != self._group or too_many):
            full = self.finish()
        self._items.append((place, item))
        self._bytes += item.nbytes
        self._group = group
        return full or (self.finish() if len(self._items) >= self.pace.rows else None)

    def finish(self) -> Batch | None:
        """What was taken and is in no batch yet; None where there is nothing."""
        if not self._items and not self._unreadable:
            return None
        batch = Batch(self._batches, tuple(self._items), tuple(self._unreadable), self._group)
        self._batches += 1
        self._items, self._unreadable, self._bytes = [], [], 0
        return batch


@dataclass
class EmbeddingScheduler:
    """Which batch is sent when, and which results are next; a driver sends and waits.

    At most ``pace.requests`` batches are under way, and twice as many are in memory.
    """

    session: Session
    fields: Mapping[str, Any]
    timeout: float
    silence_s: float
    pace: Pace
    clock: Callable[[], float]
    exhausted: bool = False
    running: int = 0
    failed: int = 0
    _next: int = 0  # the batch whose results come next
    _ready: dict[int, tuple[Embedded, ...]] = field(default_factory=dict)
    _fingerprints: dict[object, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = BatchBuilder(self.pace)

    @property
    def can_start(self) -> bool:
        """Whether another batch may be sent now."""
        waiting = self.running + len(self._ready)
        return not self.exhausted and self.running < self.pace.requests and waiting < AHEAD * self.pace.requests

    def pull(self, source: Iterator[Input]) -> Batch | None:
        """The next batch of a source; None where it has come to its end. Reads inputs, so it may take a while."""
        for value in source:
            if batch := self.builder.add(value):
                return batch
        return self.end()

    def end(self) -> Batch | None:
        """The last batch, where the source has come to its end."""
        self.exhausted = True
        return self.builder.finish()

    def send(self, batch: Batch) -> Steps[BatchOutcome]:
        """The steps that a batch takes."""
        self.running += 1
        return self._send(batch)

    def finish(self, outcome: BatchOutcome) -> None:
        """Take note of what became of a batch; FingerprintChangedError."""
        self.running -= 1
        for each in outcome.embedded:
            if each.fingerprint:
                self._check_fingerprint(outcome.batch.group, each.fingerprint)
            self.failed += each.error is not None
        everything = (*outcome.embedded, *outcome.batch.unreadable)
        self.failed += len(outcome.batch.unreadable)
        self._ready[outcome.batch.number] = tuple(sorted(everything, key=lambda each: each.index))
        if outcome.batch.items:
            self.pace.record(len(outcome.batch.items), outcome.refusals, self.clock())
        if outcome.largest is not None:
            self.pace.shrink(outcome.largest)

    def pop_ready(self) -> Iterator[Embedded]:
        """Results that are next in order."""
        while self._next in self._ready:
            self._next += 1
            yield from self._ready.pop(self._next - 1)

    def _send(self, batch: Batch) -> Steps[BatchOutcome]:
        if not batch.items:
            return BatchOutcome(batch, ())
        return (yield from self._send_items(batch, batch.items))

    def _send_items(self, batch: Batch, items: tuple[tuple[int, AnyItem], ...]) -> Steps[BatchOutcome]:
        """A request for some items; again without those that are bad, or in halves where they are too much."""
        build = Compute(lambda: build_items_request("/extract", [item for _, item in items], self.fields, HEADERS))
        request: Request = yield build
        try:
            reply = yield from self.session.exchange(request, self.timeout, self.silence_s)
        except ProblemError as error:
            if bad := _find_bad(error, items):
                rest = tuple(entry for entry in items if entry[0] not in bad)
                others = (yield from self._send_items(batch, rest)) if rest else BatchOutcome(batch, ())
                return replace(others, embedded=(*bad.values(), *others.embedded))
            if not isinstance(error, TooLargeError) and error.status != 500:
                raise
            if len(items) == 1:
                return BatchOutcome(batch, (_fail(items[0][0], error),))
            half = len(items) // 2
            first = yield from self._send_items(batch, items[:half])
            second = yield from self._send_items(batch, items[half:])
            largest = half if isinstance(error, TooLargeError) else None
            return replace(first, embedded=first.embedded + second.embedded, largest=first.largest or largest)
        result = read_result(reply)
        return BatchOutcome(batch, tuple(_split_rows(result, [place for place, _ in items])), reply.refusals)

    def _check_fingerprint(self, group: object, fingerprint: str) -> None:
        if fingerprint.startswith("unrepeatable-"):
            raise FingerprintChangedError("the model is not deterministic: no two of its vectors can be compared")
        known = self._fingerprints.get(group)
        if known is None and len(self._fingerprints) < MAX_GROUPS:
            self._fingerprints[group] = fingerprint
        if known not in (None, fingerprint):
            raise FingerprintChangedError(
                f"vectors have fingerprint {fingerprint} now and had {known} before: the server's model is another one"
            )


def _find_bad(error: ProblemError, items: tuple[tuple[int, AnyItem], ...]) -> dict[int, Embedded]:
    """The inputs that a refusal is of, by their places; none where it is of the request."""
    placed = [(_find_place(fault), fault) for fault in error.faults]
    faults = {place: fault for place, fault in placed if place is not None and place < len(items)}
    if not isinstance(error, InvalidRequestError | TooLargeError) or not faults:
        return {}
    if any(place not in faults for place, _ in placed):
        return {}
    named = {items[n][0]: Embedded(items[n][0], error=replace(f, input=items[n][0])) for n, f in faults.items()}
    if len(named) + error.more_faults < len(items):
        return named
    return {place: named.get(place) or _fail(place, error) for place, _ in items}


def _find_place(fault: Fault) -> int | None:
    """The input that a fault is of: by its place, or by where in the request it is, as of fields that no input has."""
    match = OF_INPUT.match(fault.pointer)
    return int(match[1]) if fault.input is None and match else fault.input


def _fail(place: int, error: ProblemError) -> Embedded:
    return Embedded(place, error=Fault(error.detail, error.hint, input=place))


def _split_rows(result: Result, places: list[int]) -> Iterator[Embedded]:
    """Each input's own part of a result, and the faults of those that were left out."""
    faults = {fault.input: fault for fault in result.errors}
    row = 0
    for n, place in enumerate(places):
        if n in result.skipped:
            fault = faults.get(n, Fault("the input was left out"))
            yield Embedded(place, error=replace(fault, input=place))
            continue
        arrays = {name: _take_row(name, array, result, row) for name, array in result.items()}
        yield Embedded(place, arrays, result.fingerprint)
        row += 1


def _take_row(name: str, array: Array, result: Result, row: int) -> Array:
    axis = result.receipts[name].get("row_axis", 0)
    if axis is None:
        return array
    if array.shape[axis] != result.rows:
        raise InputError(f"inputs of several shapes give no one array of {name!r}: pool it, or send one shape")
    view: Array = np.moveaxis(array, axis, 0)[row]
    return view


def _find_group(item: AnyItem) -> object:
    """What inputs of one request have in common, so that all have one fingerprint."""
    if not isinstance(item, Item):
        return "entry", tuple(sorted(item.fields))
    if isinstance(item.value, bytes) or item.value.dtype == np.uint8:
        return item.kind if isinstance(item.value, bytes) else "pixels"
    return item.value.shape, item.value.dtype.str

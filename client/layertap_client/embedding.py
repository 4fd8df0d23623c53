"""Batching many inputs into requests, and the outcome of each input; does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from layertap_client.arrays import Array, get_only
from layertap_client.bodies import SAFETENSORS, build_items_request
from layertap_client.errors import (
    Fault,
    FingerprintChangedError,
    InputError,
    InvalidRequestError,
    ProblemError,
    TooLargeError,
)
from layertap_client.exchange import Session
from layertap_client.inputs import Input, Item, read_item, to_plain
from layertap_client.messages import Compute, Request, Steps
from layertap_client.operations import LayerSpecs, list_layers
from layertap_client.results import Result, read_result

BATCH_SIZE, CONCURRENCY = 32, 8
MAX_BATCH_BYTES = 16 << 20
BODY_SHARE = 0.5  # of the server's limit fill a batch: the last input may be large
QUEUE_SHARE = 2  # of the server's queue half is left to others
TIMEOUT_S = 600.0  # for one batch with all attempts: a restart or an upgrade of the server is waited for
SILENCE_S = 30.0  # beyond the server's own deadline: then a connection is dead
MAX_GROUPS = 1024  # kinds of input whose fingerprint is remembered
HEADERS = {"Accept": SAFETENSORS}
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
        if self.error is not None:
            raise ValueError(f"input {self.index}: {self.error}")
        return get_only(self.arrays)


Items: TypeAlias = list[tuple[int, Item]]  # inputs by their places
Batch: TypeAlias = list[tuple[int, Item | Fault]]  # with those that could not be read


class Embedder:
    """Makes batches of inputs as they come, within a server's limits, and says what each takes.

    ``concurrency`` batches may be under way at once. TypeError for ``on_error``, which embedding does not have.
    """

    def __init__(
        self,
        session: Session,
        limits: Mapping[str, float],
        layers: LayerSpecs | None,
        options: Mapping[str, Any],
        *,
        batch_size: int,
        concurrency: int,
    ) -> None:
        if "on_error" in options:
            raise TypeError("embed() has no option 'on_error': each bad input is returned with its own error")
        named = {"model": session.model, "priority": "bulk", **options, "layers": list_layers(layers)}
        timeout = named.pop("timeout", None) or TIMEOUT_S
        self.session = replace(session, timeout=timeout, silence_s=limits["deadline_s"] + SILENCE_S)
        self.fields = {name: to_plain(value) for name, value in named.items() if value is not None}
        self.fields["on_error"] = "skip"
        self.rows = max(1, int(min(batch_size, limits["max_inputs"], limits["max_queue_rows"])))
        self.max_bytes = int(min(MAX_BATCH_BYTES, BODY_SHARE * limits["max_body_bytes"]))
        self.concurrency = max(1, min(concurrency, int(limits["max_queue_rows"]) // QUEUE_SHARE // self.rows))
        self._count = self._bytes = 0
        self._batch: Batch = []
        self._fingerprints: dict[object, str] = {}

    def add(self, value: Input) -> Batch:
        """Take an input; reads it, which may take a while. A batch where one is full, else nothing."""
        place, self._count = self._count, self._count + 1
        try:
            item = read_item(value)
        except Exception as error:  # whatever a broken picture or file raises: it is one input of many
            self._batch.append((place, Fault(str(error) or type(error).__name__, input=place)))
        else:
            self._batch.append((place, item))
            self._bytes += item.nbytes
        return self.finish() if len(self._batch) >= self.rows or self._bytes >= self.max_bytes else []

    def finish(self) -> Batch:
        """What was taken and is in no batch yet."""
        batch, self._batch, self._bytes = self._batch, [], 0
        return batch

    def pull(self, source: Iterator[Input]) -> Batch:
        """The next batch of a source; nothing where it has come to its end. Reads inputs, so it may take a while."""
        for value in source:
            if batch := self.add(value):
                return batch
        return self.finish()

    def send(self, batch: Batch) -> Steps[list[Embedded]]:
        """What becomes of a batch's inputs, in order; a request for each kind. FingerprintChangedError."""
        embedded = [Embedded(place, error=item) for place, item in batch if isinstance(item, Fault)]
        groups: dict[object, Items] = {}
        for place, item in batch:
            if not isinstance(item, Fault):
                groups.setdefault(_find_group(item), []).append((place, item))
        for group, items in groups.items():
            embedded += yield from self._send_items(group, items)
        return sorted(embedded, key=lambda each: each.index)

    def _send_items(self, group: object, items: Items) -> Steps[list[Embedded]]:
        """A request for some items; again without those that are bad, or in halves where they are too much."""
        build = Compute(lambda: build_items_request("/extract", [item for _, item in items], self.fields, HEADERS))
        request: Request = yield build
        try:
            reply = yield from self.session.exchange(request)
        except ProblemError as error:
            if bad := _find_bad(error, items):
                rest = [entry for entry in items if entry[0] not in bad]
                return [*bad.values(), *((yield from self._send_items(group, rest)) if rest else ())]
            if not isinstance(error, TooLargeError) and error.status != 500:
                raise
            if len(items) == 1:
                return [_fail(items[0][0], error)]
            half = len(items) // 2
            first = yield from self._send_items(group, items[:half])
            return first + (yield from self._send_items(group, items[half:]))
        result = read_result(reply)
        self._check_fingerprint(group, result.fingerprint)
        return list(_split_rows(result, [place for place, _ in items]))

    def _check_fingerprint(self, group: object, fingerprint: str) -> None:
        if fingerprint.startswith("unrepeatable-"):
            raise FingerprintChangedError("the model is not deterministic: no two of its vectors can be compared")
        # One step, for threads do this at once.
        known = self._fingerprints.setdefault(group, fingerprint)
        if len(self._fingerprints) > MAX_GROUPS:
            self._fingerprints.pop(group, None)
        if known != fingerprint:
            raise FingerprintChangedError(
                f"the fingerprint changed from {known} to {fingerprint}: the server now has another model"
            )


def _find_bad(error: ProblemError, items: Items) -> dict[int, Embedded]:
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


def _find_group(item: Item) -> object:
    """What inputs of one request have in common, so that all have one fingerprint."""
    if item.kind == "entries":
        return frozenset(item.value)
    if item.kind == "tensors":
        return "pixels" if item.value.dtype == np.uint8 else (item.value.shape, item.value.dtype.str)
    return item.kind

"""Batches answered by a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import layertap_client as lt
from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.service.bulk.job import Answer, Column, Outline, Question, make_column
from layertap.service.bulk.manifest import check_same_model
from layertap.service.bulk.pipeline import BatchExtractor
from layertap.service.bulk.sources import Entry
from layertap.service.clients import convert_error, convert_errors
from layertap_client.exchange import MAX_TIMEOUT_S

PATIENCE_S = 600.0  # of a request since it first failed: the server is restarted, or there are others before us
FIRST_PATIENCE_S = 30.0  # where there has never been one: it may be about to start
SILENCE_S = 120.0  # beyond the server's own deadline: then a connection is dead
TOO_SLOW = 504
RETRIES = lt.RetryPolicy(
    backoff_s=0.5, max_backoff_s=15.0, statuses=lt.RetryPolicy.statuses - {TOO_SLOW}, patience_s=PATIENCE_S
)
LATER = "the same command goes on later"
ALONE_ATTEMPTS = 3  # of a picture that takes longer than the server allows: others may have been before it
CALM_REQUESTS = 16  # in time, until twice as many pictures go in a request again
OVERHEAD_BYTES = 2**16  # of a body, for the question; each picture has some of its own
PART_BYTES = 256
MAX_ROWS = 32
IN_FLIGHT = 8  # what the server has is not known


@dataclass
class RequestSize:
    """How many inputs go in a request: half as many after one that took too long, twice as many after some in time.

    Batches stay what they are, and so do the files: a batch goes in several requests.
    """

    rows: int
    max_rows: int
    _in_time: int = 0

    def record(self, rows: int, *, in_time: bool) -> None:
        """Take note of a request of so many inputs."""
        if not in_time:
            self.rows, self._in_time = max(1, min(self.rows, rows // 2)), 0
            return
        self._in_time += 1
        if self._in_time >= CALM_REQUESTS:
            self.rows, self._in_time = min(2 * self.rows, self.max_rows), 0


class RemoteExtractor(BatchExtractor):
    """A server that is asked over HTTP; one that is away for a while is waited for, and ``tell`` hears why."""

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        self._url = url
        self._tell = tell
        self._waiting = False
        self._outline: Outline | None = None
        self.in_flight = IN_FLIGHT
        # As settings come; a server tells its own.
        self.max_picture_bytes = self.max_batch_bytes = 32 * 2**20
        self.max_rows = MAX_ROWS
        self._size = RequestSize(MAX_ROWS, MAX_ROWS)
        with convert_errors(url):
            retries = replace(RETRIES, on_wait=self._tell_waiting)
            self._client = lt.AsyncClient(url, timeout=FIRST_PATIENCE_S, retries=retries)

    async def outline(self, question: Question) -> Outline:
        """What answers will be like, as the server tells; LayertapError."""
        with convert_errors(self._url, LATER):
            limits = (await self._client.models()).limits
        self._client.session.timeout = MAX_TIMEOUT_S  # patience ends a request, and each attempt has its own deadline
        self._client.session.silence_s = limits["deadline_s"] + SILENCE_S
        self.max_rows = int(min(MAX_ROWS, limits["max_inputs"], limits["max_queue_rows"]))
        self.max_batch_bytes = int(limits["max_body_bytes"]) - OVERHEAD_BYTES - PART_BYTES * self.max_rows
        self.max_picture_bytes = self.max_batch_bytes
        with convert_errors(self._url, LATER):
            self._outline = await self._ask_outline(question)
        return self._outline

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """What a batch gives; RequestError, TooLargeError where fewer may be answered; LayertapError."""
        if len(entries) > self._size.rows:
            raise TooLargeError(f"{len(entries)} inputs take too long")
        try:
            result = await self._extract(question, entries)
            if self._outline is not None and result.fingerprint != self._outline.fingerprint:
                # The server has another model by now, or the pictures other shapes, whose fingerprints are others.
                check_same_model(self._outline, await self._ask_outline(question))
        except lt.TooLargeError as error:
            raise TooLargeError(error.detail) from error
        except lt.InvalidRequestError as error:
            errors = _list_reasons(error.faults)
            if len(errors) == len(entries):
                return Answer("", {}, errors)
            raise RequestError(f"{self._url}: {error.detail}", hint=error.hint) from error  # it may name few of them
        except lt.LayertapError as error:
            raise convert_error(error, self._url, LATER) from error
        return Answer(result.fingerprint, result.arrays, _list_reasons(result.errors))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _extract(self, question: Question, entries: Sequence[Entry]) -> lt.Result:
        """The result of a batch; TooLargeError where it took too long, LayertapError where one picture does."""
        data = [entry.data or b"" for entry in entries]
        inputs: list[Any] = [{"text": each.decode()} for each in data] if question.texts else [*data]
        for attempt in range(1, ALONE_ATTEMPTS + 1):
            try:
                result = await self._client.extract(
                    inputs,
                    list(question.layers) or None,
                    **_list_options(question),
                    on_error="skip",
                    isolated=True,
                    priority="bulk",
                )
            except lt.DeadlineError as error:
                if len(entries) > 1:
                    self._record_too_slow(len(entries))
                    raise TooLargeError(f"{len(entries)} inputs take too long") from error
                if attempt == ALONE_ATTEMPTS:
                    hint = "raise LAYERTAP_DEADLINE_S of the server, or name an earlier layer; the same command goes on"
                    detail = f"{entries[0].key} alone takes too long: {self._url}: {error.detail}"
                    raise LayertapError(detail, hint=hint) from error
            else:
                break
        self._waiting = False
        self._size.record(len(entries), in_time=True)
        return result

    async def _ask_outline(self, question: Question) -> Outline:
        layers, options = list(question.layers) or None, _list_options(question)
        if question.texts:  # the probe's input would be a picture where the model takes both
            result = await self._client.extract([{"text": "a"}], layers, probe=True, **options)
            model, fingerprint, receipts = result.model, result.fingerprint, result.receipts
            shapes = {key: (array.shape, array.dtype.name) for key, array in result.items()}
        else:
            described = await self._client.dry_run(layers, **options)
            named = {key: value for key, value in options.items() if key in OF_PROBE}
            probed = await self._client.probe(layers, model=described["model"], **named)
            model, fingerprint, receipts = probed["model"], probed["fingerprint"], probed["receipts"]
            shapes = {key: (each["shape"], each["dtype"]) for key, each in described["features"].items()}
        return Outline(model, fingerprint, _make_columns(shapes, receipts), receipts)

    def _record_too_slow(self, rows: int) -> None:
        before = self._size.rows
        self._size.record(rows, in_time=False)
        if self._size.rows < before:
            self._tell(f"{self._url} has no time for {rows} inputs in a request: it gets {self._size.rows} at once")

    def _tell_waiting(self, error: lt.LayertapError, seconds: float) -> None:
        if not self._waiting:
            self._tell(f"waiting for {self._url}: {error}")
        self._waiting = True


def _make_columns(
    shapes: Mapping[str, tuple[Sequence[int], str]], receipts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Column]:
    return {
        # What was captured is of the one input of a probe.
        key: make_column(key, receipts[key].get("row_axis", 0), receipts[key]["captured"], shape, dtype)
        for key, (shape, dtype) in shapes.items()
    }


def _list_options(question: Question) -> dict[str, Any]:
    """What is left out is false, and not asked for."""
    return {key: value for key in ("model", *OF_PROBE, "prompt", "truncate") if (value := getattr(question, key))}


def _list_reasons(faults: Iterable[lt.Fault]) -> dict[int, str]:
    return {fault.input: fault.detail for fault in faults if fault.input is not None}


OF_PROBE = ("pool", "normalize")

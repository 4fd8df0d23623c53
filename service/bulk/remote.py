"""Batches answered by a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

from PIL import Image

import layertap_client as lt
from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.service.bulk.job import Answer, Extractor, Outline, Question
from layertap.service.bulk.manifest import check_same_model
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
OVERHEAD_BYTES = 2**16  # of a body, for the question; each picture has some of its own
PART_BYTES = 256
MAX_ROWS = 32
IN_FLIGHT = 8  # what the server has is not known
OUTLINED = (320, 256)  # pixels of the picture that answers are outlined with


class RemoteExtractor(Extractor):
    """A server that is asked over HTTP; one that is away for a while is waited for, and ``tell`` hears why."""

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        self._url = url
        self._tell = tell
        self._waiting = False
        self._outline: Outline | None = None
        self.in_flight = IN_FLIGHT
        self.max_input_bytes = self.max_batch_bytes = self.max_rows = 0  # the server tells
        self._max_request_rows = MAX_ROWS
        with convert_errors(url):
            retries = replace(RETRIES, on_wait=self._tell_waiting)
            self._client = lt.AsyncClient(url, timeout=FIRST_PATIENCE_S, retries=retries)

    async def outline(self, question: Question) -> Outline:
        """What answers will be like, as the server tells; LayertapError."""
        with convert_errors(self._url, LATER):
            limits = (await self._client.models()).limits
            self._client.session.timeout = MAX_TIMEOUT_S  # patience ends a request; each attempt has its own deadline
            self._client.session.silence_s = limits["deadline_s"] + SILENCE_S
            self.max_rows = int(min(MAX_ROWS, limits["max_inputs"], limits["max_queue_rows"]))
            self.max_batch_bytes = int(limits["max_body_bytes"]) - OVERHEAD_BYTES - PART_BYTES * self.max_rows
            self.max_input_bytes = self.max_batch_bytes
            self._outline = await self._ask_outline(question)
        return self._outline

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """What a batch gives; RequestError, TooLargeError where fewer may be answered; LayertapError."""
        if len(entries) > self._max_request_rows:
            raise TooLargeError(f"{len(entries)} inputs take too long")
        data = [entry.data or b"" for entry in entries]
        try:
            inputs = [{"text": each.decode()} for each in data] if question.texts else data
            result = await self._ask(question, inputs, on_error="skip", isolated=True, priority="bulk")
            if self._outline is not None and result.fingerprint != self._outline.fingerprint:
                # The server has another model by now, or the pictures other shapes, whose fingerprints are others.
                check_same_model(self._outline, await self._ask_outline(question))
        except lt.DeadlineError as error:
            if len(entries) > 1:
                self._halve(len(entries))
                raise TooLargeError(f"{len(entries)} inputs take too long") from error
            hint = "raise LAYERTAP_DEADLINE_S of the server, or name an earlier layer; the same command goes on"
            detail = f"{entries[0].key} alone takes too long: {self._url}: {error.detail}"
            raise LayertapError(detail, hint=hint) from error
        except lt.TooLargeError as error:
            raise TooLargeError(error.detail) from error
        except lt.InvalidRequestError as error:
            errors = _list_reasons(error.faults)
            if len(errors) == len(entries):
                return Answer("", {}, errors)
            raise RequestError(f"{self._url}: {error.detail}", hint=error.hint) from error  # it may name few of them
        except lt.LayertapError as error:
            raise convert_error(error, self._url, LATER) from error
        self._waiting = False
        return Answer(result.fingerprint, result.arrays, _list_reasons(result.errors))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _ask(self, question: Question, inputs: Sequence[Any], **options: Any) -> lt.Result:
        """The result of a request; the client's errors."""
        asked = {name: getattr(question, name) for name in ("model", "pool", "normalize", "prompt", "truncate")}
        options |= {name: value for name, value in asked.items() if value}
        attempts = ALONE_ATTEMPTS if len(inputs) == 1 else 1
        while True:
            attempts -= 1
            try:
                return await self._client.extract(inputs, question.entries or None, **options)
            except lt.DeadlineError:
                if not attempts:
                    raise

    async def _ask_outline(self, question: Question) -> Outline:
        picture = BytesIO()
        Image.new("RGB", OUTLINED).save(picture, "PNG")
        inputs: list[Any] = [{"text": "a"}] if question.texts else [picture.getvalue()]
        result = await self._ask(question, inputs, probe=True)
        return Outline.of(result.model, result.fingerprint, result, result.receipts)

    def _halve(self, rows: int) -> None:
        """Have fewer inputs in later requests than in one that took too long; batches and files stay what they are."""
        if rows // 2 < self._max_request_rows:
            self._max_request_rows = rows // 2
            self._tell(f"{self._url} has no time for {rows} inputs in a request: it gets {rows // 2} at once")

    def _tell_waiting(self, error: lt.LayertapError, seconds: float) -> None:
        if not self._waiting:
            self._tell(f"waiting for {self._url}: {error}")
        self._waiting = True


def _list_reasons(faults: Iterable[lt.Fault]) -> dict[int, str]:
    return {fault.input: fault.detail for fault in faults if fault.input is not None}

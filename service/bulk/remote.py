"""Answers batches with a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

import layertap_client as lt
from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.service.bulk.job import Answer, Extractor, Outline, Question, list_reasons
from layertap.service.bulk.manifest import check_same_model
from layertap.service.bulk.reductions import MIN_BLOCK
from layertap.service.bulk.sources import Entry
from layertap.service.clients import convert_error, convert_errors
from layertap_client.exchange import MAX_TIMEOUT_S

PATIENCE_S = 600.0  # since a request's first failure: the server restarts, or is busy
FIRST_PATIENCE_S = 30.0  # before the first answer: the server may be about to start
SILENCE_S = 120.0  # after the server's own deadline, a silent connection is dead
TOO_SLOW = 504
RETRIES = lt.RetryPolicy(
    backoff_s=0.5, max_backoff_s=15.0, statuses=lt.RetryPolicy.statuses - {TOO_SLOW}, patience_s=PATIENCE_S
)
LATER = "the same command goes on later"
ALONE_ATTEMPTS = 3  # for a single picture that exceeds the server's deadline: it may have waited for others
OVERHEAD_BYTES = 2**16  # of a body, for the question; each picture adds PART_BYTES
PART_BYTES = 256
MAX_ROWS = 32
IN_FLIGHT = 8  # the server's workers are unknown
OUTLINED = (320, 256)  # pixels of the picture that is sent for the outline


class RemoteExtractor(Extractor):
    """Sends batches to a server over HTTP; waits for a server that is away, and reports this to ``tell``."""

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        self._url = url
        self._tell = tell
        self._waiting = False
        self._outline: Outline | None = None
        self.in_flight = IN_FLIGHT
        self.max_input_bytes = self.max_batch_bytes = self.max_rows = 0  # set by the server's limits
        self._max_request_rows = MAX_ROWS
        with convert_errors(url):
            retries = replace(RETRIES, on_wait=self._tell_waiting)
            self._client = lt.AsyncClient(url, timeout=FIRST_PATIENCE_S, retries=retries)

    async def outline(self, question: Question) -> Outline:
        """The outline of answers, by the server; LayertapError."""
        with convert_errors(self._url, LATER):
            limits = (await self._client.models()).limits
            self._client.session.timeout = MAX_TIMEOUT_S  # patience limits a request; each attempt has its own deadline
            self._client.session.silence_s = limits["deadline_s"] + SILENCE_S
            self.max_rows = int(min(MAX_ROWS, limits["max_inputs"], limits["max_queue_rows"]))
            self.max_batch_bytes = int(limits["max_body_bytes"]) - OVERHEAD_BYTES - PART_BYTES * self.max_rows
            self.max_input_bytes = self.max_batch_bytes
            self._outline = await self._ask_outline(question)
        return self._outline

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """The answer to a batch; RequestError, TooLargeError if a smaller one may succeed; LayertapError."""
        if len(entries) > self._max_request_rows:
            raise TooLargeError(f"{len(entries)} inputs take too long")
        data = [entry.data or b"" for entry in entries]
        try:
            inputs = [{"text": each.decode()} for each in data] if question.texts else data
            options = {} if question.compares else {"on_error": "skip"}
            result = await self._ask(question, inputs, isolated=True, priority="bulk", **options)
            if self._outline is not None and result.fingerprint != self._outline.fingerprint:
                # The server's model has changed, or pictures of other shapes have another fingerprint.
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
            errors = list_reasons(error.faults)
            if len(errors) == len(entries) or (errors and question.compares):
                return Answer("", {}, errors)
            raise RequestError(f"{self._url}: {error.detail}", hint=error.hint) from error  # it may name only some
        except lt.LayertapError as error:
            raise convert_error(error, self._url, LATER) from error
        self._waiting = False
        if isinstance(result, lt.Comparison):
            return Answer.of_comparison(result)
        return Answer.of(result.fingerprint, result.arrays, result.receipts, result.errors)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _ask(self, question: Question, inputs: Sequence[Any], **options: Any) -> lt.Result | lt.Comparison:
        """The result of a request; raises the client's errors."""
        asked = {name: getattr(question, name) for name in ("model", "pool", "normalize", "prompt", "truncate")}
        options |= {name: value for name, value in asked.items() if value}
        ask: Callable[..., Awaitable[lt.Result | lt.Comparison]] = self._client.extract
        if question.compares:
            ask, options = self._client.compare, options | question.comparison
        attempts = ALONE_ATTEMPTS if len(inputs) == 1 else 1
        while True:
            attempts -= 1
            try:
                return await ask(inputs, question.entries or None, **options)
            except lt.DeadlineError:
                if not attempts:
                    raise

    async def _ask_outline(self, question: Question) -> Outline:
        inputs: list[Any] = [{"text": "a"}] if question.texts else [await self._make_example(question.model)]
        if question.compares:
            inputs *= MIN_BLOCK
        result = await self._ask(question, inputs, **({} if question.compares else {"probe": True}))
        if isinstance(result, lt.Comparison):
            return Outline.of_comparison(result)
        return Outline.of(result.model, result.fingerprint, result, result.receipts)

    async def _make_example(self, name: str | None) -> Any:
        """A second of silence for a model of sounds, black frames for one of videos, else a picture."""
        models = await self._client.models()
        name = models.aliases.get(name or "", name) or models.default
        if all("preprocess" not in each.details for each in models if each.name == name):
            await self._client.layers(name)  # loads it
            models = await self._client.models()
        for how in (each.details.get("preprocess") or {} for each in models if each.name == name):
            if "rate" in how:
                return {"tensor": np.zeros(how["rate"], np.float32), "rate": how["rate"]}
            if "frames" in how:
                return np.zeros((how["frames"], *OUTLINED, 3), np.uint8)
        picture = BytesIO()
        Image.new("RGB", OUTLINED).save(picture, "PNG")
        return picture.getvalue()

    def _halve(self, rows: int) -> None:
        """Send fewer inputs per request than in one that took too long; batches and files do not change."""
        if rows // 2 < self._max_request_rows:
            self._max_request_rows = rows // 2
            self._tell(f"{self._url} has no time for {rows} inputs in a request: it gets {rows // 2} at once")

    def _tell_waiting(self, error: lt.LayertapError, seconds: float) -> None:
        if not self._waiting:
            self._tell(f"waiting for {self._url}: {error}")
        self._waiting = True

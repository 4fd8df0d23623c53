"""Batches answered by a server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from safetensors.numpy import load

from layertap.models.errors import LayertapError, RequestError, TooLargeError
from layertap.service.bulk.entries import Entry
from layertap.service.bulk.job import Answer, Outline, Question, make_column
from layertap.service.bulk.manifest import check_same_model
from layertap.service.bulk.pipeline import BatchExtractor

PATIENCE_S = 600.0  # without any answer: the server is restarted, or there are others before us
FIRST_PATIENCE_S = 30.0  # where there has never been one: it may be about to start
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
TIMEOUT_S = 120.0  # beyond the server's own deadline
ALONE_ATTEMPTS = 3  # of a picture that takes longer than the server allows: others may have been before it
CALM_REQUESTS = 16  # in time, until twice as many pictures go in a request again
OVERHEAD_BYTES = 2**16  # of a body, for the question; each picture has some of its own
PART_BYTES = 256
MAX_ROWS = 32
IN_FLIGHT = 8  # what the server has is not known
RETRIED = frozenset({408, 429, 502, 503, 504})
TOO_SLOW = httpx.codes.GATEWAY_TIMEOUT


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

    def __init__(self, url: str, key: str | None, tell: Callable[[str], None]) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S)
        self._url = url
        self._tell = tell
        self._patience = FIRST_PATIENCE_S
        self._outline: Outline | None = None
        self.in_flight = IN_FLIGHT
        # As settings come; a server tells its own.
        self.max_picture_bytes = self.max_batch_bytes = 32 * 2**20
        self.max_rows = MAX_ROWS
        self._size = RequestSize(MAX_ROWS, MAX_ROWS)

    async def outline(self, question: Question) -> Outline:
        """What answers will be like, as the server tells; LayertapError."""
        limits = (await self._get("/models", "limits"))["limits"]
        self.max_rows = min(MAX_ROWS, limits["max_inputs"], limits["max_queue_rows"])
        self._client.timeout = httpx.Timeout(limits["deadline_s"] + TIMEOUT_S)
        self.max_batch_bytes = limits["max_body_bytes"] - OVERHEAD_BYTES - PART_BYTES * self.max_rows
        self.max_picture_bytes = self.max_batch_bytes
        self._outline = await self._ask_outline(question)
        return self._outline

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """What a batch gives; RequestError, TooLargeError where fewer may be answered; LayertapError."""
        if len(entries) > self._size.rows:
            raise TooLargeError(f"{len(entries)} inputs take too long")
        reply = await self._post(question, entries)
        if reply.status_code == httpx.codes.OK:
            answer = _read_answer(reply.content)
            await self._check_fingerprint(question, answer)
            return answer
        problem = _read_problem(reply)
        if reply.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
            raise TooLargeError(str(problem.get("detail", reply.reason_phrase)))
        errors = _list_reasons(problem)
        if reply.status_code == httpx.codes.UNPROCESSABLE_ENTITY and len(errors) == len(entries):
            return Answer("", {}, errors)
        error = _make_error(self._url, reply)
        if reply.status_code == httpx.codes.UNPROCESSABLE_ENTITY:  # it may name few of the pictures that it is about
            raise RequestError(error.detail, hint=error.hint)
        raise error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _ask_outline(self, question: Question) -> Outline:
        body = _write_question(question)
        if question.texts:  # the probe's input would be a picture where the model takes both
            described = probed = await self._ask({**body, "inputs": [{"text": "a"}], "probe": True})
        else:
            described = await self._ask(body, dry_run="true")
            params = {key: _write(value) for key, value in body.items() if key in OF_PROBE}
            probed = await self._get(f"/models/{described['model']}/probe", "receipts", params)
        columns = {}
        for key, feature in described["features"].items():
            receipt = probed["receipts"][key]
            row_axis, captured = receipt.get("row_axis", 0), receipt["captured"]  # of the one input of a probe
            columns[key] = make_column(key, row_axis, captured, feature["shape"], feature["dtype"])
        return Outline(probed["model"], probed["fingerprint"], columns, probed["receipts"])

    async def _ask(self, body: Mapping[str, Any], **params: str) -> Any:
        """What ``/extract`` answers; LayertapError."""
        reply = await self._send("POST", "/extract", params=params, json=body)
        if reply.status_code != httpx.codes.OK:
            raise _make_error(self._url, reply)
        return reply.json()

    async def _check_fingerprint(self, question: Question, answer: Answer) -> None:
        """OtherModelError where the server has another by now; pictures of other shapes have other fingerprints."""
        if self._outline is None or answer.fingerprint == self._outline.fingerprint:
            return
        check_same_model(self._outline, await self._ask_outline(question))

    async def _get(self, path: str, needed: str, params: Mapping[str, str] | None = None) -> Any:
        """A document that has the field ``needed``; LayertapError."""
        reply = await self._send("GET", path, params=params)
        if reply.status_code != httpx.codes.OK:
            raise _make_error(self._url, reply)
        try:
            document = reply.json()
        except ValueError:
            document = None
        if not isinstance(document, dict) or needed not in document:
            hint = "the address is the server's own, without /v1 or /v2 behind it"
            raise LayertapError(f"{self._url} does not answer as a layertap server does", hint=hint)
        return document

    async def _post(self, question: Question, entries: Sequence[Entry]) -> httpx.Response:
        """The reply to a batch; TooLargeError where it took too long, LayertapError where one picture does."""
        fields = {**_write_question(question), "on_error": "skip", "isolated": True, "priority": "bulk"}
        files = [("request", (None, json.dumps(fields).encode(), "application/json"))]
        name = "texts" if question.texts else "images"
        inputs = [(name, ("input", entry.data or b"", "application/octet-stream")) for entry in entries]
        options: dict[str, Any] = {"params": {"format": "safetensors"}, "files": [*files, *inputs]}
        for _ in range(ALONE_ATTEMPTS):
            reply = await self._send("POST", "/extract", retried=RETRIED - {TOO_SLOW}, **options)
            if reply.status_code != TOO_SLOW:
                self._size.record(len(entries), in_time=True)
                return reply
            if len(entries) > 1:
                self._record_too_slow(len(entries))
                raise TooLargeError(f"{len(entries)} inputs take too long")
        error = _make_error(self._url, reply)
        hint = "raise LAYERTAP_DEADLINE_S of the server, or name an earlier layer; the same command goes on"
        raise LayertapError(f"{entries[0].key} alone takes too long: {error.detail}", hint=hint)

    def _record_too_slow(self, rows: int) -> None:
        before = self._size.rows
        self._size.record(rows, in_time=False)
        if self._size.rows < before:
            self._tell(f"{self._url} has no time for {rows} inputs in a request: it gets {self._size.rows} at once")

    async def _send(self, method: str, path: str, retried: Collection[int] = RETRIED, **options: Any) -> httpx.Response:
        """The reply, once there is one that is worth having; LayertapError where there is none for long."""
        wait, given_up = FIRST_WAIT_S, time.monotonic() + self._patience
        while True:
            try:
                reply = await self._client.request(method, path, **options)
                if reply.status_code not in retried and not _is_of_proxy(reply):
                    self._patience = PATIENCE_S
                    return reply
                reason, asked = f"{reply.status_code} {reply.reason_phrase}", reply.headers.get("retry-after", "")
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise LayertapError(f"{self._url} is no address of a server: {error}") from None
            except httpx.TransportError as error:
                reason, asked = str(error) or type(error).__name__, ""
            if time.monotonic() > given_up:
                raise LayertapError(f"{self._url} does not answer: {reason}", hint="the same command goes on later")
            if wait == FIRST_WAIT_S:
                self._tell(f"waiting for {self._url}: {reason}")
            await asyncio.sleep(max(wait, min(float(asked), LONGEST_WAIT_S) if asked.isdigit() else 0.0))
            wait = min(2 * wait, LONGEST_WAIT_S)


def _is_of_proxy(reply: httpx.Response) -> bool:
    """Whether a 500 is not the server's own, which are JSON: Ray's proxy sends one in place of a replica that died."""
    return reply.status_code == 500 and "json" not in reply.headers.get("content-type", "")


def _write_question(question: Question) -> dict[str, Any]:
    """As fields of a JSON body: what is left out is false, and not asked for."""
    return {key: value for key, value in question.describe().items() if value and key != "texts"}


def _write(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value).lower()


def _read_answer(body: bytes) -> Answer:
    head = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    errors = _list_reasons({"errors": json.loads(head["errors"])})
    arrays = load(body)
    return Answer(head["fingerprint"], {name: arrays[name] for name in json.loads(head["receipts"])}, errors)


def _list_reasons(problem: Mapping[str, Any]) -> dict[int, str]:
    return {fault["input"]: fault["detail"] for fault in problem.get("errors", ()) if "input" in fault}


def _read_problem(reply: httpx.Response) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _make_error(url: str, reply: httpx.Response) -> LayertapError:
    problem = _read_problem(reply)
    hints = [fault["hint"] for fault in problem.get("errors", ()) if fault.get("hint")]
    return LayertapError(f"{url}: {problem.get('detail', reply.reason_phrase)}", hint=hints[0] if hints else "")


OF_PROBE = ("layers", "pool", "normalize")

"""What can go wrong, as a tree: ``LayertapError`` is the root, and what a server refuses is a ``ProblemError``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

KIND_PREFIX = "urn:layertap:problem:"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a request.

    ``hint`` says what to type instead, ``pointer`` where in the request it is, ``input`` the place of the input that
    it is of, counted from 0 (in a batch its row); what a fault does not have is "" or None.
    """

    detail: str
    hint: str = ""
    pointer: str = ""
    input: int | None = None

    def __str__(self) -> str:
        return f"{self.detail}: {self.hint}" if self.hint else self.detail


class LayertapError(Exception):
    """The root of all errors of this package."""


class InputError(LayertapError, ValueError):
    """What was given can't be sent, so that no request was made."""


class ConnectionFailedError(LayertapError, ConnectionError):
    """No reply came: the server can't be reached, or the connection broke.

    ``sent``: whether the server may have got the request.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), sent=self.sent), self.args


class ReplyTimeoutError(ConnectionFailedError, TimeoutError):
    """No reply came within the call's timeout."""


class BadReplyError(LayertapError):
    """A reply that no layertap sends: of a proxy, of another server, or cut."""


class FingerprintChangedError(LayertapError):
    """Vectors of one stream can't be compared: the server's model or its preprocessing was changed meanwhile."""


class ProblemError(LayertapError):
    """An error reply of type ``application/problem+json``; some statuses have a subclass.

    ``status``; ``kind``, the end of its ``type`` ("queue-full"); ``title``; ``detail``; ``hint``, what to type instead,
    "" where there is none; ``request_id``; ``faults``, of which ``more_faults`` were left out; ``retry_after`` in
    seconds, None where nothing was said of it.
    """

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: float | None = None) -> None:
        self.status = status
        self._made_of = (status, dict(body), retry_after)
        self.type = str(body.get("type", "about:blank"))
        self.kind = self.type.removeprefix(KIND_PREFIX)
        self.title = str(body.get("title", ""))
        self.detail = str(body.get("detail", ""))
        self.request_id = str(body.get("request_id", ""))
        self.faults = read_faults(body.get("errors"))
        self.more_faults = int(body.get("more_errors", 0))
        self.hint = str(body.get("hint") or next((fault.hint for fault in self.faults if fault.hint), ""))
        self.retry_after = retry_after
        super().__init__(self._describe())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._made_of

    def _describe(self) -> str:
        hints = dict.fromkeys(filter(None, (self.hint, *(fault.hint for fault in self.faults))))
        return "\n  ".join((f"{self.status} {self.title}: {self.detail}", *hints))


class TooLargeError(ProblemError):
    """413: a limit of the server."""


class InvalidRequestError(ProblemError):
    """422: an unknown layer, a picture that can't be decoded, a wrong shape, contradictory options."""


class DeadlineError(ProblemError, TimeoutError):
    """504: the server ran out of time; the timeout of a call is the server's deadline too."""


BY_STATUS: Mapping[int, type[ProblemError]] = {413: TooLargeError, 422: InvalidRequestError, 504: DeadlineError}


def make_problem(status: int, data: bytes | bytearray, retry_after: float | None, proxy: str = "") -> ProblemError:
    """The error that a refusal means; a proxy's own has its body as detail, and the variable that names it."""
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict) or "detail" not in body:
        shown = bytes(data[:200]).decode("utf-8", "replace")
        by = f", perhaps the proxy of {proxy}" if proxy else ""
        body = {"title": f"refused by something before the server{by}", "detail": repr(shown)}
    return BY_STATUS.get(status, ProblemError)(status, body, retry_after)


def read_faults(value: Any) -> tuple[Fault, ...]:
    """The faults of an ``errors`` list; what is none is left out."""
    entries = value if isinstance(value, list) else []
    return tuple(_read_fault(entry) for entry in entries if isinstance(entry, dict))


def _read_fault(entry: Mapping[str, Any]) -> Fault:
    place = entry.get("input")
    return Fault(
        str(entry.get("detail", "")),
        str(entry.get("hint", "")),
        str(entry.get("pointer", "")),
        place if isinstance(place, int) else None,
    )

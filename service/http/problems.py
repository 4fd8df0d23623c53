"""Errors as problems, by a table of statuses, and as ``application/problem+json`` (RFC 9457).

Routes of other protocols encode the same problems in their own way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from layertap.models.errors import (
    IN_THE_LOG,
    Fault,
    LayerNotReachedError,
    LayertapError,
    RequestError,
    TooLargeError,
    UnknownModelError,
    UnknownProjectionError,
    clear_tracebacks,
)
from layertap.service import errors
from layertap.service.schemas.validation_errors import convert_errors

MEDIA_TYPE = "application/problem+json"
MAX_FAULTS = 16
MAX_BODY = 1000
MAX_DETAIL = 300
BUG_DETAIL = "something went wrong in the server; its log has the details"


@dataclass(frozen=True)
class Problem:
    """The public part of an error."""

    status: int
    kind: str  # a short name
    detail: str  # may be too long for a reply
    request_id: str
    hint: str = ""  # what to do instead
    faults: tuple[Fault, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)  # of the status


ProblemEncoder = Callable[[Problem], Response]


def encode_problem(problem: Problem) -> Response:
    """A problem as a reply of less than 1 KiB, with the first faults and the number of others."""
    body: dict[str, Any] = {
        "type": f"urn:layertap:problem:{problem.kind}",
        "title": TITLES.get(problem.status) or HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail[:MAX_DETAIL],
        "request_id": problem.request_id,
    }
    faults = problem.faults or ((Fault(problem.detail, problem.hint),) if problem.hint else ())
    if hint := problem.hint or (faults[0].hint if faults else "") or HINTS.get(problem.status, ""):
        body["hint"] = hint[:MAX_DETAIL]
    shown = body["errors"] = [format_fault(fault) for fault in faults[:MAX_FAULTS]]
    while len(data := orjson.dumps(body | _count_left_out(faults, shown))) > MAX_BODY and shown:
        shown.pop()
    if len(data) > MAX_BODY:
        del body["hint"]
        data = orjson.dumps(body | _count_left_out(faults, shown))
    return Response(data, problem.status, problem.headers, MEDIA_TYPE)


def describe_error(error: Exception, request_id: str) -> Problem:
    """An error as a problem, by the table; drops the error's frames.

    Errors outside of the tree are bugs of the server or of a model, and are not described.
    """
    clear_tracebacks(error)
    if isinstance(error, HTTPException):
        detail, hint = OF_ROUTING.get(error.status_code, ("the request was refused", ""))
        return Problem(error.status_code, "http", detail, request_id, hint, headers=dict(error.headers or {}))
    if isinstance(error, RequestValidationError):
        faults = convert_errors(error.errors())
        error = RequestError(faults[0].detail, faults=faults)
    status, kind = next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
    if not isinstance(error, LayertapError):
        detail = f"{error}; {IN_THE_LOG}" if isinstance(error, errors.ForwardError) else BUG_DETAIL
        return Problem(status, kind, detail, request_id)
    headers = dict(HEADERS.get(status, {}))
    if isinstance(error, errors.RetryLaterError) and error.retry_after is not None:
        headers["Retry-After"] = format_retry_after(error.retry_after)
    return Problem(status, kind, error.detail, request_id, error.hint, error.faults, headers)


def format_retry_after(seconds: float) -> str:
    """A value of ``Retry-After``: seconds, at least 1, plus a random part, so that clients do not return together."""
    earliest = max(1, math.ceil(seconds))
    return str(random.randint(earliest, earliest + 1 + earliest // 4))  # noqa: S311 - this is no secret


def format_fault(fault: Fault) -> dict[str, Any]:
    """A fault as in ``errors``: with texts cut, and without empty fields."""
    fields = {key: value for key, value in asdict(fault).items() if value not in ("", None)}
    return {key: value[:MAX_DETAIL] if isinstance(value, str) else value for key, value in fields.items()}


def _count_left_out(faults: tuple[Fault, ...], shown: list[dict[str, Any]]) -> dict[str, int]:
    return {"more_errors": len(faults) - len(shown)} if len(shown) < len(faults) else {}


OF_FASTAPI = (RequestValidationError, HTTPException)
OF_ROUTING = {
    404: ("there is no such route", "GET /docs lists the routes"),
    405: ("this route does not take that method", "the header Allow says which methods it takes"),
}

STATUS: dict[type[BaseException], tuple[int, str]] = {
    errors.BadRequestError: (400, "bad-request"),
    errors.KeyMissingError: (401, "key-missing"),
    errors.ForbiddenError: (403, "forbidden"),
    UnknownModelError: (404, "unknown-model"),
    UnknownProjectionError: (404, "unknown-projection"),
    errors.NotAcceptableError: (406, "not-acceptable"),
    errors.ConflictError: (409, "conflict"),
    errors.BodyTimeoutError: (408, "body-timeout"),
    TooLargeError: (413, "too-large"),
    errors.UnsupportedMediaError: (415, "unsupported-media-type"),
    RequestError: (422, "invalid-request"),
    LayerNotReachedError: (422, "layer-not-reached"),
    errors.QueueFullError: (429, "queue-full"),
    errors.ClientGoneError: (499, "client-gone"),
    errors.NotInstalledError: (501, "not-installed"),
    errors.TooManyConnectionsError: (503, "too-many-connections"),
    errors.UnavailableError: (503, "unavailable"),
    errors.DeadlineError: (504, "deadline"),
    LayertapError: (500, "bug"),
    errors.ForwardError: (500, "model-raised"),
    Exception: (500, "bug"),
}

HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": 'Bearer realm="layertap"'},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    415: {"Accept-Encoding": "gzip, deflate"},  # of bodies
}

HINTS: dict[int, str] = {  # for errors without one
    400: "GET /docs shows what a request looks like",
    408: "send it faster, or in several requests",
    422: "GET /docs has every field with its type, its limits and examples",
    503: "come again as Retry-After says",
    500: "report it, with the request_id and the server's log of it",
}

TITLES = {  # that Python lacks, or has from before RFC 9110
    413: "Content Too Large",
    422: "Unprocessable Content",
    499: "Client Closed Request",
}

"""Errors as problems, by one table of which class has which status, and as ``application/problem+json`` (RFC 9457).

Routes that speak another protocol encode the same problems in its way.
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
    clear_tracebacks,
)
from layertap.service.errors import (
    BadRequestError,
    BodyTimeoutError,
    ClientGoneError,
    ConflictError,
    DeadlineError,
    ForbiddenError,
    ForwardError,
    KeyMissingError,
    NotAcceptableError,
    NotInstalledError,
    QueueFullError,
    RetryLaterError,
    TooManyConnectionsError,
    UnavailableError,
    UnsupportedMediaError,
)
from layertap.service.schemas.validation_errors import convert_errors

MEDIA_TYPE = "application/problem+json"
MAX_FAULTS = 16
MAX_BODY = 1000
MAX_DETAIL = 300
BUG_DETAIL = "something went wrong in the server; its log has the details"


@dataclass(frozen=True)
class Problem:
    """What a caller is told of an error: its status, its kind by a short name, what happened, what to do instead.

    ``detail`` may be longer than a reply should be; ``headers`` belong to the status.
    """

    status: int
    kind: str
    detail: str
    request_id: str
    hint: str = ""
    faults: tuple[Fault, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)


ProblemEncoder = Callable[[Problem], Response]


def encode_problem(problem: Problem) -> Response:
    """A problem's reply, below 1 KiB whatever went wrong: of many faults the first are shown and all are counted."""
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
    """What the caller is told of an error, by the table; of the error nothing else is left.

    What is no error of the tree is a bug, of the server or of a model: its caller hears just that.
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
        detail = f"{error}; {IN_THE_LOG}" if isinstance(error, ForwardError) else BUG_DETAIL
        return Problem(status, kind, detail, request_id)
    headers = dict(HEADERS.get(status, {}))
    if isinstance(error, RetryLaterError):
        headers["Retry-After"] = format_retry_after(error.retry_after)
    return Problem(status, kind, error.detail, request_id, error.hint, error.faults, headers)


def format_retry_after(seconds: float) -> str:
    """A value of ``Retry-After``: so many seconds, at least 1, and by chance up to a quarter and a second more.

    So clients that are refused together do not come back together.
    """
    earliest = max(1, math.ceil(seconds))
    return str(random.randint(earliest, earliest + 1 + earliest // 4))  # noqa: S311 - this is no secret


def format_fault(fault: Fault) -> dict[str, Any]:
    """A fault as it stands in ``errors``: cut, and without what it does not have."""
    cut = {key: value[:MAX_DETAIL] if isinstance(value, str) else value for key, value in asdict(fault).items()}
    return {key: value for key, value in cut.items() if value is not None and value != ""}


def _count_left_out(faults: tuple[Fault, ...], shown: list[dict[str, Any]]) -> dict[str, int]:
    return {"more_errors": len(faults) - len(shown)} if len(shown) < len(faults) else {}


OF_FASTAPI = (RequestValidationError, HTTPException)
OF_ROUTING = {
    404: ("there is no such route", "GET /docs lists the routes"),
    405: ("this route does not take that method", "the header Allow says which methods it takes"),
}

STATUS: dict[type[BaseException], tuple[int, str]] = {
    BadRequestError: (400, "bad-request"),
    KeyMissingError: (401, "key-missing"),
    ForbiddenError: (403, "forbidden"),
    UnknownModelError: (404, "unknown-model"),
    NotAcceptableError: (406, "not-acceptable"),
    ConflictError: (409, "conflict"),
    BodyTimeoutError: (408, "body-timeout"),
    TooLargeError: (413, "too-large"),
    UnsupportedMediaError: (415, "unsupported-media-type"),
    RequestError: (422, "invalid-request"),
    LayerNotReachedError: (422, "layer-not-reached"),
    QueueFullError: (429, "queue-full"),
    ClientGoneError: (499, "client-gone"),
    NotInstalledError: (501, "not-installed"),
    TooManyConnectionsError: (503, "too-many-connections"),
    UnavailableError: (503, "unavailable"),
    DeadlineError: (504, "deadline"),
    LayertapError: (500, "bug"),
    ForwardError: (500, "model-raised"),
    Exception: (500, "bug"),
}

HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": 'Bearer realm="layertap"'},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    415: {"Accept-Encoding": "gzip"},  # of bodies
}

HINTS: dict[int, str] = {  # where an error itself has none
    400: "GET /docs shows what a request looks like",
    408: "send it faster, or in several requests",
    422: "GET /docs has every field with its type, its limits and examples",
    503: "come again as Retry-After says",
    500: "report it, with the request_id and what the server's log says of it",
}

TITLES = {  # where Python has none, or one older than RFC 9110
    413: "Content Too Large",
    422: "Unprocessable Content",
    499: "Client Closed Request",
}

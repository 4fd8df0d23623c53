"""Problems as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response

from layertap.models.errors import Fault
from layertap.service.http.problems import MAX_DETAIL, Problem

STATUS = {422: 400}  # all others are the same
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def encode_error(problem: Problem) -> Response:
    """A problem in OpenAI's envelope: of several reasons the first."""
    fault = problem.faults[0] if problem.faults else Fault(problem.detail, problem.hint)
    hint = fault.hint or problem.hint
    message = f"{fault.detail[:MAX_DETAIL]}; {hint[:MAX_DETAIL]}" if hint else fault.detail[:MAX_DETAIL]
    status = STATUS.get(problem.status, problem.status)
    error: dict[str, Any] = {
        "message": message,
        "type": TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": _name_parameter(fault),
        "code": problem.kind,
    }
    return Response(orjson.dumps({"error": error}), status, problem.headers, "application/json")


def _name_parameter(fault: Fault) -> str | None:
    """The field of the body that a fault is about, as OpenAI writes it."""
    if fault.input is not None:
        return f"input[{fault.input}]"
    field, *rest = (fault.pointer or "/").split("/")[1:]
    return ("model" if rest and field == "layers" else field[:64]) or None  # layers are named behind the model's name

"""Problems as the protocol's clients read them: one text."""

from __future__ import annotations

import orjson
from fastapi import Response

from layertap.models.errors import Fault
from layertap.service.http.problems import MAX_DETAIL, Problem

STATUS = {406: 400, 415: 400, 422: 400}  # all others are the same


def encode_error(problem: Problem) -> Response:
    """A problem as ``{"error": text}``: of several reasons the first, and how many others there are."""
    fault = problem.faults[0] if problem.faults else Fault(problem.detail, problem.hint)
    row = f"row {fault.input}: " if fault.input is not None else ""
    more = f" (and {len(problem.faults) - 1} more)" if len(problem.faults) > 1 else ""
    hint = f"; {fault.hint[:MAX_DETAIL]}" if fault.hint else ""
    text = f"{row}{fault.detail[:MAX_DETAIL]}{hint}{more}"
    status = STATUS.get(problem.status, problem.status)
    return Response(orjson.dumps({"error": text}), status, problem.headers, "application/json")

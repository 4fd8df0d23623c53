"""``/projections``: matrices that are sent once, and named by their digest in later requests."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Response

from layertap.service.engine.stored_projections import count_bytes
from layertap.service.http.auth import require_admin
from layertap.service.http.exchange import DeadlineDependency, ExchangeDependency
from layertap.service.http.openapi import BINARY, describe_problems
from layertap.service.schemas.replies import ProjectionsReply

router = APIRouter(tags=["projections"], responses=describe_problems(401, 429))
BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/x-safetensors": BINARY}}}
Digest = Annotated[str, Path(description="'sha256-' and the SHA-256 of the body in hexadecimal", max_length=128)]


@router.put(
    "/projections/{digest}",
    status_code=204,
    responses=describe_problems(408, 413, 422, 504),
    openapi_extra=BODY,
)
async def put_projection(exchange: ExchangeDependency, deadline: DeadlineDependency, digest: Digest) -> Response:
    """Keep a linear map, ``weight`` and perhaps ``bias`` and ``threshold``, for requests whose ``project`` names it."""
    engine = exchange.engine
    with engine.admission.admit(deadline) as ticket:
        data = await exchange.read_body(ticket.reserve_bytes)
        await engine.run_in_thread(partial(engine.projections.put, digest, data), deadline)
    return Response(status_code=204)


@router.get(
    "/projections",
    response_model=ProjectionsReply,
    dependencies=[Depends(require_admin)],
    responses=describe_problems(403),
)
def list_projections(exchange: ExchangeDependency) -> Response:
    """The projections that are kept, the least recently used first."""
    stored = exchange.engine.projections
    listed = [
        {"digest": digest, "channels": step.channels, "bytes": count_bytes(step)} for digest, step in stored.list()
    ]
    body = {"projections": listed, "max_bytes": stored.max_bytes}
    return Response(orjson.dumps(body), media_type="application/json")

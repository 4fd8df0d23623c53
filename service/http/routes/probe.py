"""``GET /models/NAME/probe``: what layers give for a fixed input, to be kept beside vectors."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response

from layertap.models.selection.hook_points import Pool, ReplyDType
from layertap.service.explain.prober import Prober
from layertap.service.features import Features
from layertap.service.formats.plain_data import describe_receipts
from layertap.service.http import query
from layertap.service.http.dependencies import DeadlineDependency, EngineDependency
from layertap.service.http.openapi import describe_problems
from layertap.service.inputs.items import TextItem
from layertap.service.schemas.bodies import ExtractBody
from layertap.service.schemas.replies import ProbeReply
from layertap.service.schemas.validation_errors import validate

router = APIRouter(tags=["models"])
OF_BODY = frozenset({"layers", "pool", "normalize", "dtype"})
OWN = frozenset({"preprocessed", "input"})


@router.get(
    "/models/{name}/probe", response_model=ProbeReply, responses=describe_problems(401, 404, 422, 429, 503, 504)
)
async def probe_layers(
    request: Request,
    engine: EngineDependency,
    deadline: DeadlineDependency,
    name: str,
    layers: Annotated[
        str | None, Query(description="selectors, separated by commas, or layers as in a body; else the embedding")
    ] = None,
    pool: Pool | None = None,
    normalize: bool | None = None,
    dtype: ReplyDType | None = None,
    preprocessed: Literal["caller"] | None = None,
    input: Annotated[Literal["text"] | None, Query(description="of two towers that of texts")] = None,  # noqa: A002
) -> Response:
    """What layers give for a fixed picture, text or tensor: receipts with probes, by the keys of a reply."""
    parsed = query.Query.parse(request.scope["query_string"])
    parsed.check_names(OF_BODY | OWN)  # a reply has one format, and no dry run
    fields = query.read_fields(parsed, OF_BODY | OWN, engine.settings.max_json_depth)
    asked = validate(ExtractBody, {key: fields[key] for key in fields.keys() - OWN}).request_fields
    prober: Prober = request.app.state.prober
    features = await prober.probe(
        name,
        asked["selectors"],
        asked["embedding"],
        deadline,
        preprocessed=preprocessed == "caller",
        sent=(TextItem(""),) if input == "text" else (),
    )
    data = await engine.run_in_thread(partial(_encode, features), deadline)
    return Response(data, media_type="application/json")


def _encode(features: Features) -> bytes:
    receipts = describe_receipts(features)
    return orjson.dumps({"model": features.model, "fingerprint": features.fingerprint, "receipts": receipts})

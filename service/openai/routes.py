"""``POST /v1/embeddings`` and ``GET /v1/models``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request, Response

from layertap.models.errors import Fault, RequestError, escape
from layertap.service.engine.collect.results import find_wrong_row
from layertap.service.engine.engine import Engine
from layertap.service.engine.prepare.planner import PlannedRequest
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.features import Features, join_features
from layertap.service.formats.buffers import Buffers
from layertap.service.formats.table import FORMATS
from layertap.service.http.buffers_response import BuffersResponse
from layertap.service.http.model_descriptions import Json
from layertap.service.http.request_handler import describe_features, is_short_reply, make_chooser, receive
from layertap.service.http.timeout import EngineDependency
from layertap.service.openai.embeddings import (
    AskedEmbeddings,
    check_dimensions,
    encode_embeddings,
    parse_embeddings,
    parse_model_id,
    shorten,
)

ASK = "POST /extract shows the numbers; ask for another layer, or leave this input out"
MAX_NAMED = 8
choose_json = make_chooser({"json": FORMATS["json"]})
router = APIRouter(prefix="/v1", include_in_schema=False)  # OpenAI's own document describes these


@router.post("/embeddings")
async def create_embeddings(request: Request) -> Response:
    """A vector of norm 1 for each input."""
    engine: Engine = request.scope["state"]["exchange"].engine
    parsed, ticket = await receive(request, engine, parse_embeddings, choose_json)
    asked, parts = parsed.asked, parsed.split(engine.settings.max_inputs)
    if asked.dimensions is not None:
        handle = await engine.get_handle(parsed.model, ticket)
        planned = await engine.planner.plan(asked.extract, parts[0], handle, ticket.deadline)
        own = asked.extract.embedding is not None and not asked.extract.embedding.layer
        trained = handle.model.spec.dimensions if own else ()
        check_dimensions(asked.dimensions, _count_columns(planned), trained)
    features = [await engine.extract(asked.extract, part, ticket) for part in parts]
    with ticket.timings.step("encode"):
        if len(features) == 1 and is_short_reply(features[0]):
            joined, data = _encode(features, asked)
        else:
            joined, data = await engine.run_in_thread(partial(_encode, features, asked), ticket.deadline)
    return BuffersResponse(data, describe_features(joined), "application/json")


@router.get("/models")
async def list_models(engine: EngineDependency) -> Json:
    """All models, by the ids to request embeddings with."""
    return {"object": "list", "data": [await _describe(engine, entry.spec.name) for entry in engine.manager.registry]}


@router.get("/models/{model_id:path}")
async def show_model(engine: EngineDependency, model_id: str) -> Json:
    """One model, or a layer of it: ``NAME:LAYER``."""
    return await _describe(engine, model_id)


def _encode(parts: Sequence[Features], asked: AskedEmbeddings) -> tuple[Features, Buffers]:
    """Concatenate the features of all parts and encode the reply."""
    features = join_features(parts)
    if asked.ignored:
        fields = ", ".join(escape(field) for field in asked.ignored[:MAX_NAMED])
        warning = f"fields that mean nothing here were ignored: {fields}"
        features = replace(features, warnings=(*features.warnings, warning))
    if asked.dimensions is not None:
        features = shorten(features, asked.dimensions)
    if (found := find_wrong_row(features)) is not None:  # these clients accept no null
        row, text = found
        raise RequestError.from_faults([Fault(f"no embedding can be given: {text}", ASK, f"/input/{row}", row)])
    return features, encode_embeddings(features, asked.model_id, asked.extract.reply.encoding)


async def _describe(engine: Engine, model_id: str) -> Json:
    """A model as OpenAI's clients read it; if it is loaded, with its fingerprint and dimension.

    UnknownModelError, RequestError.
    """
    name, embedding = parse_model_id(model_id)
    entry = engine.manager.registry.get_entry(name)
    body: Json = {"id": model_id, "object": "model", "created": 0, "owned_by": "layertap", "state": entry.state}
    handle = engine.manager.find_handle(name)
    if handle is None or not handle.is_active or not (embedding.layer or handle.model.embedding is not None):
        return body
    request = ExtractRequest(model=name, embedding=embedding)
    with handle.hold():
        planned = await engine.planner.plan(
            request, SentInputs(), handle, time.monotonic() + engine.settings.deadline_s
        )
    (fingerprint,) = planned.fingerprints.values()
    return body | {"fingerprint": fingerprint, "dimensions": _count_columns(planned)}


def _count_columns(planned: PlannedRequest) -> int:
    """The dimension of a vector."""
    (result,) = planned.plan.results
    return result.capture.reply_shape(1)[-1]

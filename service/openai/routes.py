"""``POST /v1/embeddings`` and ``GET /v1/models``: plain routes, documented by OpenAI."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.responses import JSONResponse, Response

from layertap.models.errors import Fault, RequestError
from layertap.models.plan.plan import ResultSize
from layertap.service.engine.admit.admission import Ticket
from layertap.service.engine.collect.results import find_wrong_row
from layertap.service.engine.engine import Engine
from layertap.service.engine.limits import check_sizes
from layertap.service.engine.prepare.planned_request import PlannedRequest
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.features import Features, join_features
from layertap.service.formats.buffers import Buffers
from layertap.service.formats.table import FORMATS
from layertap.service.http.application import ExchangeRoute
from layertap.service.http.exchange import Exchange
from layertap.service.http.model_descriptions import Json
from layertap.service.http.receiving import make_envelope_reader, receive
from layertap.service.http.reply import BuffersResponse, describe_features, run_encoder, warn_of_ignored
from layertap.service.openai import embeddings

ASK = "POST /extract shows the numbers; ask for another layer, or leave this input out"
JSON = replace(FORMATS["json"], instead='ask for "encoding_format": "base64"')
read_envelope = make_envelope_reader({JSON.name: JSON})


async def create_embeddings(exchange: Exchange) -> Response:
    """A vector of norm 1 for each input."""
    engine = exchange.engine
    parse = partial(embeddings.parse_embeddings, aliases=engine.manager.registry.aliases)
    (asked, sent), ticket = await receive(exchange, parse, read_envelope)
    if asked.hints or any(isinstance(item, embeddings.DataUri) for _, item in sent.items):
        inputs = (await engine.get_handle(asked.model, ticket)).model.model_inputs
        asked = embeddings.choose_prompt(asked, inputs.text.prompts if inputs.text is not None else ())
        sent = embeddings.settle_items(sent, inputs)
    features = await compute_vectors(engine, asked, sent, ticket)
    encode = partial(_encode, features, asked)
    joined, data = await run_encoder(encode, features[0], engine, ticket, in_thread=len(features) > 1)
    return BuffersResponse(data, describe_features(joined), "application/json")


async def compute_vectors(
    engine: Engine, asked: embeddings.AskedEmbeddings, sent: SentInputs, ticket: Ticket
) -> list[Features]:
    """The features of all inputs, a part for as many as a request may have; any LayertapError."""
    parts, size = [sent], engine.settings.max_inputs
    if len(sent.items) > size:
        parts = [SentInputs(sent.items[start : start + size]) for start in range(0, len(sent.items), size)]
    if asked.dimensions is not None or len(parts) > 1:
        handle = await engine.get_handle(asked.model, ticket)
        planned = await engine.planner.plan(asked, parts[0], handle, ticket.deadline)
        columns = _count_columns(planned)
        if asked.dimensions is not None:
            own = asked.embedding is not None and not asked.embedding.layer
            embeddings.check_dimensions(asked.dimensions, columns, handle.model.spec.dimensions if own else ())
            columns = asked.dimensions
        numbers = len(sent.items) * columns
        check_sizes([ResultSize("", "float32", numbers, 4 * numbers)], len(sent.items), asked.reply)
    features = []
    for part in parts:  # a comprehension would be a coroutine of its own, woken as often as this one
        features.append(await engine.extract(asked, part, ticket))
    return features


async def list_models(exchange: Exchange) -> Response:
    """All models and aliases, by the ids to request embeddings with."""
    registry = exchange.engine.manager.registry
    names = [*(entry.spec.name for entry in registry), *registry.aliases]
    return JSONResponse({"object": "list", "data": [await _describe(exchange.engine, name) for name in names]})


async def show_model(exchange: Exchange, model_id: str) -> Response:
    """One model or alias, or a layer of it: ``NAME:LAYER``."""
    return JSONResponse(await _describe(exchange.engine, model_id))


routes = [
    ExchangeRoute("/v1/embeddings", create_embeddings, methods=["POST"]),
    ExchangeRoute("/v1/models", list_models, methods=["GET"]),
    ExchangeRoute("/v1/models/{model_id:path}", show_model, methods=["GET"]),
]


def _encode(parts: Sequence[Features], asked: embeddings.AskedEmbeddings) -> tuple[Features, Buffers]:
    """Concatenate the features of all parts and encode the reply."""
    features = join_vectors(parts, asked, "input")
    return features, embeddings.encode_embeddings(features, asked.model_id, asked.reply.encoding)


def join_vectors(parts: Sequence[Features], asked: embeddings.AskedEmbeddings, field: str) -> Features:
    """The features of all parts, with the requested dimensions; RequestError for numbers that JSON can't hold.

    ``field`` is the body's, of which a bad input is named.
    """
    features = warn_of_ignored(join_features(parts), asked.ignored)
    if asked.dimensions is not None:
        normalize = asked.embedding is None or asked.embedding.normalize
        features = embeddings.shorten(features, asked.dimensions, normalize=normalize)
    if (found := find_wrong_row(features)) is not None:  # these clients accept no null
        row, text = found
        raise RequestError.from_faults([Fault(f"no embedding can be given: {text}", ASK, f"/{field}/{row}", row)])
    return embeddings.pack_bits(features, asked.precision) if asked.precision is not None else features


async def _describe(engine: Engine, model_id: str) -> Json:
    """A model for OpenAI's clients, with fingerprint and dimension if it is loaded; UnknownModelError, RequestError."""
    name, embedding = embeddings.parse_model_id(model_id, engine.manager.registry.aliases)
    entry = engine.manager.registry.get_entry(name)
    body: Json = {"id": model_id, "object": "model", "created": 0, "owned_by": "layertap", "state": entry.state}
    handle = engine.manager.find_handle(name)
    if handle is None or handle.state != "ready" or not (embedding.layer or handle.model.embedding is not None):
        return body
    request = ExtractRequest(model=name, embedding=embedding)
    deadline = time.monotonic() + engine.settings.deadline_s
    with handle.hold():
        planned = await engine.planner.plan(request, SentInputs(), handle, deadline)
    (fingerprint,), (space,) = planned.fingerprints.values(), planned.spaces.values()
    return body | {"fingerprint": fingerprint, "space": space, "dimensions": _count_columns(planned)}


def _count_columns(planned: PlannedRequest) -> int:
    """The dimension of a vector."""
    (result,) = planned.plan.results
    return result.capture.reply_shape(1)[-1]

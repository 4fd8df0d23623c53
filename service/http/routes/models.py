"""The models and their layers, and projections of these that are kept."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Response

from layertap.models.errors import LoadError, RequestError, TooLargeError
from layertap.models.plan.matches import filter_layers
from layertap.models.spec import Pool, ReplyDType
from layertap.service.config.file import ConfigError
from layertap.service.engine.deadline import wait_until
from layertap.service.engine.models.model_updates import ModelUpdates
from layertap.service.errors import BadRequestError, DeadlineError
from layertap.service.explain.prober import Prober
from layertap.service.features import Features
from layertap.service.formats.negotiation import negotiate
from layertap.service.formats.plain_data import describe_receipts
from layertap.service.http import query
from layertap.service.http.auth import require_admin
from layertap.service.http.body import load_json
from layertap.service.http.exchange import DeadlineDependency, Exchange, ExchangeDependency
from layertap.service.http.layer_tree import format_tree
from layertap.service.http.model_descriptions import Json, describe_layers, describe_model
from layertap.service.http.openapi import BINARY, describe_problems
from layertap.service.inputs.items import TextItem
from layertap.service.schemas.base import Flag
from layertap.service.schemas.bodies import ExtractBody
from layertap.service.schemas.replies import LabelsReply, LayersReply, Model, ModelsReply, ProbeReply, ReloadReply
from layertap.service.schemas.validation_errors import validate
from layertap.service.settings import LIMITS

log = logging.getLogger("layertap")
router = APIRouter(tags=["models"], responses=describe_problems(401, 429))
PROBED = frozenset({"layers", "pool", "normalize", "dtype"})  # fields of a body
PROBE_OPTIONS = frozenset({"preprocessed", "input"})
FILTERS = frozenset({"match", "type", "leaf", "functions", "format"})
ENTRY: Json = {"type": "object", "description": "an entry of 'models' in the configuration file; without its name"}
MAX_ENTRY = 2**16  # bytes
MATRIX: Json = {"requestBody": {"required": True, "content": {"application/x-safetensors": BINARY}}}
LISTING_TYPES = {"json": "application/json", "text": "text/plain"}


@router.get("/models", response_model=ModelsReply)
def list_models(exchange: ExchangeDependency) -> Response:
    """Every configured model and its state, and the limits of requests."""
    manager, settings = exchange.engine.manager, exchange.engine.settings
    body: Json = {"default": manager.default, "aliases": manager.registry.aliases}
    body["models"] = [describe_model(entry) for entry in manager.registry]
    return _make_json(body | {"limits": {name: getattr(settings, name) for name in LIMITS}})


@router.get("/models/{name}", response_model=Model, responses=describe_problems(404))
def show_model(exchange: ExchangeDependency, name: str) -> Response:
    """One model: state, source, device, dtype, input, preprocessing, weights, default embedding, hooks on it now."""
    return _reply_model(exchange, name)


@router.get(
    "/models/{name}/layers",
    response_model=LayersReply,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string", "description": "a tree for terminals"}}}},
        **describe_problems(404, 406, 422, 503, 504),
    },
)
async def list_layers(
    exchange: ExchangeDependency,
    deadline: DeadlineDependency,
    name: str,
    match: Annotated[str | None, Query(max_length=512)] = None,
    type: Annotated[str | None, Query(max_length=128)] = None,  # noqa: A002
    leaf: Flag | None = None,
    functions: Flag = False,
    format: str | None = None,  # noqa: A002
) -> Response:
    """All layers in execution order, with shapes of one row; ``functions`` adds those that a layer's own forward calls.

    As JSON, or as a tree for terminals (``format=text``).
    """
    as_tree = negotiate(exchange.head.get(b"accept", b"").decode("latin-1"), format, LISTING_TYPES) == "text"
    query.Query(exchange.scope["query_string"]).check(FILTERS)
    engine = exchange.engine
    handle = await engine.manager.get_handle(name, deadline)
    model = handle.model

    def reply() -> Response:
        body = describe_layers(model, filter_layers(model.catalog, match, type, leaf), functions=functions)
        return Response(format_tree(body["layers"]), media_type="text/plain") if as_tree else _make_json(body)

    with handle.hold():
        if functions:
            await handle.survey(model.shapes, deadline, functions=True)
        return await engine.run_in_thread(reply, deadline)


@router.get("/models/{name}/labels", response_model=LabelsReply, responses=describe_problems(404, 422, 503, 504))
async def list_labels(exchange: ExchangeDependency, deadline: DeadlineDependency, name: str) -> Response:
    """The names of a model's classes from class 0, null if it has none."""
    query.Query(exchange.scope["query_string"]).check(frozenset())
    model = (await exchange.engine.manager.get_handle(name, deadline)).model
    return _make_json({"model": model.spec.name, "labels": model.labels.names if model.labels is not None else None})


@router.get("/models/{name}/probe", response_model=ProbeReply, responses=describe_problems(400, 404, 422, 503, 504))
async def probe_layers(
    exchange: ExchangeDependency,
    deadline: DeadlineDependency,
    name: str,
    layers: Annotated[
        str | None, Query(description="selectors, separated by commas, or layers as in a body; else the embedding")
    ] = None,
    pool: Pool | None = None,
    normalize: Flag | None = None,
    dtype: ReplyDType | None = None,
    preprocessed: Literal["caller"] | None = None,
    input: Annotated[Literal["text"] | None, Query(description="of two towers that of texts")] = None,  # noqa: A002
) -> Response:
    """The results of layers for a fixed picture, text or tensor: receipts with probes, by key."""
    parsed = query.Query(exchange.scope["query_string"])
    parsed.check_names(PROBED | PROBE_OPTIONS)  # a reply has one format, and no dry run
    fields = query.read_fields(parsed, PROBED | PROBE_OPTIONS)
    asked = validate(ExtractBody, {key: fields[key] for key in fields.keys() - PROBE_OPTIONS}).request_fields
    prober: Prober = exchange.scope["app"].state.prober
    sent, tensors = (TextItem(""),) if input == "text" else (), preprocessed == "caller"
    engine = exchange.engine
    with engine.admission.admit(deadline) as ticket:
        of_request = name, asked["selectors"], asked["embedding"]
        features = await prober.probe(*of_request, ticket, preprocessed=tensors, sent=sent)
    return await engine.run_in_thread(partial(_reply_probes, features), deadline)


@router.put(
    "/models/{name}",
    response_model=Model,
    response_description="The new version answers",
    dependencies=[Depends(require_admin)],
    responses={
        202: {"model": Model, "description": "It still loads, and answers once it is there"},
        **describe_problems(400, 403, 404, 408, 409, 413, 422, 503, 504),
    },
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": ENTRY}}}},
)
async def exchange_model(exchange: ExchangeDependency, deadline: DeadlineDependency, name: str) -> Response:
    """Load another version of a model, from an entry as in the configuration file, while the present one answers.

    Once it is loaded it answers new requests; if it can't be loaded nothing changes. The configuration says what
    is allowed. The file stays as it is.
    """
    updates: ModelUpdates = exchange.scope["app"].state.updates
    exchanging = await updates.exchange(name, await _read_entry(exchange, deadline), deadline)
    try:
        error = await wait_until(deadline, asyncio.shield(exchanging))
    except DeadlineError:
        return _reply_model(exchange, name, 202)
    if isinstance(error, LoadError):
        detail = f"the new version of model {name} could not be loaded: {error.detail}"
        raise RequestError(detail, hint=error.hint or "the present one goes on")
    if error is not None:
        raise error
    return _reply_model(exchange, name)


@router.post(
    "/models/reload",
    response_model=ReloadReply,
    response_description="In effect",
    dependencies=[Depends(require_admin)],
    responses={
        202: {"model": ReloadReply, "description": "Taken; some models still load"},
        **describe_problems(403, 409, 422, 504),
    },
)
async def reload_models(exchange: ExchangeDependency, deadline: DeadlineDependency) -> Response:
    """Read the configuration file again, and apply what it says of models; new versions load first."""
    updates: ModelUpdates = exchange.scope["app"].state.updates
    try:
        changes, done = await wait_until(deadline, updates.reload())
    except ConfigError as error:
        log.error("the configuration is not read anew", extra={"fields": {"reason": error.detail}})
        detail = "the configuration file is not taken; the server's log has what is wrong"
        hint = "`layertap check --config FILE` shows it too"
        raise RequestError(detail, hint=hint, faults=error.faults) from None
    body, status = changes.describe(), 200
    try:
        await wait_until(deadline, asyncio.shield(done))
    except DeadlineError:
        status = 202
    return _make_json(body, status)


@router.post(
    "/models/{name}/load",
    response_model=Model,
    dependencies=[Depends(require_admin)],
    responses=describe_problems(403, 404, 422, 503, 504),
)
async def load_model(exchange: ExchangeDependency, deadline: DeadlineDependency, name: str) -> Response:
    """Load a model now, even if loading failed before."""
    await exchange.engine.manager.load(name, deadline)
    return _reply_model(exchange, name)


@router.post(
    "/models/{name}/unload",
    response_model=Model,
    dependencies=[Depends(require_admin)],
    responses=describe_problems(403, 404, 422, 503),
)
async def unload_model(exchange: ExchangeDependency, name: str) -> Response:
    """Finish the model's requests, then unload it; one with ``load: lazy`` is loaded again by the next request."""
    await exchange.engine.manager.unload(name)
    return _reply_model(exchange, name)


@router.put(
    "/projections/{digest}",
    response_model=dict[str, int],
    responses=describe_problems(408, 413, 422, 504),
    openapi_extra=MATRIX,
)
async def put_projection(exchange: ExchangeDependency, deadline: DeadlineDependency, digest: str) -> Response:
    """Keep a linear map of channels for requests whose ``project`` names it by its digest; its bytes by that digest.

    The digest is "sha256-" with the SHA-256 of the body, which holds ``weight``, perhaps ``bias`` and ``threshold``.
    """
    engine = exchange.engine
    with engine.admission.admit(deadline) as ticket:
        data = await exchange.read_body(ticket.reserve_bytes)
        size = await engine.run_in_thread(partial(engine.projections.put, digest, data), deadline)
    return _make_json({digest: size})


@router.get(
    "/projections",
    response_model=dict[str, int],
    dependencies=[Depends(require_admin)],
    responses=describe_problems(403),
)
def list_projections(exchange: ExchangeDependency) -> Response:
    """The bytes of each projection that is kept, by its digest, the least recently used first."""
    return _make_json(exchange.engine.projections.sizes)


async def _read_entry(exchange: Exchange, deadline: float) -> Json:
    """The JSON object in a small body, empty without a body; BadRequestError, TooLargeError."""
    with exchange.engine.admission.admit(deadline) as ticket:
        data = await exchange.read_body(ticket.reserve_bytes)
    if len(data) > MAX_ENTRY:
        hint = "send one entry of 'models', as in the configuration file"
        raise TooLargeError(f"the body has {len(data)} bytes, the limit here is {MAX_ENTRY}", hint=hint)
    entry = load_json(data) if data else {}
    if not isinstance(entry, dict):
        raise BadRequestError("the body is no JSON object")
    return entry


def _reply_model(exchange: Exchange, name: str, status: int = 200) -> Response:
    return _make_json(describe_model(exchange.engine.manager.registry.get_entry(name)), status)


def _make_json(body: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _reply_probes(features: Features) -> Response:
    receipts = describe_receipts(features)
    digests = {"fingerprint": features.fingerprint} | ({"space": features.space} if features.space else {})
    return _make_json({"model": features.model, **digests, "receipts": receipts})

"""The routes below ``/v2``: inferences, metadata, health, the repository, statistics.

They are left out of the OpenAPI document: the protocol has one of its own, and clients that are made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from layertap.models.errors import LayertapError, RequestError, UnknownModelError, escape
from layertap.service.engine.engine import Engine
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.errors import UnavailableError
from layertap.service.http.auth import require_admin
from layertap.service.http.buffers_response import make_response
from layertap.service.http.dependencies import DeadlineDependency, EngineDependency
from layertap.service.http.json_document import read_document
from layertap.service.http.model_descriptions import Json
from layertap.service.http.request_handler import describe_features, is_short, receive
from layertap.service.http.routes import health, models
from layertap.service.oip import metadata
from layertap.service.oip.encoding import BINARY, FORMATS, HEADER, JSON, VERSION, encode_reply
from layertap.service.oip.metadata import describe_statistics
from layertap.service.oip.parsing import InferRequest, parse_infer

Endpoint = Callable[..., Any]


async def check_version(request: Request) -> None:
    """UnknownModelError for a version in the path that no model has."""
    version = request.path_params.get("version", VERSION)
    if version != VERSION:
        raise UnknownModelError(f"no model has version {escape(version)}", hint=f"each has version {VERSION} only")


router = APIRouter(prefix="/v2", include_in_schema=False, dependencies=[Depends(check_version)])


def add_of_model(method: str, path: str = "") -> Callable[[Endpoint], Endpoint]:
    """Have an endpoint answer below a model's path, with its version in it or without."""

    def add(endpoint: Endpoint) -> Endpoint:
        for prefix in ("/models/{name}", "/models/{name}/versions/{version}"):
            router.add_api_route(f"{prefix}{path}", endpoint, methods=[method])
        return endpoint

    return add


@add_of_model("POST", "/infer")
async def infer(request: Request, engine: EngineDependency, name: str) -> Response:
    """What layers of a model compute for a request's inputs."""
    parse = partial(parse_infer, model=name)
    async with receive(request, engine, parse, FORMATS, get_timeout=_get_timeout) as (parsed, ticket):
        handle = await engine.get_handle(parsed.model, ticket)
        extract = parsed.fit_to_model(handle.model)
        try:
            features = await engine.extract(extract, ticket)
        except LayertapError as error:
            raise parsed.locate(error) from None
        headers = describe_features(features)
        with parsed.extract.timings.step("encode"):
            encode = partial(encode_reply, features, parsed.id, parsed.binary, parsed.binary_default)
            head, behind = encode() if is_short(features) else await engine.run_in_thread(encode, ticket.deadline)
        if behind:
            headers[HEADER] = str(sum(map(len, head)))
        return make_response(head + behind, headers, (BINARY if behind else JSON).media_type)


@router.get("")
async def show_server() -> Json:
    """The server's name, version and extensions."""
    return metadata.describe_server()


@router.get("/health/live")
async def show_live(engine: EngineDependency) -> Json:
    """As ``/livez``."""
    await health.livez(engine)
    return {"live": True}


@router.get("/health/ready")
async def show_ready(engine: EngineDependency) -> Json:
    """As ``/readyz``."""
    await health.readyz(engine)
    return {"ready": True}


@router.get("/models/stats")
async def list_statistics(engine: EngineDependency) -> Json:
    """What requests and forwards of each model took."""
    return {"model_stats": [_describe_statistics(engine, entry.spec.name) for entry in engine.manager.registry]}


@add_of_model("GET", "/stats")
async def show_statistics(engine: EngineDependency, name: str) -> Json:
    """What requests and forwards of one model took."""
    return {"model_stats": [_describe_statistics(engine, engine.manager.registry.get_entry(name).spec.name)]}


@add_of_model("GET", "/ready")
async def show_model_ready(engine: EngineDependency, name: str) -> Json:
    """Whether a model is loaded."""
    entry = engine.manager.registry.get_entry(name)
    if entry.state != "ready":
        index = metadata.describe_index(entry)
        handle = engine.manager.find_handle(name)
        seconds = handle.seconds_to_load if handle is not None else 0.0
        raise UnavailableError(f"model {name} is {entry.state}", hint=index["reason"], retry_after=seconds)
    return {"name": name, "ready": True}


@add_of_model("GET")
async def show_model(engine: EngineDependency, deadline: DeadlineDependency, name: str) -> Json:
    """A model's inputs, and its outputs that need no name of a layer; loads the model if need be."""
    handle, outputs = await _plan_outputs(engine, name, deadline)
    return metadata.describe_model(handle.model, outputs)


@add_of_model("GET", "/config")
async def show_config(engine: EngineDependency, deadline: DeadlineDependency, name: str) -> Json:
    """The same as Triton's configuration has it; loads the model if need be."""
    handle, outputs = await _plan_outputs(engine, name, deadline)
    return metadata.describe_config(handle.model, outputs, engine.settings.max_inputs)


@router.post("/repository/index")
async def list_repository(request: Request, engine: EngineDependency, deadline: DeadlineDependency) -> list[Json]:
    """Every configured model and its state; with ``ready`` only those that are."""
    document = await _read_fields(request, engine, deadline, {"ready"})
    index = [metadata.describe_index(entry) for entry in engine.manager.registry]
    return [each for each in index if not document.get("ready") or each["state"] == "READY"]


@router.post("/repository/models/{name}/load", dependencies=[Depends(require_admin)])
async def load_model(request: Request, engine: EngineDependency, deadline: DeadlineDependency, name: str) -> Json:
    """As ``POST /models/NAME/load``."""
    document = await _read_fields(request, engine, deadline, {"parameters"})
    if document.get("parameters"):
        raise RequestError("models are configured by who runs the server", hint="leave 'config' and files out")
    await models.load_model(engine, deadline, name)
    return {}


@router.post("/repository/models/{name}/unload", dependencies=[Depends(require_admin)])
async def unload_model(engine: EngineDependency, name: str) -> Json:
    """As ``POST /models/NAME/unload``; no model has others that depend on it."""
    await models.unload_model(engine, name)
    return {}


def _get_timeout(request: InferRequest) -> float | None:
    return request.timeout_s


def _describe_statistics(engine: Engine, name: str) -> Json:
    return describe_statistics(name, engine.metrics.get_statistics(name))


async def _plan_outputs(
    engine: Engine, name: str, deadline: float
) -> tuple[ModelHandle, list[metadata.TensorMetadata]]:
    """A model's handle, and the outputs that its metadata have."""
    handle = await engine.manager.get_handle(name, deadline)
    with handle.hold():
        planned = await engine.planner.plan(metadata.make_outputs_request(handle.model), handle, deadline)
    return handle, [metadata.describe_output(result) for result in planned.plan.results]


async def _read_fields(request: Request, engine: Engine, deadline: float, fields: set[str]) -> Json:
    """A body of few fields, or none; BadRequestError, RequestError, TooLargeError."""
    document = await read_document(request, engine.settings, partial(engine.admission.admit, deadline))
    if unknown := document.keys() - fields:
        raise RequestError(f"there is no field {escape(min(unknown))}", hint=f"use {', '.join(fields)}")
    return document

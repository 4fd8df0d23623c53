"""The routes below ``/v2``: inferences, metadata, health.

They are left out of the OpenAPI document: the protocol has one of its own, and clients that are made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from layertap.models.errors import LayertapError, UnknownModelError, escape
from layertap.service.errors import UnavailableError
from layertap.service.http.buffers_response import make_response
from layertap.service.http.dependencies import DeadlineDependency, EngineDependency
from layertap.service.http.model_descriptions import Json
from layertap.service.http.request_handler import describe_features, is_short, receive
from layertap.service.http.routes import health
from layertap.service.oip.encoding import BINARY, FORMATS, HEADER, JSON, VERSION, encode_reply
from layertap.service.oip.metadata import describe_model, make_outputs_request
from layertap.service.oip.parsing import InferRequest, parse_infer
from layertap.service.version import get_version

Endpoint = Callable[..., Any]
EXTENSIONS = ("binary_tensor_data", "parameters", "schedule_policy")


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
        try:
            features = await engine.extract(parsed.extract, ticket)
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
    return {"name": "layertap", "version": get_version(), "extensions": EXTENSIONS}


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


@add_of_model("GET", "/ready")
async def show_model_ready(engine: EngineDependency, name: str) -> Json:
    """Whether a model is loaded."""
    entry = engine.manager.registry.get_entry(name)
    if entry.state != "ready":
        handle = engine.manager.find_handle(name)
        seconds = handle.seconds_to_load if handle is not None else 0.0
        hint = entry.reason or "GET /models has its state"
        raise UnavailableError(f"model {name} is {entry.state}", hint=hint, retry_after=seconds)
    return {"name": name, "ready": True}


@add_of_model("GET")
async def show_model(engine: EngineDependency, deadline: DeadlineDependency, name: str) -> Json:
    """A model's inputs, and its outputs that need no name of a layer; loads the model if need be."""
    handle = await engine.manager.get_handle(name, deadline)
    with handle.hold():
        planned = await engine.planner.plan(make_outputs_request(handle.model), handle, deadline)
    return describe_model(handle.model, planned.plan.results)


def _get_timeout(request: InferRequest) -> float | None:
    return request.timeout_s

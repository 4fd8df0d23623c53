"""The plain routes below ``/v2``: inferences, metadata, health. The protocol has an OpenAPI document of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.responses import JSONResponse, Response

from layertap.models.errors import LayertapError, UnknownModelError, escape
from layertap.models.plan.plan import Result
from layertap.models.plan.requested import Embedding
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.model_info import ModelInfo
from layertap.models.spec import InputSpec
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.errors import UnavailableError
from layertap.service.http.application import ExchangeRoute
from layertap.service.http.exchange import Exchange
from layertap.service.http.model_descriptions import Json
from layertap.service.http.receiving import make_envelope_reader, receive
from layertap.service.http.reply import BuffersResponse, describe_features, run_encoder, warn_of_ignored
from layertap.service.http.routes import health
from layertap.service.oip.encoding import BINARY, FORMATS, HEADER, JSON, VERSION, encode_reply
from layertap.service.oip.parsing import EMBEDDING, locate, parse_infer
from layertap.service.oip.tensors import BYTES, DATATYPES, IMAGE, TEXT
from layertap.service.version import get_version

read_envelope = make_envelope_reader(FORMATS)
EXTENSIONS = ("binary_tensor_data", "parameters", "schedule_policy")


def _check_version(version: str) -> None:
    """UnknownModelError if no model has the version that a path names."""
    if version != VERSION:
        raise UnknownModelError(f"no model has version {escape(version)}", hint=f"each has version {VERSION} only")


async def infer(exchange: Exchange, name: str, version: str = VERSION) -> Response:
    """Compute the requested layers for a request's inputs."""
    _check_version(version)
    engine = exchange.engine
    parse = partial(parse_infer, model=name, headers=exchange.headers)
    (asked, sent, request_id), ticket = await receive(exchange, parse, read_envelope)
    exchange.shorten(asked.timeout_s)
    try:
        features = warn_of_ignored(await engine.extract(asked, sent, ticket), asked.ignored)
    except LayertapError as error:
        raise locate(error, sent) from None
    headers = describe_features(features)
    encode = partial(encode_reply, features, request_id, asked.binary, asked.binary_default)
    head, behind = await run_encoder(encode, features, engine, ticket)
    if behind:
        headers[HEADER] = str(sum(map(len, head)))
    return BuffersResponse(head + behind, headers, (BINARY if behind else JSON).media_type)


async def show_server(exchange: Exchange) -> Response:
    """The server's name, version and extensions."""
    return JSONResponse({"name": "layertap", "version": get_version(), "extensions": EXTENSIONS})


async def show_live(exchange: Exchange) -> Response:
    """As ``/livez``."""
    health.check_live(exchange.engine)
    return JSONResponse({"live": True})


async def show_ready(exchange: Exchange) -> Response:
    """As ``/readyz``."""
    health.check_ready(exchange.engine)
    return JSONResponse({"ready": True})


async def show_model_ready(exchange: Exchange, name: str, version: str = VERSION) -> Response:
    """Whether a model is loaded."""
    _check_version(version)
    manager = exchange.engine.manager
    if (entry := manager.registry.get_entry(name)).state != "ready":
        handle, hint = manager.find_handle(name), entry.reason or "GET /models has its state"
        seconds = handle.seconds_to_load if handle is not None else 0.0
        raise UnavailableError(f"model {name} is {entry.state}", hint=hint, retry_after=seconds)
    return JSONResponse({"name": name, "ready": True})


async def show_model(exchange: Exchange, name: str, version: str = VERSION) -> Response:
    """A model's inputs, and its outputs without a layer's name; loads the model if necessary."""
    _check_version(version)
    engine = exchange.engine
    deadline = time.monotonic() + exchange.read_limit()
    handle = await engine.manager.get_handle(name, deadline)
    embedding = Embedding(alias=EMBEDDING) if handle.model.model_embedding is not None else None
    outputs = ExtractRequest(model=handle.model.spec.name, selectors=(parse_selector("."),), embedding=embedding)
    with handle.hold():
        planned = await engine.planner.plan(outputs, SentInputs(), handle, deadline)
    return JSONResponse(_describe_model(handle.model, planned.plan.results))


def _make_routes(method: str, path: str, endpoint: Callable[..., Awaitable[Response]]) -> list[ExchangeRoute]:
    """The routes of a model, without and with a version."""
    versioned = path.replace("{name}", "{name}/versions/{version}")
    return [ExchangeRoute(each, endpoint, methods=[method]) for each in (path, versioned)]


routes = [
    *_make_routes("POST", "/v2/models/{name}/infer", infer),
    ExchangeRoute("/v2", show_server, methods=["GET"]),
    ExchangeRoute("/v2/health/live", show_live, methods=["GET"]),
    ExchangeRoute("/v2/health/ready", show_ready, methods=["GET"]),
    *_make_routes("GET", "/v2/models/{name}/ready", show_model_ready),
    *_make_routes("GET", "/v2/models/{name}", show_model),
]


def _describe_model(model: ModelInfo, results: Sequence[Result]) -> Json:
    """A model's metadata, with the planned results as its outputs.

    Shapes have the rows on their first axis, and -1 for axes of any size.
    """
    encoded = [IMAGE] if model.model_inputs.takes_pictures else []
    encoded += [TEXT] if model.text is not None and model.text.encode is not None else []
    inputs = [*map(_describe_input, model.inputs)]
    inputs += [{"name": name, "datatype": BYTES, "shape": (-1, 1)} for name in encoded]
    outputs = list(map(_describe_output, results))
    name = model.spec.name
    return {"name": name, "versions": [VERSION], "platform": "pytorch", "inputs": inputs, "outputs": outputs}


def _describe_input(spec: InputSpec) -> Json:
    sizes = [-1, *spec.shape]
    if spec.longest is not None:
        sizes[1 + spec.long_axis] = -1
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": sizes}


def _describe_output(result: Result) -> Json:
    capture = result.capture
    if capture.reduction.is_by_row:
        any_size: tuple[int | None, ...] = (0,)
    else:
        any_size = (*capture.info.token_axes, capture.info.row_axis)
    shape = [-1 if axis in any_size else size for axis, size in enumerate(capture.reply_shape(1))]
    return {"name": result.key, "datatype": DATATYPES[capture.dtype], "shape": shape}

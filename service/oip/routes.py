"""The routes below ``/v2``: inferences, metadata, health.

They are left out of the OpenAPI document, because the protocol has its own, from which clients are generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from layertap.models.errors import LayertapError, UnknownModelError, escape
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Embedding
from layertap.models.selection.plan import Result
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec
from layertap.service.engine.request import ExtractRequest, SentInputs
from layertap.service.errors import UnavailableError
from layertap.service.http.exchange import ExchangeDependency
from layertap.service.http.model_descriptions import Json
from layertap.service.http.receiving import make_envelope_reader, receive
from layertap.service.http.reply import BuffersResponse, describe_features, run_encoder
from layertap.service.http.routes import health
from layertap.service.http.timeout import DeadlineDependency, EngineDependency
from layertap.service.oip.encoding import BINARY, FORMATS, HEADER, JSON, VERSION, encode_reply
from layertap.service.oip.parsing import EMBEDDING, locate, parse_infer
from layertap.service.oip.tensors import BYTES, DATATYPES, IMAGE, TEXT
from layertap.service.version import get_version

read_envelope = make_envelope_reader(FORMATS)
EXTENSIONS = ("binary_tensor_data", "parameters", "schedule_policy")


async def check_version(request: Request) -> None:
    """UnknownModelError if the path names a version that no model has."""
    version = request.path_params.get("version", VERSION)
    if version != VERSION:
        raise UnknownModelError(f"no model has version {escape(version)}", hint=f"each has version {VERSION} only")


router = APIRouter(prefix="/v2", include_in_schema=False, dependencies=[Depends(check_version)])


@router.post("/models/{name}/infer")
@router.post("/models/{name}/versions/{version}/infer")
async def infer(exchange: ExchangeDependency, name: str) -> Response:
    """Compute the requested layers for a request's inputs."""
    engine = exchange.engine
    parse = partial(parse_infer, model=name, headers=exchange.headers)
    (asked, sent, request_id), ticket = await receive(exchange, parse, read_envelope)
    exchange.shorten(asked.timeout_s)
    try:
        features = await engine.extract(asked, sent, ticket)
    except LayertapError as error:
        raise locate(error, sent) from None
    headers = describe_features(features)
    encode = partial(encode_reply, features, request_id, asked.binary, asked.binary_default)
    head, behind = await run_encoder(encode, features, engine, ticket)
    if behind:
        headers[HEADER] = str(sum(map(len, head)))
    return BuffersResponse(head + behind, headers, (BINARY if behind else JSON).media_type)


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


@router.get("/models/{name}/ready")
@router.get("/models/{name}/versions/{version}/ready")
async def show_model_ready(engine: EngineDependency, name: str) -> Json:
    """Whether a model is loaded."""
    entry = engine.manager.registry.get_entry(name)
    if entry.state != "ready":
        handle = engine.manager.find_handle(name)
        seconds = handle.seconds_to_load if handle is not None else 0.0
        hint = entry.reason or "GET /models has its state"
        raise UnavailableError(f"model {name} is {entry.state}", hint=hint, retry_after=seconds)
    return {"name": name, "ready": True}


@router.get("/models/{name}")
@router.get("/models/{name}/versions/{version}")
async def show_model(engine: EngineDependency, deadline: DeadlineDependency, name: str) -> Json:
    """A model's inputs, and the outputs that requests may name without a layer; loads the model if necessary."""
    handle = await engine.manager.get_handle(name, deadline)
    embedding = Embedding(alias=EMBEDDING) if handle.model.model_embedding is not None else None
    own_name = handle.model.spec.name
    outputs = ExtractRequest(model=own_name, selectors=(parse_selector("."),), embedding=embedding)
    with handle.hold():
        planned = await engine.planner.plan(outputs, SentInputs(), handle, deadline)
    return _describe_model(handle.model, planned.plan.results)


def _describe_model(model: ModelInfo, results: Sequence[Result]) -> Json:
    """A model's metadata, with the planned results as its outputs.

    Shapes have the rows on their first axis, and -1 for axes of any size.
    """
    encoded = [IMAGE] if model.model_inputs.takes_pictures else []
    encoded += [TEXT] if model.text is not None and model.text.encode is not None else []
    return {
        "name": model.spec.name,
        "versions": [VERSION],
        "platform": "pytorch",
        "inputs": [
            *map(_describe_input, model.inputs),
            *({"name": name, "datatype": BYTES, "shape": (-1, 1)} for name in encoded),
        ],
        "outputs": [_describe_output(result) for result in results],
    }


def _describe_input(spec: InputSpec) -> Json:
    sizes = [
        -1 if spec.longest is not None and axis == spec.long_axis else size for axis, size in enumerate(spec.shape)
    ]
    return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": (-1, *sizes)}


def _describe_output(result: Result) -> Json:
    capture = result.capture
    if capture.reduction.is_by_row:
        any_size: tuple[int | None, ...] = (0,)
    else:
        any_size = (*capture.info.token_axes, capture.info.row_axis)
    shape = [-1 if axis in any_size else size for axis, size in enumerate(capture.reply_shape(1))]
    return {"name": result.key, "datatype": DATATYPES[capture.dtype], "shape": shape}

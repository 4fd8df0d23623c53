"""An inference as the protocol's clients send it, made into an ``ExtractRequest``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from layertap.models.errors import LayertapError, RequestError, SelectorError
from layertap.models.model_info import ModelInfo
from layertap.models.selection.hook_points import Embedding, Selector
from layertap.service.engine.admit.admission import check_results
from layertap.service.engine.request import ExtractRequest, ReplyOptions
from layertap.service.errors import BadRequestError
from layertap.service.http.json_document import load_json
from layertap.service.http.parsing import RawRequest
from layertap.service.http.query import join_parts
from layertap.service.inputs.items import ArraysItem
from layertap.service.oip.encoding import BINARY, HEADER, JSON
from layertap.service.oip.inputs import read_items, read_raw_item
from layertap.service.oip.parameters import OF_OUTPUT, OF_REQUEST, split_parameters
from layertap.service.oip.schemas import InferBody, InferParameters, OutputBody, OutputParameters
from layertap.service.schemas.bodies import ExtractBody
from layertap.service.schemas.layers import LayerBody
from layertap.service.schemas.validation_errors import validate
from layertap.service.settings import Settings

EMBEDDING = "embedding"  # the output that is a model's embedding, whichever layer gives it
HIGHEST_PRIORITY = 1  # 0 is the usual one, which is the same here


@dataclass(frozen=True)
class InferRequest:
    """An extraction with what the protocol's replies say besides.

    ``binary`` tells by the names of outputs whether they are sent behind the JSON, ``binary_default`` of all others.
    ``raw`` is a body that is one row and nothing else, to be read as the model takes it.
    """

    extract: ExtractRequest
    id: str = ""
    binary: Mapping[str, bool] = field(default_factory=dict)
    binary_default: bool = False
    timeout_s: float | None = None
    raw: bytes | None = None

    @property
    def model(self) -> str | None:
        """The model's name."""
        return self.extract.model

    def locate(self, error: LayertapError) -> LayertapError:
        """An error of it with faults by rows; arrays are one input of many rows, which errors do not number."""
        if any(isinstance(item, ArraysItem) for _, item in self.extract.items):
            error.faults = tuple(replace(fault, input=None) for fault in error.faults)
        return error

    def fit_to_model(self, model: ModelInfo) -> ExtractRequest:
        """The extraction, with a raw body as the model takes it; RequestError."""
        if self.raw is None:
            return self.extract
        return replace(self.extract, items=((0, read_raw_item(self.raw, model)),))


@dataclass(frozen=True)
class Outputs:
    """What is asked for: layers, the embedding, and which of them are sent behind the JSON."""

    selectors: tuple[Selector, ...]
    embedding: Embedding | None
    binary: Mapping[str, bool]


def parse_infer(raw: RawRequest, settings: Settings, model: str) -> InferRequest:
    """What a request asks for; computes, so it belongs in a thread. BadRequestError, RequestError, TooLargeError."""
    length = _get_json_length(raw)
    if length is None:
        embedding = Embedding(alias=EMBEDDING)
        reply = ReplyOptions(BINARY, max_bytes=settings.max_reply_bytes)
        extract = ExtractRequest(model=model, items=(), embedding=embedding, reply=reply, timings=raw.timings)
        return InferRequest(extract, binary_default=True, raw=raw.data)
    body = validate(InferBody, load_json(raw.data[:length], settings.max_json_depth))
    own, others = split_parameters(InferParameters, body.parameters, OF_REQUEST, "parameters")
    fields = join_parts(others)
    request = validate(ExtractBody, fields, "/parameters")
    check_results(len(body.outputs), settings.max_results)
    outputs = _read_outputs(body.outputs, fields, request, own.binary_data_output)
    layers = request.layer_request
    binary = all(outputs.binary.values()) if outputs.binary else own.binary_data_output
    extract = ExtractRequest(
        model=model,
        items=read_items(body.inputs, memoryview(raw.data)[length:], settings),
        selectors=outputs.selectors,
        embedding=outputs.embedding,
        interventions=layers.interventions,
        objective=layers.objective,
        resume=layers.resume,
        prompt=request.prompt,
        truncate=request.truncate,
        isolated=request.isolated,
        verify=layers.verify,
        priority="interactive" if own.priority <= HIGHEST_PRIORITY else "bulk",
        reply=ReplyOptions(BINARY if binary else JSON, max_bytes=settings.max_reply_bytes),
        timings=raw.timings,
    )
    timeout_s = own.timeout / 1e6 if own.timeout else None
    return InferRequest(extract, body.id, outputs.binary, own.binary_data_output, timeout_s)


def _get_json_length(raw: RawRequest) -> int | None:
    """How many bytes of the body are JSON, None where it is said that none are; BadRequestError for too many."""
    said = raw.headers.getlist(HEADER)
    if len(set(said)) > 1:  # a proxy may go by another of them than this server
        raise BadRequestError(f"{HEADER} is there {len(said)} times, with several values", hint="send it once")
    text = said[0] if said else None
    if text != "0" and raw.media_type.startswith("image/"):  # which would be read on the event loop
        raise BadRequestError("a picture is no JSON", hint=f"send it with {HEADER}: 0, or as an element of BYTES")
    if text is None:
        return len(raw.data)
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) > len(raw.data):
        detail = f"{HEADER} is not the number of bytes of the JSON that the body begins with"
        raise BadRequestError(detail, hint=f"the body has {len(raw.data)} bytes")
    return int(text) or None


def _read_outputs(
    bodies: list[OutputBody], fields: dict[str, Any], request: ExtractBody, binary_default: bool
) -> Outputs:
    """The outputs that are asked for, the embedding where none is; RequestError."""
    selectors: list[Selector] = []
    binary: dict[str, bool] = {}
    embedding = None if bodies else _make_embedding(request)
    for number, body in enumerate(bodies):
        where = f"outputs/{number}"
        own, others = split_parameters(OutputParameters, body.parameters, OF_OUTPUT, f"{where}/parameters")
        binary[body.name] = binary_default if own.binary_data is None else own.binary_data
        if body.name == EMBEDDING:
            embedding = _make_embedding(validate(ExtractBody, fields | others, f"/{where}/parameters"))
            continue
        layer = validate(LayerBody, others | {"layer": body.name}, f"/{where}/parameters")
        try:
            selectors.append(layer.to_selector(request.pool, request.normalize, request.dtype))
        except SelectorError as error:
            raise RequestError(f"{where}: {error.detail}", hint=error.hint) from None
    return Outputs(tuple(selectors), embedding, binary)


def _make_embedding(body: ExtractBody) -> Embedding | None:
    """The model's embedding as a body without layers means it."""
    embedding = body.layer_request.embedding
    return replace(embedding, alias=EMBEDDING) if embedding is not None else None

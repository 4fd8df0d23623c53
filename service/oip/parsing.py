"""Parses an inference request into an ``ExtractRequest``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from layertap.models.errors import LayertapError, RequestError, SelectorError, escape, find_nearest, suggest
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.requested import Selector
from layertap.service.engine.limits import check_results
from layertap.service.engine.request import ExtractRequest, ReplyOptions, SentInputs
from layertap.service.errors import BadRequestError
from layertap.service.http.body import load_json
from layertap.service.http.query import join_parts
from layertap.service.http.receiving import MAX_KEPT, MEDIA, Envelope, write_rest
from layertap.service.inputs.items import ArraysItem
from layertap.service.oip.encoding import HEADER, make_format
from layertap.service.oip.schemas import InferBody, InferParameters
from layertap.service.oip.tensors import read_items
from layertap.service.schemas.bodies import ExtractBody
from layertap.service.schemas.selection import LayerBody
from layertap.service.schemas.validation_errors import validate
from layertap.service.settings import Settings

EMBEDDING = "embedding"  # the name of the output with a model's embedding, whichever layer that is
MAX_NAME = 256  # characters of a model's name that is remembered
HIGHEST_PRIORITY = 1  # 0 is the default, which is the same here
# The fields of other routes' bodies that may be parameters here.
OF_REQUEST = frozenset(
    ("pool", "normalize", "dtype", "interventions", "resume", "verify", "isolated", "prompt", "truncate")
) | {"objective", "class", "target"}
SIMILAR = 0.7  # a parameter so similar to a known one is a slip of the pen
OF_TRITON = ("classification", "shared_memory_region")  # parameters of an output that would be another reply


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedOutputs(ExtractRequest):
    """An extraction, with values for the protocol's reply."""

    binary: Mapping[str, bool]  # whether an output is sent after the JSON, by its requested name
    binary_default: bool  # the same for all others
    timeout_s: float | None
    ignored: tuple[str, ...]  # names of parameters without effect


Headers = Iterable[tuple[bytes, bytes]]
_asked: LRUCache[Hashable, AskedOutputs] = LRUCache(MAX_KEPT)  # clients ask the same over and over


def parse_infer(
    envelope: Envelope, data: bytes, settings: Settings, model: str, headers: Headers
) -> tuple[AskedOutputs, SentInputs, str]:
    """The request, its inputs and its id; for a thread. BadRequestError, RequestError, TooLargeError."""
    length = _get_json_length(envelope, data, headers)
    value = load_json(data[:length], settings.max_json_numbers)
    body = validate(InferBody, value)
    rest = write_rest(value, "id", "inputs")
    key = model, rest, settings.reply_limits, settings.max_results
    if (asked := _asked.get(key)) is None:
        asked = _read_body(body, settings, model)
        if rest is not None and len(model) <= MAX_NAME and asked.is_small:
            asked.remember()
            _asked.put(key, asked)
    return asked, SentInputs(read_items(body.inputs, memoryview(data)[length:], settings)), body.id


def locate(error: LayertapError, sent: SentInputs) -> LayertapError:
    """An error with faults by rows; without, if the only input is arrays, because these may have many rows."""
    if any(isinstance(item, ArraysItem) for _, item in sent.items):
        error.faults = tuple(replace(fault, input=None) for fault in error.faults)
    return error


def _read_body(body: InferBody, settings: Settings, model: str) -> AskedOutputs:
    """The request in a body; RequestError, TooLargeError."""
    own, given = body.parameters, body.parameters.model_extra or {}
    ignored = tuple(name for name in given if name not in OF_REQUEST)
    for name in ignored:  # a slip of the pen must not change the answer unseen
        if near := find_nearest(name, sorted(OF_REQUEST | InferParameters.model_fields.keys()), cutoff=SIMILAR):
            raise RequestError(f"parameters: the parameter {escape(name)} is not taken", hint=suggest(near))
    for each in body.outputs:
        if changing := [name for name in OF_TRITON if (each.parameters.model_extra or {}).get(name)]:
            detail = f"outputs: the parameter {escape(changing[0])} is not taken"
            raise RequestError(detail, hint="leave it out: the reply has the values themselves")
    fields = {name: value for name, value in given.items() if name in OF_REQUEST}
    request = validate(ExtractBody, join_parts(fields), "/parameters")
    check_results(len(body.outputs), settings.max_results)
    names = [each.name for each in body.outputs]
    embedding = request.request_fields["embedding"] if not names or EMBEDDING in names else None
    asked = {each.name: each.parameters.binary_data for each in body.outputs}
    binary = {name: own.binary_data_output if each is None else each for name, each in asked.items()}
    fields = request.request_fields | {
        "model": model,
        "selectors": _read_layers(names, request),
        "embedding": replace(embedding, alias=EMBEDDING) if embedding is not None else None,
        "priority": "interactive" if own.priority <= HIGHEST_PRIORITY else "bulk",
    }
    return AskedOutputs(
        reply=ReplyOptions(format=make_format(binary, own.binary_data_output), limits=settings.reply_limits),
        binary=binary,
        binary_default=own.binary_data_output,
        timeout_s=own.timeout / 1e6 if own.timeout else None,
        ignored=ignored,
        **fields,
    )


def _get_json_length(envelope: Envelope, data: bytes, headers: Headers) -> int:
    """The number of JSON bytes in the body; BadRequestError if larger than the body."""
    lengths = {value.decode("latin-1") for name, value in headers if name == HEADER.lower().encode()}
    if len(lengths) > 1:  # a proxy may use another value than this server
        raise BadRequestError(f"{HEADER} has {len(lengths)} values", hint="send it once")
    if envelope.media_type == MEDIA:  # such bodies are parsed on the event loop
        raise BadRequestError("a picture is not JSON", hint="send it as an element of BYTES, or to POST /extract")
    text = next(iter(lengths), str(len(data)))
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) > len(data):
        detail = f"{HEADER} is not the number of bytes of the JSON that the body begins with"
        raise BadRequestError(detail, hint=f"the body has {len(data)} bytes")
    return int(text)


def _read_layers(names: list[str], request: ExtractBody) -> tuple[Selector, ...]:
    """The selectors of the requested outputs that are layers; RequestError."""
    selectors: list[Selector] = []
    for number, name in enumerate(names):
        try:
            if name != EMBEDDING:
                layer = LayerBody(layer=name)
                selectors.append(layer.to_selector(request.pool, request.normalize, request.dtype))
        except SelectorError as error:
            raise RequestError(f"outputs/{number}: {error.detail}", hint=error.hint) from None
    return tuple(selectors)

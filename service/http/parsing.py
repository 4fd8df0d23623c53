"""Parses bodies and queries into an ``ExtractRequest``, the same for all content types."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

from python_multipart.multipart import parse_options_header

from layertap.models.errors import Fault, RequestError, escape
from layertap.models.lru_cache import LRUCache
from layertap.service.engine.limits import check_count, check_results
from layertap.service.engine.request import ExtractRequest, ReplyOptions, SentInputs
from layertap.service.errors import UnsupportedMediaError
from layertap.service.http.body import JSON, MULTIPART, load_json, parse_multipart
from layertap.service.http.query import ALWAYS, read_fields
from layertap.service.http.receiving import MAX_KEPT, MEDIA, TEXT, Envelope, write_rest
from layertap.service.inputs.arrays import read_npy, read_npz, read_safetensors
from layertap.service.inputs.items import ArraysItem, EncodedItem, InputItem, TextItem
from layertap.service.schemas.bodies import DrawnBody, ExtractBody, InputsBody, RequestBody
from layertap.service.schemas.inputs import OPTIONS, make_readers
from layertap.service.schemas.validation_errors import validate
from layertap.service.settings import Settings
from layertap.service.types import TILES

Readers = Sequence[Callable[[], InputItem]]  # of each input
# Requests of JSON documents, which are not validated again when they come with other inputs.
_asked: LRUCache[Hashable, ExtractRequest] = LRUCache(MAX_KEPT)


def parse_request(
    envelope: Envelope, data: bytes, settings: Settings, kind: type[RequestBody]
) -> tuple[ExtractRequest, SentInputs]:
    """The request in a body and its envelope, and its inputs; for a thread, unless the body is short.

    BadRequestError, UnsupportedMediaError, TooLargeError, RequestError.
    """
    request, readers = _parse_body(envelope, data, settings, kind)
    items: list[tuple[int, InputItem]] = []
    faults: list[Fault] = []
    for index, read in enumerate(readers):
        try:
            item = read()
            if request.rate is not None and isinstance(item, ArraysItem):
                item = item.to_samples(request.rate)
            items.append((index, item))
        except RequestError as error:
            faults.append(error.to_fault(f"/inputs/{index}", index))
    if faults and (not items or request.on_error == "fail"):
        raise RequestError.from_faults(faults)
    if not items and not request.dry_run:
        hint = "add some, or ask for ?dry_run=true" if kind is ExtractBody else "add some"
        raise RequestError("the request has no inputs", hint=hint)
    return request, SentInputs(tuple(items), tuple(faults))


def _parse_body(
    envelope: Envelope, data: bytes, settings: Settings, kind: type[RequestBody]
) -> tuple[ExtractRequest, Readers]:
    media_type = envelope.media_type
    if (read := BODY_READERS.get(media_type)) is not None:
        request = _parse_query(envelope, settings, kind)
        if media_type == TEXT:
            _check_charset(envelope.content_type)
        return request, [partial(read, data, settings)]
    if media_type == JSON:
        envelope.query.check_names(ALWAYS, "a JSON body says everything itself")
        return _parse_document(envelope, data, settings, kind)
    if media_type == MULTIPART:
        return _parse_multipart(envelope, data, settings, kind)
    if not data and not media_type:  # a dry run needs no input
        return _parse_query(envelope, settings, kind), []
    arrays = ", ".join(sorted(BODY_READERS.keys() - {MEDIA, TEXT}))
    media = "image/jpeg, audio/wav or video/mp4 (or another of them)"
    hint = f"send Content-Type: {JSON}, {MULTIPART}, {TEXT}, {media}, {arrays}"
    raise UnsupportedMediaError("a body of this content type is not taken", hint=hint)


def _parse_multipart(
    envelope: Envelope, data: bytes, settings: Settings, kind: type[RequestBody]
) -> tuple[ExtractRequest, Readers]:
    """The request in the part named ``request``, or else in the query, and the inputs in all other parts."""
    requests, inputs = [], []
    for name, part in parse_multipart(envelope.content_type, data, settings):
        if name == "request":
            requests.append(part)
        elif (read := PART_READERS.get(name)) is not None:
            inputs.append(partial(read, part))
        else:
            hint = f"name parts {', '.join(PART_READERS)}; a safetensors body has arrays by the model's inputs"
            raise RequestError(f"a part named {escape(name)} is not taken", hint=hint)
    if len(requests) > 1:
        raise RequestError("a multipart body has at most one part named 'request'", hint="rename the others")
    check_count(len(inputs), settings)
    if requests:
        envelope.query.check_names(ALWAYS, "the part 'request' says everything itself")
        request, readers = _parse_document(envelope, requests[0], settings, kind)
        if readers:
            raise RequestError("a multipart request has its inputs in parts of their own", hint="leave 'inputs' out")
    else:
        request = _parse_query(envelope, settings, kind)
    return request, inputs


def _parse_query(envelope: Envelope, settings: Settings, kind: type[RequestBody]) -> ExtractRequest:
    """The request in the query parameters."""
    key = kind, settings.reply_limits
    if (request := envelope.asked.get(key)) is None:
        fields = read_fields(envelope.query, _list_fields(kind))
        _check_sizes(fields, settings)
        request = _make_request(envelope, settings, validate(kind, fields))
        if envelope.is_kept and request.is_small:
            request.remember()
            envelope.asked[key] = request
    return request


def _make_request(envelope: Envelope, settings: Settings, body: RequestBody) -> ExtractRequest:
    """The request in a body; RequestError."""
    dry_run = envelope.query.get_flag("dry_run")
    if dry_run and not isinstance(body, ExtractBody):
        raise RequestError("only an extraction has a dry run", hint="ask POST /extract?dry_run=true")
    tiles = body.tiles if isinstance(body, DrawnBody) else None
    if tiles is not None and not envelope.format.is_picture:
        fault = Fault("the reply is no picture", "ask for one by ?format=png, or leave 'tiles' out", "/tiles")
        raise RequestError.from_faults([fault])
    limits = settings.reply_limits
    reply = ReplyOptions(body.encoding, tiles or TILES, limits.numbers, format=envelope.format, limits=limits)
    request = ExtractRequest(dry_run=dry_run, reply=reply, **body.request_fields)
    if len(body.inputs) == 1 and request.input_options:  # the input may have several rows
        return replace(request.for_input(0), input_options={})
    return request


def _list_fields(kind: type[RequestBody]) -> AbstractSet[str]:
    """The fields of a body that a query may have: all but the inputs, which are then in the body itself."""
    return {each.alias or name for name, each in kind.model_fields.items()} - {"inputs"}


def _parse_document(
    envelope: Envelope, data: bytes, settings: Settings, kind: type[RequestBody]
) -> tuple[ExtractRequest, Readers]:
    value = load_json(data, settings.max_json_numbers)
    _check_sizes(value, settings)
    inputs = value.get("inputs", []) if isinstance(value, dict) else None
    key = None
    if isinstance(inputs, list) and not any(isinstance(each, dict) and each.keys() & OPTIONS for each in inputs):
        rest = write_rest(value, "inputs")
        if envelope.is_kept and rest is not None:
            key = kind, envelope.format.name, envelope.text, rest, settings.reply_limits
        if (request := _asked.get(key)) is not None:
            return request, make_readers(validate(InputsBody, {"inputs": inputs}).inputs)
    body = validate(kind, value)
    request = _make_request(envelope, settings, body)
    if key is not None and request.is_small:
        request.remember()
        _asked.put(key, request)
    return request, make_readers(body.inputs)


def _check_sizes(value: Any, settings: Settings) -> None:
    """TooLargeError for too many inputs or layers, before their validation, which would take long."""
    fields = value if isinstance(value, dict) else {}
    inputs, layers = fields.get("inputs"), fields.get("layers")
    if isinstance(inputs, list):
        check_count(len(inputs), settings)
    if isinstance(layers, list):
        check_results(len(layers), settings.max_results)


def _check_charset(content_type: str) -> None:
    """UnsupportedMediaError for a text in another charset than UTF-8."""
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        raise UnsupportedMediaError("a text of this charset is not taken", hint="send UTF-8")


PART_READERS: Mapping[str, Callable[[bytes], InputItem]] = {  # of a part, which is one input, by name
    "images": EncodedItem,
    "audio": EncodedItem,
    "video": EncodedItem,
    "texts": TextItem.decode,
    "tensors": lambda data: ArraysItem({None: read_npy(data)}),
}
BODY_READERS: Mapping[str, Callable[[bytes, Settings], InputItem]] = {  # of a body by media type; arrays may be a batch
    MEDIA: lambda data, _: EncodedItem(data),
    TEXT: lambda data, _: TextItem.decode(data),
    "application/x-npy": lambda data, _: ArraysItem({None: read_npy(data)}, may_batch=True),
    "application/x-npz": lambda data, settings: ArraysItem(read_npz(data, settings.max_body_bytes), may_batch=True),
    "application/x-safetensors": lambda data, _: ArraysItem(read_safetensors(data), may_batch=True),
}

"""What a route was sent, made into an ``ExtractRequest``: validated, and the same whatever it was sent as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers

from layertap.models.errors import Fault, RequestError, escape
from layertap.service.engine.limits import check_count, check_results
from layertap.service.engine.request import ExtractRequest, ReplyOptions
from layertap.service.errors import UnsupportedMediaError
from layertap.service.formats.table import ReplyFormat
from layertap.service.http.body import MULTIPART, get_media_type, load_json, parse_multipart
from layertap.service.http.query import ALWAYS, Query, read_fields
from layertap.service.inputs.arrays import read_npy, read_safetensors
from layertap.service.inputs.items import ArraysItem, ImageItem, InputItem, TextItem
from layertap.service.schemas.base import read_items
from layertap.service.schemas.bodies import ExtractBody, RequestBody
from layertap.service.schemas.inputs import make_readers
from layertap.service.schemas.validation_errors import validate
from layertap.service.settings import Settings
from layertap.service.timings import Timings
from layertap.service.types import TILES


@dataclass(frozen=True)
class RawRequest:
    """What arrived, and the format in which the reply is wanted."""

    headers: Headers
    query: Query
    data: bytes
    format: ReplyFormat
    timings: Timings

    @property
    def media_type(self) -> str:
        """What the body is said to be, without parameters, in small letters."""
        return get_media_type(self.headers.get("content-type", ""))


Parsed = tuple[RequestBody, list[Callable[[], InputItem]]]  # and what reads each input


def parse_request(raw: RawRequest, settings: Settings, kind: type[RequestBody]) -> ExtractRequest:
    """What a request with such a body asks for; computes, so it belongs in a thread.

    BadRequestError, UnsupportedMediaError, TooLargeError, RequestError.
    """
    dry_run = raw.query.get_flag("dry_run")
    body, readers = _parse_body(raw, settings, kind)
    fields = body.request_fields
    items, faults = read_items(readers, "inputs", lambda read: read())
    if faults and (not items or body.on_error == "fail"):
        raise RequestError.from_faults(faults)
    if not items and not dry_run:
        hint = "add some, or ask for ?dry_run=true" if kind is ExtractBody else "add some"
        raise RequestError("the request has no inputs", hint=hint)
    if dry_run and kind is not ExtractBody:
        raise RequestError("only an extraction has a dry run", hint="ask POST /extract?dry_run=true")
    if body.tiles is not None and not raw.format.is_picture:
        fault = Fault("the reply is no picture", "ask for one by ?format=png, or leave 'tiles' out", "/tiles")
        raise RequestError.from_faults([fault])
    request = ExtractRequest(
        items=tuple(items),
        faults=tuple(faults),
        dry_run=dry_run,
        reply=ReplyOptions(raw.format, body.encoding, settings.max_reply_bytes, tiles=body.tiles or TILES),
        timings=raw.timings,
        **fields,
    )
    if len(body.inputs) == 1:  # of which there may be several rows
        return replace(request.for_input(0), input_options={})
    return request


def _parse_body(raw: RawRequest, settings: Settings, kind: type[RequestBody]) -> Parsed:
    media_type = "image/*" if raw.media_type.startswith("image/") else raw.media_type
    if media_type == "application/json":
        raw.query.check_names(ALWAYS, "a JSON body says everything itself")
        body = _parse_document(raw.data, settings, kind)
        return body, make_readers(body.inputs)
    if media_type == MULTIPART:
        return _parse_multipart(raw, settings, kind)
    if not raw.data and not media_type:  # a dry run needs no input
        return _parse_query(raw, settings, kind), []
    if media_type in BODY_READERS:
        read = partial(BODY_READERS[media_type], raw.data, raw.headers["content-type"])
        return _parse_query(raw, settings, kind), [read]
    raise UnsupportedMediaError(
        "a body of this content type is not taken",
        hint="send Content-Type: application/json, multipart/form-data, image/jpeg (or another image type), "
        "text/plain, application/x-npy or application/x-safetensors",
    )


def _parse_multipart(raw: RawRequest, settings: Settings, kind: type[RequestBody]) -> Parsed:
    """The part that is called ``request``, or the query, and the inputs in all others."""
    parts = parse_multipart(raw.headers, raw.data, settings)
    requests = [part.data for part in parts if part.name == "request"]
    inputs = [part for part in parts if part.name != "request"]
    if len(requests) > 1:
        raise RequestError("a multipart body has at most one part named 'request'", hint="rename the others")
    for part in inputs:
        if part.name not in PART_READERS:
            hint = "name parts 'images', 'texts' or 'tensors'; a safetensors body has arrays by the model's inputs"
            raise RequestError(f"a part named {escape(part.name)} is not taken", hint=hint)
    check_count(len(inputs), settings)
    if requests:
        raw.query.check_names(ALWAYS, "the part 'request' says everything itself")
        body = _parse_document(requests[0], settings, kind)
    else:
        body = _parse_query(raw, settings, kind)
    if body.inputs:
        raise RequestError("a multipart request has its inputs in parts of their own", hint="leave 'inputs' out")
    return body, [partial(PART_READERS[part.name], part.data) for part in inputs]


def _parse_query(raw: RawRequest, settings: Settings, kind: type[RequestBody]) -> RequestBody:
    """The body that the query parameters say."""
    if raw.query.is_cacheable:
        return _parse_short_query(raw.query, kind)
    fields = read_fields(raw.query, _list_fields(kind))
    _check_sizes(fields, settings)
    return validate(kind, fields)


@lru_cache(maxsize=64)
def _parse_short_query(query: Query, kind: type[RequestBody]) -> RequestBody:
    return validate(kind, read_fields(query, _list_fields(kind)))


def _list_fields(kind: type[RequestBody]) -> AbstractSet[str]:
    """The fields of a body that its query may have: all but the inputs, which the body itself is then."""
    return {each.alias or name for name, each in kind.model_fields.items()} - {"inputs"}


def _parse_document(data: bytes, settings: Settings, kind: type[RequestBody]) -> RequestBody:
    value = load_json(data)
    _check_sizes(value, settings)
    return validate(kind, value)


def _check_sizes(value: Any, settings: Settings) -> None:
    """TooLargeError where more is asked than may be: what would take long to look at need not be looked at."""
    fields = value if isinstance(value, dict) else {}
    inputs, layers = fields.get("inputs"), fields.get("layers")
    if isinstance(inputs, list):
        check_count(len(inputs), settings)
    if isinstance(layers, list):
        names = (layer.get("layer") if isinstance(layer, dict) else layer for layer in layers)
        check_results(len({name for name in names if isinstance(name, str)}), settings.max_results)


def _read_text(data: bytes, content_type: str) -> TextItem:
    """A text; UnsupportedMediaError, InputError."""
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        raise UnsupportedMediaError("a text of this charset is not taken", hint="send UTF-8")
    return TextItem.decode(data)


PART_READERS: Mapping[str, Callable[[bytes], InputItem]] = {  # of parts that are one input each
    "images": ImageItem,
    "texts": TextItem.decode,
    "tensors": lambda data: ArraysItem({None: read_npy(data)}),
}
BODY_READERS: Mapping[str, Callable[[bytes, str], InputItem]] = {  # by media type; with the content type
    "image/*": lambda data, content_type: ImageItem(data),
    "text/plain": _read_text,
    # Of these arrays rows may be a batch.
    "application/x-npy": lambda data, content_type: ArraysItem({None: read_npy(data)}, may_batch=True),
    "application/x-safetensors": lambda data, content_type: ArraysItem(read_safetensors(data), may_batch=True),
}

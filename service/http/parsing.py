"""The three ways to send a request, read into one command: JSON, multipart, or one raw body with query parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from email.message import Message
from functools import lru_cache
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.datastructures import Headers, QueryParams

from layertap.models.errors import Fault, InputError, LayertapError, RequestError, TooLargeError, escape, suggest
from layertap.service.engine.limits import check_count
from layertap.service.engine.plan_cache import check_results
from layertap.service.errors import BadRequestError, UnsupportedMediaError
from layertap.service.http import body as body_
from layertap.service.inputs.arrays import Array, read_npy, read_npz, read_safetensors
from layertap.service.inputs.items import ArraysItem, ImageItem, InputItem, TextItem
from layertap.service.inputs.npy_header import MAGIC
from layertap.service.schemas.bodies import RequestBody
from layertap.service.schemas.inputs import parse_inputs
from layertap.service.schemas.validation_errors import convert_errors
from layertap.service.settings import Settings

MAX_LAYER_PARAMETERS = 50_000
MOST_BRACKETS = 500_000
KEPT, KEPT_BYTES = 64, 512  # queries that are remembered, and how long each may be
NPY = "application/x-npy"
ALWAYS = frozenset({"format", "dry_run"})
LISTS = frozenset({"layers"})
OBJECTIVE = {"objective": "kind", "class": "class"}  # by their names in the body's ``objective``
COMMON = frozenset({"model", "encoding", "on_error", "isolated", "priority"})


@dataclass(frozen=True)
class EndpointSpec:
    """What requests of one route say: their body, which of its fields a query may have, how to go without inputs."""

    body: type[RequestBody]
    fields: frozenset[str]
    without_inputs: str


@dataclass(frozen=True)
class ParsedBody:
    """A request as it was sent: its body without inputs, its inputs with their places, faults of those left out."""

    body: RequestBody
    items: tuple[tuple[int, InputItem], ...]
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Query:
    """The part of a URL behind the question mark, as it was sent and read."""

    text: bytes
    parameters: QueryParams = field(compare=False)

    @classmethod
    def parse(cls, text: bytes) -> Query:
        """What was sent, read."""
        return _kept_query(text) if len(text) <= KEPT_BYTES else cls(text, QueryParams(text))

    def get_one(self, key: str) -> str | None:
        """What a parameter says, None where it is not given; RequestError where it is given several times."""
        given = self.parameters.getlist(key)
        if len(given) > 1:
            raise RequestError(f"the query parameter '{key}' is given {len(given)} times", hint="give it once")
        return given[0] if given else None

    def check(self, allowed: frozenset[str]) -> None:
        """RequestError where a parameter is none of these, or given several times."""
        _only(self.parameters, allowed, "")
        for key in allowed:
            self.get_one(key)


@lru_cache(maxsize=KEPT)
def _kept_query(text: bytes) -> Query:
    """Kept, as is the body in it: clients send the same over and over, and to read it takes longer than all else."""
    return Query(text, QueryParams(text))


@dataclass(frozen=True)
class RawRequest:
    """What arrived."""

    headers: Headers
    query: Query
    data: bytes
    settings: Settings
    dialect: EndpointSpec

    @property
    def media_type(self) -> str:
        """What the body is said to be, without parameters, in small letters."""
        return body_.get_media_type(self.headers.get("content-type", ""))


def parse_request(sent: RawRequest) -> ParsedBody:
    """The command in what arrived; computes, so it belongs in a thread.

    BadRequestError, UnsupportedMediaError, TooLargeError, RequestError.
    """
    if sent.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaError("a compressed body is not taken", hint="send it uncompressed")
    media_type = sent.media_type
    if not sent.data and not media_type:  # a dry run needs no input
        return _raw(sent, ())
    reader = READERS.get("image/*" if media_type.startswith("image/") else media_type)
    if reader is None:
        raise UnsupportedMediaError(
            "a body of this content type is not taken",
            hint="send Content-Type: application/json, multipart/form-data, image/jpeg (or another image type), "
            "text/plain, application/x-npy, application/x-npz or application/x-safetensors",
        )
    return reader(sent)


def _json(sent: RawRequest) -> ParsedBody:
    _only(sent.query.parameters, ALWAYS, "a JSON body says everything itself")
    body = _document(sent, sent.data)
    good, faults = parse_inputs(body.inputs, skip=body.on_error == "skip")
    return ParsedBody(body, tuple(good), tuple(faults))


def _multipart(sent: RawRequest) -> ParsedBody:
    parts = body_.parse_multipart(sent.headers, sent.data, sent.settings)
    arrays = [part for part in parts if _is_array(part)]
    others = [part for part in parts if not _is_array(part)]
    images = [part for part in others if part.name == "images"]
    requests = [part for part in others if part.name == "request"]
    if len(requests) > 1 or len(images) + len(requests) < len(others):
        raise RequestError(
            "a multipart body has parts named 'images', or arrays (.npy) named as the model's inputs, and at most one "
            "named 'request'",
            hint="rename the others",
        )
    if images and arrays:
        raise RequestError("a multipart body has pictures or arrays, not both", hint="send them in a JSON body")
    check_count(len(images), sent.settings)
    found = _array_parts(arrays) if arrays else tuple(enumerate(ImageItem(part.data) for part in images))
    if not requests:
        return _raw(sent, found)
    _only(sent.query.parameters, ALWAYS, "the part 'request' says everything itself")
    body = _document(sent, requests[0].data)
    if body.inputs:
        raise RequestError("a multipart request has its inputs in parts of their own", hint="leave 'inputs' out")
    return ParsedBody(body, found)


def _is_array(part: body_.MultipartPart) -> bool:
    """Whether a part is a .npy file, by its bytes, or as it is said to be where its name means nothing else."""
    return part.data.startswith(MAGIC) or (part.media_type == NPY and part.name not in ("images", "request"))


def _array_parts(parts: Sequence[body_.MultipartPart]) -> tuple[tuple[int, InputItem], ...]:
    """The one item, or batch of items, of which each part is an input of the model."""
    names = [part.name for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(
                f"there are {names.count(name)} arrays named {escape(name)}", hint="send rows as a batch"
            )
    return _arrays_item(lambda: {part.name: _part_array(part) for part in parts}, by_name=True)


def _part_array(part: body_.MultipartPart) -> Array:
    try:
        return read_npy(part.data)
    except InputError as error:
        raise InputError(f"part {escape(part.name)}: {error.detail}", hint=error.hint) from None


def _image(sent: RawRequest) -> ParsedBody:
    return _raw(sent, ((0, ImageItem(sent.data)),))


def _text(sent: RawRequest) -> ParsedBody:
    named = Message()
    named["content-type"] = sent.headers["content-type"]
    if str(named.get_param("charset", "utf-8")).lower() not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaError("a text of this charset is not taken", hint="send UTF-8")
    try:
        text = sent.data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequestError("the text is not UTF-8", hint="send UTF-8") from None
    return _raw(sent, ((0, TextItem(text)),))


def _npy(sent: RawRequest) -> ParsedBody:
    return _raw(sent, _arrays_item(lambda: {None: read_npy(sent.data)}))


def _npz(sent: RawRequest) -> ParsedBody:
    return _raw(sent, _arrays_item(lambda: read_npz(sent.data, sent.settings.max_body_bytes)))


def _safetensors(sent: RawRequest) -> ParsedBody:
    return _raw(sent, _arrays_item(lambda: read_safetensors(sent.data)))


def _arrays_item(load: Callable[[], dict[Any, Any]], by_name: bool = False) -> tuple[tuple[int, InputItem], ...]:
    try:
        return ((0, ArraysItem(load(), may_batch=True, by_name=by_name)),)
    except TooLargeError:
        raise
    except LayertapError as error:
        raise RequestError(error.detail, hint=error.hint, faults=(Fault(error.detail, error.hint, input=0),)) from None


def _raw(sent: RawRequest, found: tuple[tuple[int, InputItem], ...]) -> ParsedBody:
    """A command whose body is the query parameters."""
    if len(sent.query.text) <= KEPT_BYTES:
        return ParsedBody(_kept_body(sent.query, sent.dialect), found)
    _check_sizes({name: _listed(sent.query, name) for name in LISTS}, sent.settings)
    return ParsedBody(_body(sent.query, sent.dialect), found)


def _body(query: Query, dialect: EndpointSpec) -> RequestBody:
    known, parameters = dialect.fields, query.parameters
    _only(parameters, ALWAYS | known | OBJECTIVE.keys(), "")
    fields: dict[str, Any] = {key: query.get_one(key) for key in parameters if key in known - LISTS}
    fields |= {name: _listed(query, name) for name in LISTS & known if name in parameters}
    if objective := {name: query.get_one(key) for key, name in OBJECTIVE.items() if key in parameters}:
        fields["objective"] = objective
    return _validated(dialect, fields)


_kept_body = lru_cache(maxsize=KEPT)(_body)


def _listed(query: Query, name: str) -> list[str]:
    given = query.parameters.getlist(name)
    return [each for value in given for each in value.split(",", MAX_LAYER_PARAMETERS) if each]


def _near(key: str, known: frozenset[str]) -> tuple[str, ...]:
    return tuple(get_close_matches(key[:100], sorted(known), n=1))


def load_json(data: bytes, max_depth: int) -> Any:
    """A JSON document no deeper than it may be; BadRequestError, TooLargeError where it has very many brackets."""
    # Each makes an object that the garbage collector looks at, while no other thread runs.
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MOST_BRACKETS:
        hint = "send long texts in several requests, and numbers as base64"
        raise TooLargeError(f"the JSON has {brackets} brackets; the limit is {MOST_BRACKETS}", hint=hint)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        hint = "send UTF-8 without a byte order mark, NaN or Infinity"
        raise BadRequestError(f"the body is not JSON: {where}", hint=hint) from None
    # Only a document with that many brackets can be that deep.
    if brackets > max_depth and _deeper(value, max_depth):
        raise BadRequestError(f"the JSON is nested deeper than {max_depth}")
    return value


def _document(sent: RawRequest, data: bytes) -> RequestBody:
    value = load_json(data, sent.settings.max_json_depth)
    _check_sizes(value, sent.settings)
    return _validated(sent.dialect, value)


def _check_sizes(value: Any, settings: Settings) -> None:
    """TooLargeError where more is asked than may be: what would take long to look at need not be looked at."""
    fields = value if isinstance(value, dict) else {}
    inputs, layers = fields.get("inputs"), fields.get("layers")
    if isinstance(inputs, list):
        check_count(len(inputs), settings)
    if isinstance(layers, list):
        names = (each.get("layer") if isinstance(each, dict) else each for each in layers)
        check_results(len({name for name in names if isinstance(name, str)}), settings.max_results)


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for each in level
            if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def _validated(dialect: EndpointSpec, value: Any) -> RequestBody:
    try:
        return dialect.body.model_validate(value)
    except ValidationError as error:
        faults = convert_errors(error.errors(include_url=False, include_input=False, include_context=False))
        detail = f"{faults[0].pointer}: {faults[0].detail}" if faults[0].pointer else faults[0].detail
        raise RequestError(detail, faults=faults) from None


def _only(query: QueryParams, allowed: frozenset[str], why: str) -> None:
    for key in query:
        if key not in allowed:
            offered = ", ".join(sorted(allowed))
            hint = (
                f"{why}; its query parameters are {offered}"
                if why
                else suggest(_near(key, allowed)) or f"use {offered}"
            )
            raise RequestError(f"the query parameter {escape(key)} is not taken here", hint=hint)


READERS: Mapping[str, Callable[[RawRequest], ParsedBody]] = {
    "application/json": _json,
    "multipart/form-data": _multipart,
    "image/*": _image,
    "text/plain": _text,
    NPY: _npy,
    "application/x-npz": _npz,
    "application/x-safetensors": _safetensors,
}

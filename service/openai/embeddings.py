"""Parses the body of an OpenAI client into an ``ExtractRequest``, and encodes features for such clients."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import Response
from pydantic import BeforeValidator, ConfigDict, Field, StrictInt

from layertap.models.errors import Fault, InputError, RequestError, SelectorError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.lru_cache import LRUCache
from layertap.models.plan.requested import Embedding
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.fingerprint import digest_variant
from layertap.models.spec import Truncate
from layertap.service.engine.request import ExtractRequest, ReplyOptions, SentInputs
from layertap.service.errors import UnsupportedMediaError
from layertap.service.features import Array, Features
from layertap.service.formats.buffers import Buffers, Encoding, view_bytes
from layertap.service.formats.json import write_json
from layertap.service.http.body import JSON, load_json
from layertap.service.http.problems import MAX_DETAIL, Problem
from layertap.service.http.receiving import MAX_KEPT, Envelope, write_rest
from layertap.service.inputs.arrays import decode_base64
from layertap.service.inputs.items import EncodedItem, InputItem, TextItem, TokensItem, UrlItem
from layertap.service.schemas.base import OneError, StrictBody, read_field, read_items
from layertap.service.schemas.inputs import SomeTokens
from layertap.service.schemas.validation_errors import validate
from layertap.service.settings import Settings

MAX_INPUTS = 2048  # OpenAI's limit
OWN = ("input", "user")  # the fields of ``InputBody``
HINTS = ("prompt_name", "input_type", "task")  # fields of other servers that name a prompt, the first one first
DOCUMENTS = ("document", "passage", "corpus")  # prompts that sentence-transformers takes for documents
COHERE_JINA = {  # their values, and those of sentence-transformers
    **dict.fromkeys(("search_query", "retrieval.query"), "query"),
    **dict.fromkeys(("search_document", "retrieval.passage"), "document"),
}
URL_SCHEMES = ("http://", "https://")
STATUS = {422: 400}  # all others stay the same
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
Kind = Literal["text", "image", "tokens"]
Precision = Literal["binary", "ubinary"]
SomeTruncate = Annotated[Truncate, BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)]


class ImageEntry(StrictBody):
    """An input that is a picture: base64, a data: URI or a URL."""

    image: str


Entry = Annotated[
    str | SomeTokens | ImageEntry,
    OneError('an input is a string, {"image": "<base64, data: URI or URL>"} or a list of token ids'),
]


def _list_entries(value: object) -> object:
    """The inputs of a body; a list that begins with a number is one input, of token ids."""
    is_one = not isinstance(value, list) or (bool(value) and type(value[0]) is int)
    return [value] if is_one else value


class InputBody(StrictBody):
    """The fields that differ from one request to the next."""

    input: Annotated[tuple[Entry, ...], Field(min_length=1, max_length=MAX_INPUTS), BeforeValidator(_list_entries)]
    user: str | None = Field(None, max_length=512)  # without effect


class EmbeddingsBody(InputBody):
    """The body of ``POST /v1/embeddings``; the fields of other servers are ignored."""

    model_config = ConfigDict(extra="allow")  # so that a warning can name them

    model: str = Field(max_length=512)  # NAME or NAME:LAYER
    encoding_format: Literal["float", "base64"] | Precision | None = None
    dimensions: StrictInt | None = Field(None, ge=1)
    modality: Kind | None = None  # of strings; "tokens": lists are ids of the model's own tokenizer
    prompt: str | None = Field(None, max_length=512)  # name of a prompt in the model's folder
    truncate: SomeTruncate | None = None  # the end of a long text that is cut; NVIDIA's clients write it in capitals


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedEmbeddings(ExtractRequest):
    """An extraction, with values for OpenAI's reply."""

    model_id: str  # as sent
    dimensions: int | None
    modality: Kind | None
    precision: Precision | None = None  # of vectors whose numbers are bits
    ignored: tuple[str, ...]  # names of fields without effect
    hints: Mapping[str, str] = field(default_factory=dict)  # fields of other servers, which may name a prompt
    chosen: dict[Hashable, AskedEmbeddings] = field(default_factory=dict)  # by what ``choose_prompt`` finds


_asked: LRUCache[Hashable, AskedEmbeddings] = LRUCache(MAX_KEPT)  # clients ask the same over and over


@dataclass(frozen=True)
class DataUri(EncodedItem):
    """What begins as a ``data:`` URI: a picture, or, of a model that takes texts, perhaps a text.

    ``fault``: why it is no picture.
    """

    text: str = field(default="", repr=False)
    fault: InputError | None = None


def parse_model_id(model_id: str, aliases: Collection[str]) -> tuple[str, Embedding]:
    """The name and the embedding, normalised, of ``NAME`` or ``NAME:LAYER``; SelectorError unless it is one layer.

    ``aliases`` are names, too, and may have colons of their own.
    """
    matching = [each for each in aliases if model_id == each or model_id.startswith(f"{each}:")]
    name = max(matching, key=len) if matching else model_id.partition(":")[0]
    layer = model_id[len(name) + 1 :]
    if layer and parse_selector(layer).is_glob:  # finding its matches would take long
        raise SelectorError("an embedding is of one layer", hint="write its name, without '*' and '?'")
    return name, Embedding(normalize=True, layer=layer)


def parse_embeddings(
    envelope: Envelope, data: bytes, settings: Settings, *, aliases: Collection[str]
) -> tuple[AskedEmbeddings, SentInputs]:
    """The request and its inputs; for a thread. BadRequestError, UnsupportedMediaError, RequestError."""
    if envelope.media_type != JSON:
        hint = "send Content-Type: application/json"
        raise UnsupportedMediaError("a body of this content type is not taken", hint=hint)
    value = load_json(data, settings.max_json_numbers)
    fields = value if isinstance(value, dict) else {}
    rest = write_rest(fields, *OWN)
    key = rest, settings.reply_limits, *aliases
    if (asked := _asked.get(key)) is not None:
        given = validate(InputBody, {name: each for name, each in fields.items() if name in OWN}).input
    else:
        body = validate(EmbeddingsBody, value)
        asked, given = _read_body(body, envelope, settings, aliases), body.input
        if rest is not None:
            asked.remember()
            _asked.put(key, asked)
    items, faults = read_items(given, "input", partial(_read_item, modality=asked.modality))
    if faults:
        raise RequestError.from_faults(faults)
    return asked, SentInputs(tuple(items))


def settle_items(sent: SentInputs, inputs: ModelInputs) -> SentInputs:
    """The inputs of a model, where it decides what begins as a ``data:`` URI; RequestError for one that is no picture.

    A model of texts takes all of them as texts, one of both those that are no picture.
    """
    items, faults = read_items([item for _, item in sent.items], "input", partial(_settle_item, inputs=inputs))
    if faults:
        raise RequestError.from_faults(faults)
    return SentInputs(tuple(items))


def _settle_item(item: InputItem, inputs: ModelInputs) -> InputItem:
    if not isinstance(item, DataUri):
        return item
    if inputs.text is not None and (item.fault or not inputs.takes_pictures):
        return TextItem(item.text)
    if item.fault is not None:
        raise InputError(item.fault.detail, hint=item.fault.hint)
    return EncodedItem(item.data)


def _read_body(
    body: EmbeddingsBody, envelope: Envelope, settings: Settings, aliases: Collection[str]
) -> AskedEmbeddings:
    name, embedding = read_field("/model", lambda: parse_model_id(body.model, aliases))
    encoding: Encoding = "base64" if body.encoding_format == "base64" else "list"
    others = body.model_extra or {}
    return AskedEmbeddings(
        model=name,
        embedding=embedding,
        prompt=body.prompt,
        truncate=body.truncate,
        reply=ReplyOptions(encoding, format=envelope.format, limits=settings.reply_limits),
        model_id=body.model,
        dimensions=body.dimensions,
        modality=body.modality,
        precision=body.encoding_format if body.encoding_format in ("binary", "ubinary") else None,
        ignored=tuple(others),
        hints={name: value for name in HINTS if isinstance(value := others.get(name), str)},
    )


def choose_prompt(asked: AskedEmbeddings, prompts: Collection[str]) -> AskedEmbeddings:
    """The request with the first prompt, of those that a model has, which fields of other servers name."""
    named = {name: _find_prompt(value, prompts) for name, value in asked.hints.items()}
    prompt = asked.prompt or next(filter(None, named.values()), None)
    ignored = tuple(name for name in asked.ignored if named.get(name) is None or named[name] != prompt)
    if (chosen := asked.chosen.get((prompt, ignored))) is None:
        chosen = asked.chosen[prompt, ignored] = replace(asked, prompt=prompt, ignored=ignored)
        if asked.remembered:
            chosen.remember()
    return chosen


def _find_prompt(name: str, prompts: Collection[str]) -> str | None:
    """The prompt of a name, for documents also by another of their names."""
    name = name if name in prompts else COHERE_JINA.get(name, name)
    names = (name, *DOCUMENTS) if name in DOCUMENTS else (name,)
    return next((each for each in names if each in prompts), None)


def _read_item(entry: Entry, modality: Kind | None) -> InputItem:
    """An entry as an item; InputError if it is not of the modality, or tokens may be of another tokenizer."""
    if isinstance(entry, tuple):
        if modality != "tokens":
            raise InputError(
                "token ids are those of one tokenizer, which clients choose without asking this model",
                hint='send texts as strings, or "modality": "tokens" with ids of the model\'s own tokenizer',
            )
        return TokensItem(entry)
    if modality == "tokens":
        raise InputError("this is not a list of token ids", hint='leave "modality" out')
    if isinstance(entry, str) and modality != "image":
        return TextItem(entry) if modality == "text" or entry[:5].lower() != "data:" else _read_data_uri(entry)
    picture = entry if isinstance(entry, str) else entry.image
    return UrlItem(picture) if picture.startswith(URL_SCHEMES) else EncodedItem(decode_base64(picture))


def _read_data_uri(text: str) -> DataUri:
    try:
        return DataUri(decode_base64(text), text)
    except InputError as error:
        return DataUri(b"", text, error)


def encode_embeddings(features: Features, model_id: str, encoding: Encoding) -> Buffers:
    """Features with a single result, one vector per input, as a JSON list of embeddings, exact to the bit."""
    (vectors,) = features.arrays.values()
    vectors = np.ascontiguousarray(vectors, "<f4" if vectors.dtype.kind == "f" else vectors.dtype)
    written = map(view_bytes, vectors) if encoding == "base64" else vectors
    body = {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(written)],
        "model": model_id,
        "fingerprint": features.fingerprint,
        "space": features.space,
        "usage": {"prompt_tokens": features.tokens, "total_tokens": features.tokens},
    }
    return write_json(body)


def get_fault(problem: Problem) -> Fault:
    """The first of several reasons."""
    return problem.faults[0] if problem.faults else Fault(problem.detail, problem.hint)


def describe_problem(problem: Problem) -> str:
    """The first of several reasons, with what to do instead, in one line."""
    fault = get_fault(problem)
    hint = fault.hint or problem.hint
    return f"{fault.detail[:MAX_DETAIL]}; {hint[:MAX_DETAIL]}" if hint else fault.detail[:MAX_DETAIL]


def encode_error(problem: Problem) -> Response:
    """A problem in OpenAI's envelope: the first of several reasons."""
    fault = get_fault(problem)
    status = STATUS.get(problem.status, problem.status)
    error: dict[str, Any] = {
        "message": describe_problem(problem),
        "type": TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": _name_parameter(fault),
        "code": problem.kind,
    }
    return Response(orjson.dumps({"error": error}), status, problem.headers, "application/json")


def _name_parameter(fault: Fault) -> str | None:
    """The body's field of a fault, in OpenAI's syntax."""
    if fault.input is not None:
        return f"input[{fault.input}]"
    field, *rest = (fault.pointer or "/").split("/")[1:]
    return ("model" if rest and field == "layers" else field[:64]) or None  # layers are named after the model's name


def check_dimensions(dimensions: int, columns: int, trained: Collection[int]) -> None:
    """RequestError unless vectors have this dimension, or their model was ``trained`` for it."""
    if dimensions == columns or (dimensions < columns and dimensions in trained):
        return
    known = ", ".join(map(str, sorted({*trained, columns})))
    hint = "leave it out; for a model trained for shorter vectors (Matryoshka), write 'dimensions: [64, 128, 256]' "
    hint += "in the configuration"
    raise RequestError(f"'dimensions' is {dimensions}, and this embedding has {known}", hint=hint)


def shorten(features: Features, dimensions: int, *, normalize: bool = True) -> Features:
    """Features whose only result is cut to (N, dimensions) float32, with a new fingerprint.

    To ``normalize`` gives each row the norm 1, or 0.
    """
    (vectors,) = features.arrays.values()
    if dimensions == vectors.shape[1]:
        return features
    shorter = vectors[:, :dimensions]
    if normalize:
        lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
        shorter = shorter / np.where(lengths == 0, np.float32(1), lengths)
    return _replace_vectors(features, shorter, "dimensions", dimensions)


def pack_bits(features: Features, precision: Precision) -> Features:
    """Features whose only result is (N, D / 8), a bit for each number above 0, with a new fingerprint.

    As ``quantize_embeddings`` of sentence-transformers: uint8, for ``binary`` less 128 as int8.
    """
    (vectors,) = features.arrays.values()
    packed = np.packbits(vectors > 0, axis=-1)
    if precision == "binary":
        packed = (packed ^ 128).view(np.int8)
    return _replace_vectors(features, packed, "precision", precision)


def _replace_vectors(
    features: Features, vectors: Array, option: Literal["dimensions", "precision"], value: int | str
) -> Features:
    """Features with other vectors for its only result, which an option made."""
    (key,) = features.arrays
    fingerprint = digest_variant(features.fingerprint, option, value)
    space = features.space and digest_variant(features.space, option, value)
    receipts = {key: replace(features.receipts[key], fingerprint=fingerprint, space=space)}
    return replace(features, arrays={key: vectors}, fingerprint=fingerprint, receipts=receipts)

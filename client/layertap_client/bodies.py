"""Inputs and options as the request that carries them: raw where one body can, else multipart, else JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict
from urllib.parse import quote

import httpx

from layertap_client.arrays import to_array, write_safetensors
from layertap_client.errors import InputError
from layertap_client.inputs import Inputs, Item, is_single, list_items, read_item, to_plain
from layertap_client.messages import Request

MAX_QUERY = 16_384  # characters; a URL may have less than 64 KiB, of some proxies less
JSON = "application/json"
RAW_TYPES = {"images": "image/*", "texts": "text/plain; charset=utf-8", "tensors": "application/x-npy"}
SAFETENSORS = "application/x-safetensors"


class CallOptions(TypedDict, total=False):
    """What may be said of every request that computes.

    ``timeout`` is in seconds and also the server's deadline. The rest are fields of the body, as the reference has
    them; numpy arrays may stand in ``objective`` and ``interventions``. ``rate``: arrays are samples of sounds.
    """

    model: str | None
    objective: Mapping[str, Any] | None
    on_error: Literal["fail", "skip"]
    isolated: bool
    rate: int
    priority: Literal["interactive", "bulk"]
    timeout: float | None


class ExtractOptions(CallOptions, total=False):
    """What may be said of an extraction."""

    pool: str
    normalize: bool
    prompt: str | None
    truncate: Literal["none", "start", "end"] | None
    dtype: Literal["float32", "float16", "int8"]
    interventions: Sequence[Mapping[str, Any]]
    verify: bool
    resume: str | Mapping[str, Any] | None
    probe: bool
    generate: Mapping[str, Any] | None


class CompareOptions(ExtractOptions, total=False):
    """What may be said of a comparison; the server refuses ``verify``, ``resume``, ``probe`` and ``generate``."""

    measures: str | Sequence[str]


class ExplainOptions(CallOptions, total=False):
    """What may be said of an explanation."""

    layer: str | None
    discard_ratio: float
    classes: Sequence[int | str]
    top_classes: int
    steps: int
    samples: int
    noise: float
    seed: int
    window: int
    stride: int
    baseline: float | Literal["blur"] | Mapping[str, int]
    rule: Literal["vit-explain", "pytorch-grad-cam"]


class SweepOptions(CallOptions, total=False):
    """What may be said of a sweep: what is tried one by one, and the numbers of its operation."""

    each: str | Sequence[str]
    values: Sequence[float]
    top: int
    window: int
    attribution: bool
    by: float
    value: float
    min: float
    max: float
    std: float
    seed: int
    tensor: Any
    source: int | Mapping[str, Any] | None
    region: Sequence[int]
    interventions: Sequence[Mapping[str, Any]]
    prompt: str | None
    truncate: Literal["none", "start", "end"] | None


def build_request(path: str, inputs: Inputs | None, fields: Mapping[str, Any], accept: str) -> Request:
    """The request for some inputs, ``None`` for a dry run without; reads files, encodes. InputError."""
    plain = {name: to_plain(value) for name, value in fields.items() if value is not None}
    headers = {"Accept": accept}
    if inputs is None:
        return Request("POST", path, _list_params(plain), headers)
    if _is_tensors(inputs):
        data = write_safetensors({name: to_array(array) for name, array in inputs["tensors"].items()})  # type: ignore[call-overload,index]
        return _build_raw(path, data, SAFETENSORS, plain, headers)
    if not is_single(inputs):
        return build_items_request(path, list_items(inputs), plain, headers)  # type: ignore[arg-type]
    item = read_item(inputs)  # type: ignore[arg-type]
    if item.kind == "tensors":  # perhaps a batch, which nothing but a raw body carries
        return _build_raw(path, item.data, RAW_TYPES[item.kind], plain, headers)
    return build_items_request(path, [item], plain, headers)


def build_items_request(
    path: str, items: Sequence[Item], fields: Mapping[str, Any], headers: Mapping[str, str]
) -> Request:
    """The request for some items; ``fields`` are plain data."""
    if any(item.kind == "entries" for item in items):
        body = {**fields, "inputs": [item.to_entry() for item in items]}
        return Request("POST", path, (), {**headers, "Content-Type": JSON}, json.dumps(body).encode())
    if len(items) == 1 and items[0].kind != "tensors":
        params = _list_params(fields)
        if _count_characters(params) <= MAX_QUERY:
            content_type = {"Content-Type": RAW_TYPES[items[0].kind]}
            return Request("POST", path, params, {**headers, **content_type}, items[0].data)
    files = [(item.kind, ("x", item.data, "application/octet-stream")) for item in items]
    request = ("request", (None, json.dumps(fields).encode(), JSON))
    multipart = httpx.Request("POST", "http://server", files=[request, *files])
    content_type = {"Content-Type": multipart.headers["content-type"]}
    return Request("POST", path, (), {**headers, **content_type}, multipart.read())


def _is_tensors(inputs: Inputs) -> bool:
    """Whether these are arrays by the names of the model's inputs, of one item or a batch."""
    return isinstance(inputs, Mapping) and set(inputs) == {"tensors"}


def _build_raw(
    path: str, data: bytes, content_type: str, fields: Mapping[str, Any], headers: Mapping[str, str]
) -> Request:
    params = _list_params(fields)
    if _count_characters(params) > MAX_QUERY:
        raise InputError("the options are too long to go with a batch in one array: give inputs as list(array)")
    return Request("POST", path, params, {**headers, "Content-Type": content_type}, data)


def _list_params(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Fields as query parameters: texts as they are, all else as JSON."""
    return [(name, each if isinstance(each, str) else json.dumps(each)) for name, each in fields.items()]


def _count_characters(params: Sequence[tuple[str, str]]) -> int:
    return sum(len(name) + len(quote(value)) + 2 for name, value in params)

"""The routes that a scenario may ask: what each takes, and how it is sent."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from layertap.models.errors import find_nearest
from layertap.service.load.entry import OPTIONS, Entry, RouteName
from layertap.service.load.inputs import Inputs, Picture, Rows
from layertap.service.load.request_kind import Body, ScenarioError

PART = '--{}\r\nContent-Disposition: form-data; name="images"; filename="{}"\r\nContent-Type: {}\r\n\r\n'


@dataclass(frozen=True)
class Route:
    """Which options of an entry it takes, which it needs, where it is, and how inputs are sent to it.

    ``refusal`` is its status for pictures that are none.
    """

    options: frozenset[str]
    make_path: Callable[[Entry], str]
    make_body: Callable[[Entry, Inputs], Body]
    required: frozenset[str] = frozenset()
    refusal: int = 422


def find_route(entry: Entry) -> Route:
    """The route of an entry; ScenarioError where it does not take one of its options, or lacks one."""
    route = ROUTES[entry.route]
    given = {name for name in OPTIONS if getattr(entry, name) is not None}
    if unknown := sorted(given - route.options):
        nearest = find_nearest(unknown[0], route.options)
        meant = f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(sorted(route.options))}"
        raise ScenarioError(f"{unknown[0]}: the route {entry.route!r} has no such option: {meant}")
    if missing := sorted(route.required - given):
        raise ScenarioError(f"{missing[0]}: this is missing, the route {entry.route!r} needs it")
    return route


def format_value(value: object) -> str:
    """As a query or a header has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_multipart(pictures: Sequence[Picture]) -> Body:
    """Parts named ``images``; a single one is its own body."""
    if len(pictures) == 1:
        return Body(pictures[0].content, {"Content-Type": pictures[0].media_type})
    boundary = hashlib.sha256(b"".join(each.content for each in pictures)).hexdigest()
    content = b"".join(
        PART.format(boundary, number, each.media_type).encode() + each.content + b"\r\n"
        for number, each in enumerate(pictures)
    )
    return Body(content + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"})


def make_npy(rows: Rows) -> Body:
    """Rows as one array."""
    stream = BytesIO()
    np.save(stream, rows)
    return Body(stream.getvalue(), {"Content-Type": "application/x-npy"})


def _make_native_path(entry: Entry) -> str:
    """``/extract`` or ``/explain`` with all options in the query."""
    given = {name: getattr(entry, name) for name in sorted(ROUTES[entry.route].options)}
    query = {name: value for name, value in given.items() if value is not None} | entry.query
    text = {name: ",".join(map(str, it)) if isinstance(it, list) else format_value(it) for name, it in query.items()}
    return f"/{entry.route}?{urlencode(text)}" if text else f"/{entry.route}"


def _make_native_body(entry: Entry, inputs: Inputs) -> Body:
    return make_npy(inputs) if isinstance(inputs, np.ndarray) else make_multipart(inputs)


def _make_embeddings_body(entry: Entry, inputs: Inputs) -> Body:
    if isinstance(inputs, np.ndarray):
        raise ScenarioError("input.random: the route 'embeddings' takes pictures")
    if entry.layers is not None and len(entry.layers) > 1:
        raise ScenarioError("layers: the route 'embeddings' takes one layer")
    images = [f"data:{each.media_type};base64,{b64encode(each.content).decode()}" for each in inputs]
    optional = {"encoding_format": entry.encoding, "dimensions": entry.dimensions}
    body = {
        "model": ":".join([str(entry.model), *(entry.layers or [])]),
        "input": images,
        **{name: value for name, value in optional.items() if value is not None},
    }
    return Body(json.dumps(body).encode(), {"Content-Type": "application/json"})


def _make_infer_body(entry: Entry, inputs: Inputs) -> Body:
    """JSON, and tensors as bytes behind it; the reply is in bytes too."""
    tensor: dict[str, Any]
    if isinstance(inputs, np.ndarray):
        if entry.input.name is None:
            raise ScenarioError("input.name: the route 'infer' needs the name of the model's input")
        tensor = {"name": entry.input.name, "shape": list(inputs.shape), "datatype": "FP32"}
        data = inputs.tobytes()
    else:
        tensor = {"name": "encoded_image", "shape": [len(inputs), 1], "datatype": "BYTES"}
        data = b"".join(len(each.content).to_bytes(4, "little") + each.content for each in inputs)
    tensor["parameters"] = {"binary_data_size": len(data)}
    options = {name: getattr(entry, name) for name in ("pool", "normalize", "dtype", "priority")}
    parameters = {name: value for name, value in options.items() if value is not None}
    head: dict[str, Any] = {"inputs": [tensor], "parameters": {"binary_data_output": True, **parameters}}
    if entry.layers is not None:
        head["outputs"] = [{"name": name} for name in entry.layers]
    text = json.dumps(head).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
    return Body(text + data, headers)


def _make_query(entry: Entry) -> str:
    text = {name: format_value(value) for name, value in entry.query.items()}
    return f"?{urlencode(text)}" if text else ""


ROUTES: Mapping[RouteName, Route] = {
    "extract": Route(
        frozenset(("model", "layers", "pool", "format", "normalize", "dtype", "encoding", "on_error", "isolated"))
        | {"priority"},
        _make_native_path,
        _make_native_body,
    ),
    "explain": Route(
        frozenset(("model", "method", "classes", "layer", "format", "dtype", "encoding", "on_error", "priority")),
        _make_native_path,
        _make_native_body,
        frozenset({"method"}),
    ),
    "embeddings": Route(
        frozenset(("model", "layers", "encoding", "dimensions")),
        lambda entry: f"/v1/embeddings{_make_query(entry)}",
        _make_embeddings_body,
        frozenset({"model"}),
        refusal=400,
    ),
    "infer": Route(
        frozenset(("model", "layers", "pool", "normalize", "dtype", "priority")),
        lambda entry: f"/v2/models/{quote(str(entry.model), safe='')}/infer{_make_query(entry)}",
        _make_infer_body,
        frozenset({"model"}),
        refusal=400,
    ),
}

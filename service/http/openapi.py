"""The OpenAPI document: FastAPI's own, and what it can't read off the routes: the plain ones, and problems."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from layertap.models.selection.hook_points import Method
from layertap.service.formats.table import FORMATS
from layertap.service.schemas.bodies import ExplainBody, ExtractBody

TEMPLATE = "#/components/schemas/{model}"
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
PROBLEM: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "request_id": {"type": "string"},
        "errors": {"type": "array", "items": {"type": "object"}},
    },
}


def _make_parameter(name: str, schema: dict[str, Any], where: str = "query") -> dict[str, Any]:
    return {"name": name, "in": where, "required": False, "schema": schema}


def describe_problem(description: str) -> dict[str, Any]:
    """A response that is an error, for ``responses`` of a route."""
    return {
        "description": description,
        "content": {"application/problem+json": {"schema": {"$ref": TEMPLATE.format(model="Problem")}}},
    }


OTHER_PROBLEMS: dict[int | str, dict[str, Any]] = {"default": describe_problem("Any other error")}
COMMON = [
    _make_parameter("format", {"type": "string", "enum": list(FORMATS)}),
    _make_parameter("model", {"type": "string"}),
    _make_parameter("encoding", {"type": "string"}),
    _make_parameter("on_error", {"type": "string"}),
    _make_parameter("isolated", {"type": "boolean"}),
    _make_parameter("priority", {"enum": ["interactive", "bulk"]}),
    _make_parameter("objective", {"type": "string", "description": "what gradients are of: its kind"}),
    _make_parameter("class", {"type": "string", "description": "the objective's class: a number, or top"}),
    _make_parameter("X-Request-Timeout", {"type": "number"}, "header"),
]


def _make_operation(
    name: str, summary: str, description: str, body: type[BaseModel], *parameters: dict[str, Any]
) -> dict[str, Any]:
    """An operation that takes inputs in three ways and replies in every format."""
    return {
        "tags": [name],
        "summary": summary,
        "description": description,
        "operationId": f"{name}_{name}_post",
        "responses": {
            "200": {
                "description": "One array per key",
                "content": {each.media_type: BINARY if each.binary else {"schema": {}} for each in FORMATS.values()},
                "headers": {
                    "X-Layertap-Skipped": {
                        "description": "the places of the inputs that were left out, where some were: 1,4",
                        "schema": {"type": "string"},
                    }
                },
            },
            "400": describe_problem("Not JSON, or broken multipart"),
            "401": describe_problem("A key is missing or not known"),
            "404": describe_problem("Unknown model"),
            "406": describe_problem("No format on offer suits"),
            "408": describe_problem("The body came too slowly"),
            "413": describe_problem("Over a limit; the detail has the figure"),
            "415": describe_problem("A body of this type is not taken"),
            "422": describe_problem("Unknown layer, bad input or contradictory options"),
            "429": describe_problem("The queue is full"),
            "503": describe_problem("The model is not ready"),
            "504": describe_problem("The deadline passed"),
            **OTHER_PROBLEMS,
        },
        "parameters": [*parameters, *COMMON],
        "requestBody": {
            "content": {
                "application/json": {"schema": {"$ref": TEMPLATE.format(model=body.__name__)}},
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "request": {"type": "string", "description": "the JSON body without inputs"},
                            "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
                            "texts": {"type": "array", "items": {"type": "string"}},
                            "tensors": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        },
                        "additionalProperties": {
                            "type": "string",
                            "format": "binary",
                            "description": "a .npy file: in place of these, an array for each of the model's inputs",
                        },
                    }
                },
                "text/plain": {"schema": {"type": "string"}, "example": "a cat sat on the mat"},
                **dict.fromkeys(
                    ("image/*", "application/x-npy", "application/x-npz", "application/x-safetensors"), BINARY
                ),
            }
        },
    }


PLAIN_PATHS = {
    "/extract": {
        "post": _make_operation(
            "extract",
            "What layers of a model compute for your inputs",
            "Name layers, send inputs, get what these layers take or return, raw or pooled.",
            ExtractBody,
            _make_parameter("dry_run", {"type": "boolean"}),
            _make_parameter(
                "layers", {"type": "string", "description": "separated by commas; the model's embedding without them"}
            ),
            _make_parameter("pool", {"type": "string"}),
            _make_parameter("normalize", {"type": "boolean"}),
            _make_parameter("dtype", {"type": "string"}),
            _make_parameter("verify", {"type": "boolean"}),
            _make_parameter("resume", {"type": "string", "description": "the layer whose outputs the inputs are"}),
        )
    },
    "/explain": {
        "post": _make_operation(
            "explain",
            "Maps of what speaks for a model's answer",
            "Grad-CAM of a layer, saliency at the input, or attention rolled out, for each picture.",
            ExplainBody,
            _make_parameter("method", {"enum": list(get_args(Method))}),
            _make_parameter(
                "layer",
                {
                    "type": "string",
                    "description": "for grad_cam: without it the last one of maps that bears on the objective",
                },
            ),
            _make_parameter("discard_ratio", {"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
        )
    },
}


def install(app: FastAPI) -> None:
    """Give the app a document that has the plain routes too, and all schemas that its operations refer to."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes, servers=app.servers
            )
            schema["paths"] = PLAIN_PATHS | schema["paths"]
            schema["components"] = {"schemas": _make_schemas()}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _make_schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = {"Problem": PROBLEM}
    for model in (ExtractBody, ExplainBody):
        schema = model.model_json_schema(ref_template=TEMPLATE)
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    return schemas

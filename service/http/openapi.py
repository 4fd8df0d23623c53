"""What FastAPI can't read off the routes by itself: the bodies of ``POST /extract`` and the errors of all."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from layertap.models.selection.hook_points import Method
from layertap.service.formats.table import FORMATS
from layertap.service.schemas.bodies import ExplainBody, ExtractBody
from layertap.service.settings import LIMITS, Settings

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


def _parameter(name: str, schema: dict[str, Any], where: str = "query") -> dict[str, Any]:
    return {"name": name, "in": where, "required": False, "schema": schema}


def _problem(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


COMMON = [
    _parameter("format", {"type": "string", "enum": list(FORMATS)}),
    _parameter("model", {"type": "string"}),
    _parameter("encoding", {"type": "string"}),
    _parameter("on_error", {"type": "string"}),
    _parameter("isolated", {"type": "boolean"}),
    _parameter("priority", {"enum": ["interactive", "bulk"]}),
    _parameter("objective", {"type": "string", "description": "what gradients are of: its kind"}),
    _parameter("class", {"type": "string", "description": "the objective's class: a number, or top"}),
    _parameter("X-Request-Timeout", {"type": "number"}, "header"),
]


def _route(body: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    """A route that takes inputs in three ways and replies in every format."""
    return {
        "parameters": [*parameters, *COMMON],
        "requestBody": {
            "content": {
                "application/json": {"schema": {"$ref": TEMPLATE.format(model=body)}},
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "properties": {
                            "request": {"type": "string", "description": "the JSON body without inputs"},
                            "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        },
                        "additionalProperties": {
                            "type": "string",
                            "format": "binary",
                            "description": "a .npy file: in place of images, an array for each of the model's inputs",
                        },
                    }
                },
                "text/plain": {"schema": {"type": "string"}, "example": "a cat sat on the mat"},
                **dict.fromkeys(
                    ("image/*", "application/x-npy", "application/x-npz", "application/x-safetensors"), BINARY
                ),
            }
        },
        "responses": {
            "200": {
                "description": "One array per key",
                "headers": {
                    "X-Layertap-Skipped": {
                        "description": "the places of the inputs that were left out, where some were: 1,4",
                        "schema": {"type": "string"},
                    }
                },
                "content": {each.media_type: BINARY if each.binary else {} for each in FORMATS.values()},
            },
            "400": _problem("Not JSON, or broken multipart"),
            "401": _problem("A key is missing or not known"),
            "404": _problem("Unknown model"),
            "406": _problem("No format on offer suits"),
            "408": _problem("The body came too slowly"),
            "413": _problem("Over a limit; the detail has the figure"),
            "415": _problem("A body of this type is not taken"),
            "422": _problem("Unknown layer, bad input or contradictory options"),
            "429": _problem("The queue is full"),
            "503": _problem("The model is not ready"),
            "504": _problem("The deadline passed"),
        },
    }


EXTRACT = _route(
    "ExtractBody",
    _parameter("dry_run", {"type": "boolean"}),
    _parameter("layers", {"type": "string", "description": "separated by commas; the model's embedding without them"}),
    _parameter("pool", {"type": "string"}),
    _parameter("normalize", {"type": "boolean"}),
    _parameter("dtype", {"type": "string"}),
    _parameter("verify", {"type": "boolean"}),
    _parameter("resume", {"type": "string", "description": "the layer whose outputs the inputs are"}),
)
EXPLAIN = _route(
    "ExplainBody",
    _parameter("method", {"enum": list(get_args(Method))}),
    _parameter(
        "layer",
        {"type": "string", "description": "for grad_cam: without it the last one of maps that bears on the objective"},
    ),
    _parameter("discard_ratio", {"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
)


def _required(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


MODELS_BODY = _required(
    {
        "default": {"type": "string"},
        "models": {"type": "array", "items": {"type": "object"}},
        "limits": _required(
            {
                name: {"type": "integer" if Settings.model_fields[name].annotation is int else "number"}
                for name in LIMITS
            }
        ),
    }
)
LAYERS = {
    "responses": {
        "200": {"content": {"text/plain": {"schema": {"type": "string", "description": "a tree for terminals"}}}},
        "401": _problem("A key is missing or not known"),
        "404": _problem("Unknown model"),
        "406": _problem("No form on offer suits"),
        "422": _problem("Unknown type of layer, or a filter that is not taken"),
        "429": _problem("This key is over its rate"),
        "503": _problem("The model is not ready"),
        "504": _problem("The deadline passed"),
    }
}
MODELS = {"responses": {"200": {"content": {"application/json": {"schema": MODELS_BODY}}}}}


def install(app: FastAPI, root_path: str) -> None:
    """Give the app a document that has the bodies' schemas, and says beneath what its routes stand."""
    servers = [{"url": root_path}] if root_path else None

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes, servers=servers
            )
            own: dict[str, Any] = {"Problem": PROBLEM}
            for model in (ExtractBody, ExplainBody):
                body = model.model_json_schema(ref_template=TEMPLATE)
                own |= body.pop("$defs", {}) | {model.__name__: body}
            # In place of FastAPI's own schemas: those are of its own errors, which nobody gets here.
            schema["components"] = {**schema.get("components", {}), "schemas": own}
            _describe_errors(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _describe_errors(schema: dict[str, Any]) -> None:
    for item in schema["paths"].values():
        for operation in item.values():
            answers = operation["responses"]
            described = answers.get("422", {}).get("content", {})
            if described.pop("application/json", None) is not None and not described:
                del answers["422"]
            answers.setdefault("default", _problem("Any other error"))

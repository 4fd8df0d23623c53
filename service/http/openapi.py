"""The OpenAPI document: FastAPI's own, and what it can't read off the routes: the plain ones, and problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema
from starlette.responses import JSONResponse

from layertap.models.selection.hook_points import Method
from layertap.service.formats.table import FORMATS
from layertap.service.pictures.options import Order
from layertap.service.schemas.bodies import MAX_STEPS, MAX_TOP_CLASSES, ExplainBody, ExtractBody
from layertap.service.schemas.examples import EXAMPLES, EXPLAIN, EXTRACT, PARAMETERS
from layertap.service.schemas.replies import (
    DryRunReply,
    FeaturesReply,
    HealthReply,
    LabelsReply,
    LayersReply,
    Model,
    ModelsReply,
    ProbeReply,
    Problem,
    ReloadReply,
)

TEMPLATE = "#/components/schemas/{model}"
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


def _refer(*models: type[BaseModel]) -> dict[str, Any]:
    """The schema of what is one of these."""
    references = [{"$ref": TEMPLATE.format(model=each.__name__)} for each in models]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _make_parameter(name: str, schema: dict[str, Any], where: str = "query") -> dict[str, Any]:
    return {"name": name, "in": where, "required": False, "schema": schema}


def _make_json_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A query parameter that holds JSON."""
    return {"name": name, "in": "query", "required": False, "content": {"application/json": {"schema": schema}}}


def describe_problem(description: str) -> dict[str, Any]:
    """A response that is an error, for ``responses`` of a route."""
    return {
        "description": description,
        "content": {"application/problem+json": {"schema": _refer(Problem)}},
    }


def describe_reply(reply: type[BaseModel], description: str = "Successful response") -> dict[str, Any]:
    """A good response that is JSON, for ``responses`` of a route."""
    return {"description": description, "content": {"application/json": {"schema": _refer(reply)}}}


OTHER_PROBLEMS: dict[int | str, dict[str, Any]] = {"default": describe_problem("Any other error")}
COMMON = [
    _make_parameter("format", {"type": "string", "enum": list(FORMATS)}),
    _make_parameter("model", {"type": "string"}),
    _make_parameter("encoding", {"type": "string"}),
    _make_parameter("on_error", {"type": "string"}),
    _make_parameter("isolated", {"type": "boolean"}),
    _make_parameter("priority", {"enum": ["interactive", "bulk"]}),
    _make_parameter(
        "objective", {"type": "string", "description": "what gradients are of: its kind, or an ObjectiveBody as JSON"}
    ),
    _make_parameter("class", {"type": "string", "description": "the objective's class: a number, or top"}),
    _make_json_parameter("target", {"type": "array", "items": {"type": "number"}, "minItems": 1}),
    _make_parameter("tiles", {"type": "integer", "description": "of a picture: how many of each result"}),
    _make_parameter("order", {"enum": list(get_args(Order))}),
    _make_json_parameter("picture", {"$ref": TEMPLATE.format(model="PictureBody")}),
    _make_parameter("X-Request-Timeout", {"type": "number"}, "header"),
]
SECURITY_SCHEMES = {"key": {"type": "http", "scheme": "bearer"}}


def _make_operation(
    name: str,
    summary: str,
    description: str,
    body: type[BaseModel],
    examples: Mapping[str, Any],
    replies: tuple[type[BaseModel], ...],
    *parameters: dict[str, Any],
) -> dict[str, Any]:
    """An operation that takes inputs in three ways and replies in every format, as ``replies`` in JSON."""
    json_reply = {"schema": _refer(*replies)}
    return {
        "tags": [name],
        "summary": summary,
        "description": description,
        "operationId": name,
        "responses": {
            "200": {
                "description": "One array per key",
                "content": {each.media_type: BINARY if each.binary else json_reply for each in FORMATS.values()},
                "headers": {
                    "X-Layertap-Skipped": {
                        "description": "the places of the inputs that were left out, where some were: 1,4",
                        "schema": {"type": "string"},
                    },
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
                "application/json": {
                    "schema": _refer(body),
                    "examples": {title: {"value": value} for title, value in examples.items()},
                },
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
            EXTRACT,
            (FeaturesReply, DryRunReply),
            _make_parameter("dry_run", {"type": "boolean"}),
            _make_parameter(
                "layers",
                {
                    "type": "string",
                    "description": "separated by commas, or a JSON list that may have objects (LayerBody); "
                    "the model's embedding without them",
                },
            ),
            _make_parameter("pool", {"type": "string"}),
            _make_parameter("normalize", {"type": "boolean"}),
            _make_parameter("prompt", {"type": "string", "description": "for texts: a prompt of the model, by name"}),
            _make_parameter("dtype", {"type": "string"}),
            _make_parameter("verify", {"type": "boolean"}),
            _make_json_parameter(
                "interventions", {"type": "array", "items": {"$ref": TEMPLATE.format(model="InterventionBody")}}
            ),
            _make_parameter("probe", {"type": "boolean"}),
            _make_parameter("resume", {"type": "string", "description": "the layer whose outputs the inputs are"}),
        )
    },
    "/explain": {
        "post": _make_operation(
            "explain",
            "Maps of what speaks for a model's answer",
            "Grad-CAM, attributions at the input, occlusion, or attention rolled out, for each picture and class.",
            ExplainBody,
            EXPLAIN,
            (FeaturesReply,),
            _make_parameter(
                "method",
                {"type": "string", "description": f"{', '.join(get_args(Method))}; several separated by commas"},
            ),
            _make_parameter(
                "classes",
                {"type": "string", "description": "separated by commas: numbers, or top; a map of each"},
            ),
            _make_parameter("top_classes", {"type": "integer", "minimum": 0, "maximum": MAX_TOP_CLASSES}),
            *(
                _make_parameter(name, {"type": "integer", "minimum": 1, "maximum": MAX_STEPS})
                for name in ("steps", "samples")
            ),
            _make_parameter("noise", {"type": "number", "minimum": 0, "maximum": 10}),
            _make_parameter("seed", {"type": "integer", "minimum": 0}),
            *(_make_parameter(name, {"type": "integer", "minimum": 1}) for name in ("window", "stride")),
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
            schema["paths"] = _add_parameter_examples(PLAIN_PATHS | schema["paths"])
            schema["components"] = {"schemas": _make_schemas(), "securitySchemes": SECURITY_SCHEMES}
            schema["security"] = [{}, *({name: []} for name in SECURITY_SCHEMES)]  # a server without keys takes none
            app.openapi_schema = schema
        return app.openapi_schema

    def show_document(request: Request) -> Response:
        return JSONResponse(app.openapi())

    app.openapi = document  # type: ignore[method-assign]
    app.add_route("/openapi.json", show_document, include_in_schema=False)


class _SchemaGenerator(GenerateJsonSchema):
    """Fields have their names only: titles made of these would say the same again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _make_schemas() -> dict[str, Any]:
    """The schemas of all bodies and replies, with their examples."""
    mode: JsonSchemaMode = "validation"  # of replies too: what has a default is not always there
    models = [(each, mode) for each in SCHEMAS]
    _, document = models_json_schema(models, ref_template=TEMPLATE, schema_generator=_SchemaGenerator)
    return {name: schema | {"examples": EXAMPLES[name]} for name, schema in document["$defs"].items()}


def _add_parameter_examples(paths: dict[str, Any]) -> dict[str, Any]:
    for item in paths.values():
        for operation in item.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] in PARAMETERS:
                    parameter["example"] = PARAMETERS[parameter["name"]]
    return paths


SCHEMAS: tuple[type[BaseModel], ...] = (
    *(ExtractBody, ExplainBody, FeaturesReply, DryRunReply, ProbeReply),
    *(ModelsReply, Model, ReloadReply, LabelsReply, LayersReply, HealthReply, Problem),
)

"""The OpenAPI document: FastAPI's, with the problems and requests that it can't read off routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from layertap.models.plan.requested import Measure, Method
from layertap.service.formats.table import FORMATS
from layertap.service.http import timeout
from layertap.service.http.query import PARTS
from layertap.service.schemas.bodies import CompareBody, ExplainBody, ExtractBody, OptimiseBody, RequestBody, SweepBody
from layertap.service.schemas.examples import PARAMETERS
from layertap.service.schemas.replies import Problem
from layertap.service.schemas.selection import ObjectiveBody

Json = dict[str, Any]
Responses = dict[int | str, Json]
TEMPLATE = "#/components/schemas/{model}"
BINARY: Json = {"schema": {"type": "string", "format": "binary"}}
PROBLEMS = {
    400: "Not JSON, or broken multipart",
    401: "A key is missing or not known",
    403: "Not an administrator's key, or not allowed by the configuration",
    404: "Unknown model",
    406: "No format on offer suits",
    408: "The body came too slowly",
    409: "Not while the configuration or the model is as it is; the detail says why",
    413: "Over a limit; the detail has the figure",
    415: "A body of this type is not taken",
    422: "An unknown name, a bad value or input, or contradictory options",
    429: "The queue is full",
    503: "The model is not ready, or the server is shutting down",
    504: "The deadline passed",
}
TEXTS = {  # parameters that are text, although the field in a body is a list or an object
    "layers": "separated by commas, or a JSON list that may have objects (LayerBody); the model's embedding without",
    "objective": "what gradients are of: its kind, or an ObjectiveBody as JSON",
    "method": f"{', '.join(get_args(Method))}; several separated by commas",
    "classes": "separated by commas: numbers, or top; a map of each",
    "interventions": "a JSON list of changes (InterventionBody)",
    "target": "a JSON list of numbers",
    "each": "channel, head, query, key, token; several separated by commas",
    "values": "numbers separated by commas",
    "from": 'the input that values are taken from, as JSON: {"input": 0}',
    "tensor": "a TensorBody as JSON",
    "region": "a JSON list of four numbers",
    "project": "the name of a projection, or its steps as JSON (StepBody)",
    "measures": f"{', '.join(get_args(Measure))}; several separated by commas",
    "with": "the layers that these are compared to, as JSON (OtherBody)",
    "clamp": "two numbers separated by a comma",
}
TIMEOUT: Json = {
    "name": timeout.HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "number", "exclusiveMinimum": 0, "description": "seconds that the answer may take"},
    "example": 10,
}
MULTIPART: Json = {
    "type": "object",
    "properties": {
        "request": {"type": "string", "description": "the JSON body without inputs"},
        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "audio": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "texts": {"type": "array", "items": {"type": "string"}},
        "tensors": {"type": "array", "items": {"type": "string", "format": "binary"}},
        "inputs": False,  # so that the types of generated clients distinguish it from a JSON body
    },
    "additionalProperties": False,
}
RAW_TYPES = ("image/*", "audio/*", "application/x-npy", "application/x-npz", "application/x-safetensors")


def _refer(model: type[BaseModel]) -> Json:
    return {"$ref": TEMPLATE.format(model=model.__name__)}


def describe_problems(*statuses: int) -> Responses:
    """The errors of these statuses, and any other, for ``responses`` of a route."""
    content = {"application/problem+json": {"schema": _refer(Problem)}}
    described: Responses = {status: {"description": PROBLEMS[status], "content": content} for status in statuses}
    return described | {"default": {"description": "Any other error", "content": content}}


COMPUTED: Responses = {  # of routes that compute: all formats; FastAPI adds JSON
    200: {
        "description": "One array per key",
        "content": {each.media_type: BINARY for each in FORMATS.values() if each.binary},
        "headers": {
            "X-Layertap-Skipped": {
                "description": "indices of the inputs that were left out, if any: 1,4",
                "schema": {"type": "string"},
            },
            "X-Layertap-Top-Classes": {
                "description": "of an explanation: the top classes of the first input as JSON, as many as have room",
                "schema": {"type": "string"},
            },
        },
    },
    **describe_problems(400, 401, 404, 406, 408, 413, 415, 422, 429, 503, 504),
}


def describe_inputs(body: type[RequestBody], examples: Mapping[str, Any], **parameters: Json) -> Json:
    """The body as JSON, or inputs in other formats and its fields in the query, for ``openapi_extra`` of a route."""
    titled = {title: {"value": value} for title, value in examples.items()}
    schemas = {"format": {"type": "string", "enum": list(FORMATS)}, **parameters, **_list_fields(body)}
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": each} for name, each in schemas.items()
        ],
        "requestBody": {
            "content": {
                "application/json": {"schema": _refer(body), "examples": titled},
                "multipart/form-data": {"schema": MULTIPART},
                "text/plain": {"schema": {"type": "string"}, "example": "a cat sat on the mat"},
                **dict.fromkeys(RAW_TYPES, BINARY),
            }
        },
    }


def install(app: FastAPI, described: Sequence[BaseRoute]) -> None:
    """Serve the document of the app's routes and the ``described`` ones, which represent plain routes."""

    def document() -> Json:
        if app.openapi_schema is None:
            names = ("title", "version", "summary", "servers", "separate_input_output_schemas")
            options = {name: getattr(app, name) for name in names}
            app.openapi_schema = _complete(get_openapi(routes=[*described, *app.routes], **options))
        return app.openapi_schema

    def show_document(request: Request) -> Response:  # not a coroutine: the first call takes long, and runs in a thread
        return JSONResponse(app.openapi())

    app.openapi = document  # type: ignore[method-assign]
    app.add_route("/openapi.json", show_document, include_in_schema=False)


def _complete(document: Json) -> Json:
    """Add schemas of bodies and problems, keys, and examples of parameters, which no route declares."""
    bodies_and_problem = (ExtractBody, ExplainBody, SweepBody, CompareBody, OptimiseBody, Problem)
    _, bodies = models_json_schema([(each, "validation") for each in bodies_and_problem], ref_template=TEMPLATE)
    for operation in (each for path in document["paths"].values() for each in path.values()):
        parameters = operation.setdefault("parameters", [])
        parameters += [TIMEOUT] if "504" in operation["responses"] else []
        for parameter in parameters:
            if parameter["name"] in PARAMETERS:
                parameter["example"] = PARAMETERS[parameter["name"]]
    schemas = document["components"]["schemas"] | bodies["$defs"]
    document["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    document["security"] = [{}, {"key": []}]  # a server without keys needs none
    return document


def _list_fields(body: type[RequestBody]) -> dict[str, Json]:
    """The schemas of a body's fields as query parameters: without inputs, with some parts of objects beside them."""
    fields: dict[str, Json] = body.model_json_schema(ref_template=TEMPLATE)["properties"]
    del fields["inputs"]
    objective = ObjectiveBody.model_json_schema(ref_template=TEMPLATE)["properties"]
    fields |= {name: objective[name] for name in PARTS}
    texts: dict[str, Json] = {name: {"type": "string", "description": text} for name, text in TEXTS.items()}
    return {name: texts.get(name, schema) for name, schema in fields.items()}

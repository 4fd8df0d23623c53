"""The document that describes the interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from layertap.service.formats.table import FORMATS
from layertap.service.http.problems import STATUS
from tests.server import Live
from tests.service.support import Json

METHODS = {"get", "post", "put"}


@pytest.fixture(scope="module")
def document(live: Live) -> Json:
    """The document as served."""
    reply = live.client.get("/openapi.json")
    assert reply.status_code == 200
    body: Json = reply.json()
    return body


def nodes(value: Any) -> Iterator[Json]:
    """Every object in the document."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(child)


def operations(document: Json) -> dict[str, Json]:
    """Every operation by method and path."""
    return {
        f"{method} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    }


def test_references(document: Json) -> None:
    """Every reference leads to something in the document, and no schema is left that nothing refers to."""
    found = {node["$ref"] for node in nodes(document) if "$ref" in node}
    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert found == schemas


def test_routes(document: Json) -> None:
    """Every route is described, with a summary, a tag and an id of its own."""
    assert document["openapi"].startswith("3.")
    assert document["info"]["title"] == "layertap"
    found = operations(document)
    assert {"post /extract", "post /explain", "post /sweep", "put /models/{name}", "get /readyz"} <= set(found)
    assert all(operation["summary"] and operation["tags"] for operation in found.values())
    assert len({operation["operationId"] for operation in found.values()}) == len(found)


def test_extract(document: Json) -> None:
    """``POST /extract`` has every body, every format of reply, and every status of the table."""
    operation = document["paths"]["/extract"]["post"]
    assert set(operation["requestBody"]["content"]) == {
        *("application/json", "multipart/form-data", "image/*", "text/plain"),
        *("application/x-npy", "application/x-safetensors"),
    }
    assert set(operation["responses"]["200"]["content"]) == {each.media_type for each in FORMATS.values()}
    statuses = {"200", "400", "401", "404", "406", "408", "413", "415", "422", "429", "503", "504"}
    assert set(operation["responses"]) == statuses | {"default"}
    assert statuses <= {"200", *(str(status) for status, _ in STATUS.values())}
    body = document["components"]["schemas"]["ExtractBody"]
    assert {"model", "inputs", "layers", "pool", "normalize", "dtype", "encoding", "on_error"} <= set(
        body["properties"]
    )
    assert "required" not in body  # without layers the model's embedding is meant
    assert "default" not in body["properties"]["layers"]
    layer = document["components"]["schemas"]["LayerBody"]["properties"]
    assert {"layer", "type", "call", "path", "site", "pool", "channels", "tokens", "as"} <= set(layer)


def test_errors(document: Json) -> None:
    """Every error of every route is described as a problem."""
    for operation in operations(document).values():
        assert "default" in operation["responses"]
        for status, answer in operation["responses"].items():
            if status not in ("200", "202"):
                assert set(answer["content"]) == {"application/problem+json"}
                schema = answer["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}
    assert document["components"]["schemas"]["Problem"]["required"] == [
        *("type", "title", "status", "detail", "request_id"),
    ]

"""The document that describes the interface: whole, its examples work, and real replies are what its schemas say."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from layertap.service.formats.table import FORMATS
from layertap.service.http.problems import STATUS
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.nets_http import Same
from tests.service.support import Json, configured, image, net, picture, rows, tensor
from tests.transformers_nets import TEXT as BERT
from tests.transformers_nets import tokenizer

PREFIX = "#/components/schemas/"
VOCABULARY = 30_522  # ids of the examples' tokens are those of BERT
PICTURE = image(picture(1))
TEXT = {"text": "a cat sat on the mat"}


@pytest.fixture(scope="module")
def live(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with models of all kinds: of texts, attention, structured outputs; one that can't be loaded."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    config = transformers.BertConfig(
        **BERT | {"vocab_size": VOCABULARY}, num_labels=3, architectures=["BertForSequenceClassification"]
    )
    config.save_pretrained(folder)
    tokenizer(folder)
    module = Same()
    state = {f"module.{name}": value for name, value in module.state_dict().items()}
    del state["module.conv.bias"]
    torch.save({"state_dict": state | {"module.more": torch.zeros(1)}, "epoch": 3}, folder / "same.ckpt")
    same: Json = {"inputs": (InputSpec("x", (3, 32, 32)),), "strict": False, "labels": ("a", "b", "c")}
    steps = PreprocessSpec(
        resize=32,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        channels="bgr",
        letterbox=(0, 0, 0),
        background=(0, 0, 0),
        scale=(-1.0, 1.0),
        crop_rounding="floor",
    )
    specs = (
        ModelSpec("bert", f"transformers:{folder}", weights="random:0", device="cpu"),
        ModelSpec("vit", "python:tests.nets:vit", weights="random:0", inputs=(InputSpec("x", (3, 32, 32)),)),
        ModelSpec("encoder", "python:tests.nets:Encoder", weights="random:0", inputs=(InputSpec("x", (5, 8)),)),
        ModelSpec("structured", "python:tests.nets:Structured", weights="random:0", inputs=(InputSpec("x", (4,)),)),
        ModelSpec("centred", "python:tests.nets:BatchCentred", weights="random:0", inputs=(InputSpec("x", (4,)),)),
        ModelSpec(
            "same", "python:tests.service.nets_http:Same", weights=str(folder / "same.ckpt"), preprocess=steps, **same
        ),
        net("never", "Never", required=False),
        net("later", "Touchy", load="lazy", embedding="linear", tf32=True, memory_format="channels_last"),
    )
    with serve(configured(*specs)) as live:
        yield live


@pytest.fixture(scope="module")
def document(live: Live) -> Json:
    """The document as served."""
    return live.client.get("/openapi.json").json()


def list_operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Every operation with its method and path, but for those that need a file."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if (method, path) not in OF_FILES:
                yield method, path, operation


def nodes(value: Any) -> Iterator[Json]:
    """Every object in the document."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(child)


def find_references(document: Json, value: Any) -> set[str]:
    """The names of all schemas that a part of the document leads to."""
    found, rest = set[str](), [value]
    while rest:
        names = {each["$ref"].removeprefix(PREFIX) for each in nodes(rest.pop()) if "$ref" in each} - found
        rest += [document["components"]["schemas"][name] for name in names]
        found |= names
    return found


def validator() -> Any:
    """Of JSON Schema. Its import builds grammars for seconds: only for tests that validate, not to collect them."""
    from jsonschema import Draft202012Validator

    return Draft202012Validator


def check(document: Json, schema: Json, value: Any) -> None:
    """A value fits a schema of a document."""
    validator()({**schema, "components": document["components"]}).validate(value)


def close(document: Json) -> Json:
    """The document with schemas that allow no field beside those that they name."""
    closed = copy.deepcopy(document)
    for schema in closed["components"]["schemas"].values():
        schema["additionalProperties"] = False
    return closed


def test_references(document: Json) -> None:
    """Every schema is one of JSON Schema that something refers to, and every reference leads to one."""
    schemas = document["components"]["schemas"]
    assert {node["$ref"] for node in nodes(document) if "$ref" in node} == {PREFIX + name for name in schemas}
    for schema in schemas.values():
        validator().check_schema(schema)


def test_routes(document: Json) -> None:
    """Every route is described, with a summary, a tag and an id of its own."""
    assert document["openapi"].startswith("3.")
    assert document["info"]["title"] == "layertap"
    found = {f"{method} {path}": each for path, item in document["paths"].items() for method, each in item.items()}
    assert {"post /extract", "post /explain", "post /sweep", "put /models/{name}", "get /readyz"} <= set(found)
    assert all(operation["summary"] and operation["tags"] for operation in found.values())
    assert len({operation["operationId"] for operation in found.values()}) == len(found)


def test_extract(document: Json) -> None:
    """``POST /extract`` has every body, every format of reply, and every status of the table."""
    operation = document["paths"]["/extract"]["post"]
    assert set(operation["requestBody"]["content"]) == {
        *("application/json", "multipart/form-data", "image/*", "audio/*", "text/plain"),
        *("application/x-npy", "application/x-npz", "application/x-safetensors"),
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
    for operation in (each for item in document["paths"].values() for each in item.values()):
        assert "default" in operation["responses"]
        for status, answer in operation["responses"].items():
            if status not in ("200", "202"):
                assert set(answer["content"]) == {"application/problem+json"}
                schema = answer["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}
    assert document["components"]["schemas"]["Problem"]["required"] == [
        *("type", "title", "status", "detail", "request_id"),
    ]


def test_operations_have_examples(live: Live, document: Json) -> None:
    """Every body that is JSON or text has examples, and each is answered with 200 and what the document says."""
    sent = 0
    for method, path, operation in list_operations(document):
        content = operation.get("requestBody", {}).get("content", {})
        json_reply = operation["responses"]["200"]["content"].get("application/json")
        for title, example in content.get("application/json", {}).get("examples", {}).items():
            reply = live.client.request(method, path, json=example["value"])
            assert reply.status_code == 200, (path, title, reply.text)
            check(close(document), json_reply["schema"], reply.json())
            sent += 1
        if "text/plain" in content and path == "/extract":  # an explanation takes no texts
            data, headers = content["text/plain"]["example"].encode(), {"content-type": "text/plain"}
            reply = live.client.request(method, path, content=data, headers=headers, params={"model": "bert"})
            assert reply.status_code == 200, reply.text
    assert sent >= 8


def test_parameters_have_examples(live: Live, document: Json) -> None:
    """All parameters of an operation that have examples make a request together, and it is answered with 200."""
    for method, path, operation in list_operations(document):
        given: dict[str, dict[str, str]] = {"query": {}, "path": {}, "header": {}}
        for each in operation.get("parameters", []):
            if "example" in each:
                check(document, each["schema"], each["example"])
                value = each["example"]
                given[each["in"]][each["name"]] = value if isinstance(value, str) else json.dumps(value)
        body = {"content": picture(1)} if "requestBody" in operation else {}
        headers = {**given["header"], **({"content-type": "image/png"} if body else {})}
        if path == "/compare":  # one picture can't be compared
            continue
        reply = live.client.request(
            method, path.format(**given["path"]), params=given["query"], headers=headers, **body
        )
        assert reply.status_code == 200, (path, reply.text)
        check(close(document), operation["responses"]["200"]["content"]["application/json"]["schema"], reply.json())
        if path.endswith("/unload"):  # no later request would load it
            assert live.client.post(path.format(**given["path"]).replace("/unload", "/load")).status_code == 200


def test_replies(live: Live, document: Json) -> None:
    """Real replies have no field that their schema lacks; and every field of a schema is in one of them."""
    closed, seen = close(document), dict[str, set[str]]()
    for reply in ask_everything(live):
        path = "/" + reply.request.url.path.split("/")[1]
        if path == "/models" and reply.request.url.path != path:
            path = "/".join(["/models/{name}", *reply.request.url.path.split("/")[3:]])
        responses = document["paths"][path][reply.request.method.lower()]["responses"]
        media_type = reply.headers["content-type"]
        schema = responses["200" if reply.status_code == 200 else "default"]["content"][media_type]["schema"]
        check(closed, schema, reply.json())
        note_fields(closed, schema, reply.json(), seen)
    requests = find_references(document, [each["schema"] for each in list_bodies(document)])
    replies = {name: each for name, each in document["components"]["schemas"].items() if name not in requests}
    missing = {name: each["properties"].keys() - seen.get(name, set()) for name, each in replies.items()}
    assert {name: fields for name, fields in missing.items() if fields} == RARE


RARE = {
    # Of a compiled plan, which takes long to compile; of windows: layers that take several inputs of a row; of media.
    "Receipt": {
        *("forward", "entries_per_row", "row_order", "truncated"),
        *("source_rates", "seconds_per_step", "source_frames", "source_seconds"),
    },
    "ComparisonReply": {"warnings"},
    "Checkpoint": {"adapter"},  # of a folder of peft
    "Tensor": {"heads"},  # of a function
    "AttentionTensor": {"heads"},  # which has an axis for them
    "TextInputs": {"cuts", "prompts", "default_prompt", "generates"},  # of a folder of transformers
    "FeaturesReply": {"texts"},  # of a generation
    "Model": {
        "replacement",
        "outputs",
        "cast",
    },  # while another version loads; of scores that are not logits; of dtypes
    "ModelInput": {"batch_axis"},  # of a model with time first
    "TopClassReply": {"activation"},  # of a class with many labels
    "Replacement": {"state", "reason"},
    "LibraryPreprocessing": {"processor", "settings", "background", "decode"},  # of a folder of transformers
    "SoundPreprocessing": {"processor", "settings", "rate", "channels", "sound"},  # of a folder of transformers
    "VideoPreprocessing": {"frames", "sampling", "each"},
    "ReloadReply": {"added", "removed", "changed", "aliases", "default"},  # of a server with a file
}
OF_FILES = {("put", "/models/{name}"), ("post", "/models/reload"), ("put", "/projections/{digest}")}  # not sent here


def list_bodies(document: Json) -> Iterator[Json]:
    """What requests hold that are JSON."""
    for _, _, operation in list_operations(document):
        if "requestBody" in operation:
            yield operation["requestBody"]["content"]["application/json"]


def note_fields(document: Json, schema: Json, value: Any, seen: dict[str, set[str]]) -> None:
    """Note the fields that a value has of each schema that it is of."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(PREFIX)
        schema = document["components"]["schemas"][name]
        seen.setdefault(name, set()).update(value)
    for branch in schema.get("anyOf", []):
        if validator()({**branch, "components": document["components"]}).is_valid(value):
            note_fields(document, branch, value, seen)
    if isinstance(value, list):
        for each in value:
            note_fields(document, schema.get("items") or {}, each, seen)
    if isinstance(value, dict):
        for key, each in value.items():
            named = schema.get("properties", {}).get(key)
            additional = schema.get("additionalProperties")
            note_fields(document, named or (additional if isinstance(additional, dict) else {}), each, seen)


def ask_everything(live: Live) -> Iterator[httpx.Response]:
    """Replies of every kind."""
    client = live.client
    row = tensor(np.zeros((5, 8), np.float32))
    for path in (
        *(
            "/livez",
            "/readyz",
            "/models",
            *(f"/models/{name}" for name in ("digits", "same", "bert", "never", "later")),
        ),
        *("/models/digits/layers?functions=true", "/models/encoder/layers", "/models/bert/layers", "/models/none"),
        *("/models/digits/probe", "/models/structured/probe", "/models/none/layers"),
        *("/models/digits/labels", "/models/same/labels", "/models/none/labels"),
    ):
        yield client.get(path)
    yield client.post("/models/later/load")
    yield client.post("/models/later/unload")
    change = {"layer": "block2", "op": "zero"}
    parts = {"heads": [0], "queries": [0], "keys": [1]}
    pixels = tensor(np.zeros((3, 32, 32), np.float32))
    for body in (
        {"layers": ["block?", "block2.relu#*", "block2/add#0"], "inputs": [PICTURE], "verify": True, "probe": True},
        {"layers": [{"layer": "block1", "pool": "mean", "channels": [0, 3], "dtype": "int8"}], "inputs": [PICTURE]},
        {"layers": [{"layer": "block1", "grid": [2, 2], "sample": {"units": 3}}], "inputs": [PICTURE]},
        {"layers": ["head"], "inputs": [PICTURE], "encoding": "sparse"},
        {"layers": [{"layer": "block1", "stats": True, "by": "channel"}], "inputs": [PICTURE]},
        {"layers": [{"layer": "block1", "stats": ["mean"], "over": "inputs"}], "inputs": [PICTURE]},
        {"layers": [{"layer": "block1", "stats": ["histogram"], "edges": [0, 1]}], "inputs": [PICTURE]},
        {
            "layers": ["head"],
            "pool": "mean",
            "normalize": True,
            "inputs": [PICTURE, image(b"none")],
            "on_error": "skip",
        },
        {"layers": ["head"], "inputs": [PICTURE, {**PICTURE, "interventions": [change]}], "interventions": [change]},
        {"layers": ["block3:grad_output"], "objective": {}, "inputs": [PICTURE]},
        {"layers": [{"layer": "head:grad_weight", "combine": "sum"}], "objective": {}, "inputs": [PICTURE]},
        {"layers": ["head"], "inputs": [pixels]},
        {"model": "bert", "layers": ["*"], "inputs": [TEXT, {"text": "a dog"}]},
        {"model": "bert", "layers": ["*:attention", ".:grad_input"], "objective": {}, "inputs": [TEXT]},
        {"model": "bert", "layers": ["*attention*:attention"], "inputs": [{"tokens": [101, 1037]}]},
        {"model": "encoder", "layers": ["*:attention", {"layer": "*:attention", **parts, "as": "p"}], "inputs": [row]},
        {"model": "encoder", "layers": [{"layer": "layers.layers.0", "tokens": [0, -1]}], "inputs": [row]},
        {"model": "vit", "layers": ["encoder"], "inputs": [pixels]},
        {"model": "same", "layers": ["conv:grad_output"], "objective": {}, "inputs": [pixels]},
        {"resume": "block3", "layers": ["head"], "inputs": [tensor(np.zeros((64, 8, 8), np.float32))]},
        {"model": "structured", "layers": ["."], "inputs": [tensor(rows()[0])]},
        {"model": "centred", "layers": ["*"], "inputs": [tensor(rows()[0])]},
        {"layers": ["block9"], "inputs": [PICTURE]},
        {"layers": [f"block{number}" for number in range(9, 60)], "inputs": [PICTURE]},
        {"inputs": [5]},
    ):
        yield client.post("/extract", json=body)
        yield client.post("/extract", json=body, params={"dry_run": "true"})
    yield client.post("/compare", json={"layers": ["block?"], "inputs": [PICTURE, PICTURE]})
    yield client.post("/explain", json={"method": "grad_cam", "inputs": [PICTURE]})
    yield client.post("/explain", json={"model": "same", "method": "grad_cam", "inputs": [pixels]})
    yield client.post(
        "/sweep", json={"layers": ["head"], "op": "zero", "each": "channel", "top": 1, "inputs": [PICTURE]}
    )

"""Whatever a JSON body may say, a request whose body is one input says in its query."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from tests.server import Live
from tests.service.support import Json, image, npy, picture, problem, raw, tensor

PNG = picture(1)
ROW = np.random.default_rng(3).standard_normal((3, 32, 32)).astype(np.float32)
ZERO = {"layer": "block1", "op": "zero", "channels": [3, 7]}
RAW: dict[str, tuple[bytes, str, Json]] = {
    "picture": (PNG, "image/png", image(PNG)),
    "npy": (npy(ROW), "application/x-npy", tensor(ROW)),
    "safetensors": (safetensors.numpy.save({"image": ROW}), "application/x-safetensors", tensor(ROW)),
}
EXTRACT: dict[str, Json] = {
    "an intervention": {"layers": ["head"], "interventions": [ZERO, {"layer": "block2:input", "op": "scale", "by": 2}]},
    "layer objects": {"layers": [{"layer": "block2", "pool": "mean", "normalize": True, "as": "b2"}, "head"]},
    "statistics": {"layers": [{"layer": "block1", "stats": ["mean", "max"], "by": "channel"}]},
    "a selector with commas": {"layers": [{"layer": "block1", "channels": [5, 1]}, {"type": "Linear"}]},
    "an objective": {"layers": ["block3:grad_output"], "objective": {"kind": "layer", "layer": "block3", "channel": 2}},
    "a target": {"layers": [".:grad_input"], "objective": {"kind": "kl_div", "target": [0.1] * 10}},
    "several": {"layers": ["head", "head:grad_output"], "interventions": [ZERO], "objective": {"class": 3}},
    "a probe": {"layers": ["pool"], "probe": True},
    "all others": {
        "model": "digits",
        "layers": ["block2"],
        "pool": "mean",
        "normalize": True,
        "dtype": "float16",
        "encoding": "base64",
        "on_error": "skip",
        "isolated": True,
        "verify": True,
        "priority": "bulk",
    },
    "resumed": {"model": "digits", "layers": ["head"], "resume": "."},
}


def as_query(fields: Json) -> dict[str, str]:
    """Fields of a body as query parameters: objects and lists as JSON."""
    return {key: json.dumps(value) if not isinstance(value, str) else value for key, value in fields.items()}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("picture", name) for name in EXTRACT), ("npy", "several"), ("safetensors", "several")]
)
def test_extract(live: Live, kind: str, name: str) -> None:
    """What is said in a query gives what the same says in a JSON body, byte by byte; so do its refusals."""
    data, media_type, entry = RAW[kind]
    by_body = live.client.post("/extract", json=EXTRACT[name] | {"inputs": [entry]})
    by_query = live.client.post("/extract", **raw(data, media_type, **as_query(EXTRACT[name])))
    assert by_query.status_code == by_body.status_code == (422 if name == "resumed" else 200), by_query.text
    if name == "resumed":
        assert by_query.json()["detail"] == by_body.json()["detail"]
    else:
        assert by_query.content == by_body.content


def test_multipart(live: Live) -> None:
    """Parts without one named ``request`` have a query like any raw body."""
    fields = EXTRACT["several"]
    by_query = live.client.post("/extract", files=[("images", PNG)], params=as_query(fields))
    by_body = live.client.post("/extract", json=fields | {"inputs": [image(PNG)]})
    assert by_query.status_code == 200, by_query.text
    assert by_query.content == by_body.content


def test_sweep(live: Live) -> None:
    """A sweep's lists and objects, too."""
    fields = {
        "layers": ["block2"],
        "op": "scale",
        "values": [0.5, 2],
        "each": ["channel"],
        "objective": {"kind": "norm"},
    }
    by_body = live.client.post("/sweep", json=fields | {"inputs": [image(PNG)]})
    by_query = live.client.post("/sweep", **raw(PNG, "image/png", **as_query(fields)))
    listed = {"layers": "block2", "op": "scale", "values": "0.5,2", "each": "channel", "objective": "norm"}
    assert by_query.status_code == 200, by_query.text
    by_list = live.client.post("/sweep", **raw(PNG, "image/png", **listed))
    expected = _up_to_last_bits(by_body.json())
    assert by_query.json() == expected
    assert by_list.json() == expected


def _up_to_last_bits(reply: Json) -> Json:
    """A sweep's reply with a tolerance: measured times decide how many edits share a forward."""
    features = {
        name: feature | {"data": pytest.approx(np.array(feature["data"]), rel=1e-5)}
        for name, feature in reply["features"].items()
    }
    return reply | {"features": features}


@pytest.mark.parametrize("route", ["extract", "explain", "sweep", "optimise"])
def test_document(live: Live, route: str) -> None:
    """The document lists a query parameter for every field of a body but its inputs, and the server takes each."""
    document = live.client.get("/openapi.json").json()
    fields = set(document["components"]["schemas"][f"{route.title()}Body"]["properties"]) - {"inputs"}
    parameters = {
        each["name"] for each in document["paths"][f"/{route}"]["post"]["parameters"] if each["in"] == "query"
    }
    assert parameters == fields | {"class", "target", "format"} | ({"dry_run"} if route == "extract" else set())
    for name in fields:
        reply = live.client.post(f"/{route}", **raw(PNG, "image/png", **{name: "[]"}))
        assert "is not taken here" not in reply.text


OBJECTIVES: dict[str, tuple[Json, Json]] = {  # in a query, and in a body
    "kind": ({"objective": "probability"}, {"kind": "probability"}),
    "top": ({"objective": "logit", "class": "top"}, {"kind": "logit", "class": "top"}),
    "kind and target": (
        {"objective": "kl_div", "target": json.dumps([0.1] * 10)},
        {"kind": "kl_div", "target": [0.1] * 10},
    ),
    "object and class": ({"objective": '{"kind": "probability"}', "class": "5"}, {"kind": "probability", "class": 5}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective(live: Live, name: str) -> None:
    """An objective is an object, a kind, and a class or a target by themselves."""
    query, objective = OBJECTIVES[name]
    by_query = live.client.post("/extract", **raw(PNG, "image/png", layers="block3:grad_output", **query))
    body = {"layers": ["block3:grad_output"], "objective": objective, "inputs": [image(PNG)]}
    assert by_query.status_code == 200, by_query.text
    assert by_query.content == live.client.post("/extract", json=body).content


@pytest.mark.parametrize(
    "layers",
    [
        ["head,block2.conv1", '{"layer": "block3", "pool": "mean"}', "pool"],
        ['["head", "block2.conv1"]', '[{"layer": "block3", "pool": "mean"}, "pool"]'],
    ],
)
def test_repeated_layers(live: Live, layers: list[str]) -> None:
    """Names, objects and lists of both may stand in parameters of their own; keys come in that order."""
    reply = live.client.post("/extract", **raw(PNG, "image/png", layers=layers))
    assert list(reply.json()["features"]) == ["head", "block2.conv1", "block3", "pool"]


DEEP = "[" * 2000 + "]" * 2000
REFUSED: dict[str, tuple[int, Json, str, str]] = {  # status, query, pointer, what it says
    "a word": (422, {"interventions": "zero"}, "/interventions", '"op": "zero"'),
    "NaN": (400, {"interventions": '[{"layer": "block1", "op": "scale", "by": NaN}]'}, "", "not JSON"),
    "a deep target": (400, {"target": DEEP}, "", "not JSON"),
    "an unknown op": (422, {"interventions": '[{"layer": "block1", "op": "zap"}]'}, "/interventions/0/op", "zero"),
    "a number among layers": (422, {"layers": "[0]"}, "/layers/0", "object"),
    "twice": (422, {"interventions": ["[]", "[]"]}, "", "given 2 times"),
    "a class twice": (422, {"objective": '{"class": 3}', "class": "4"}, "/objective", "'class'"),
    "a fraction as a class": (422, {"layers": "pool:grad_output", "class": "3.5"}, "/objective/class", "'top'"),
    "very many interventions": (422, {"interventions": json.dumps([ZERO] * 257)}, "/interventions", "256"),
    "inputs": (422, {"inputs": "[]"}, "", "'inputs' is not taken here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(live: Live, name: str) -> None:
    """A parameter that makes no sense is refused as a body would be; a pointer begins with its name."""
    status, query, pointer, says = REFUSED[name]
    reply = live.client.post("/extract", **raw(PNG, "image/png", **{"layers": "block1"} | query))
    body = problem(reply, status)
    assert says in reply.text.replace('\\"', '"')
    assert (body["errors"] or [{}])[0].get("pointer", "") == pointer

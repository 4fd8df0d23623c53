"""How layers are named in a request and in its reply."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.server import Live
from tests.service.support import Json, arrays_of, image, picture, problem, rows, tensor

INPUTS = [image(picture(1))]
RELUS = [f"block{block}.relu#{call}" for block in (2, 3) for call in (0, 1)]
CONVOLUTIONS = [
    *("block1.0", "block2.conv1", "block2.conv2", "block2.downsample"),
    *("block3.conv1", "block3.conv2", "block3.downsample"),
]


def extract(live: Live, *layers: Any, **body: Any) -> Any:
    """A reply about a picture."""
    return live.client.post("/extract", json={"layers": layers, "inputs": INPUTS, "pool": "mean", **body})


@pytest.mark.parametrize(
    ("layers", "keys"),
    [
        (["pool"], ["pool"]),
        (["block2.relu#0", "block2.relu#1", "block2.relu#-1", "block2.relu"], None),
        (["pool#0", "pool#-1", "pool:output", "pool#0:output", "pool:input"], None),
        (["."], ["."]),
        ([".:input"], [".:input"]),
        (["block2.relu#*"], RELUS[:2]),
        (["block?.relu"], [RELUS[1], RELUS[3]]),
        (["*.relu#*"], RELUS),
        (["*.relu#0"], [RELUS[0], RELUS[2]]),
        (["block*.bn1"], ["block2.bn1", "block3.bn1"]),
        (["block*.bn1:input"], ["block2.bn1:input", "block3.bn1:input"]),
        (["*.relu#*:input"], [f"{name}:input" for name in RELUS]),
        ([{"type": "Conv2d"}], CONVOLUTIONS),
        ([{"layer": "block3.*", "type": "Conv2d"}], CONVOLUTIONS[-3:]),
        ([{"layer": "block2.relu", "call": "*"}], RELUS[:2]),
        ([{"layer": "block2.relu", "call": 0, "site": "input", "as": "x.y-z_1"}], ["x.y-z_1"]),
        ([{"layer": "block2.relu#0", "call": 0}], ["block2.relu#0"]),
        ([{"layer": "pool:input", "site": "input"}], ["pool:input"]),
    ],
)
def test_keys(live: Live, layers: list[Any], keys: list[str] | None) -> None:
    """A literal name keeps its spelling; globs, classes and ``#*`` give canonical names in execution order."""
    reply = extract(live, *layers)
    assert list(arrays_of(reply)) == (layers if keys is None else keys)
    assert list(reply.json()["receipts"]) == list(reply.json()["features"])


def test_everything(live: Live) -> None:
    """``*`` matches every layer once, but not the whole model."""
    listed = live.client.get("/models/digits/layers").json()["layers"]
    names = [layer["name"] + ("#1" if layer["calls"] == 2 else "") for layer in listed]
    assert list(arrays_of(extract(live, "*"))) == [name for name in names if name != "."]


@pytest.mark.parametrize(
    ("layers", "keys"),
    [
        (["pool", "pool"], ["pool"]),
        (["block*.bn1", "block2.*1"], ["block2.bn1", "block3.bn1", "block2.conv1"]),
        (["block*.bn1", "block3.bn1"], ["block2.bn1", "block3.bn1"]),
        (["block3.bn1", "block*.bn1"], ["block3.bn1", "block2.bn1"]),
        (["block2.relu#*", "block2.relu#0"], ["block2.relu#0", "block2.relu#1"]),
        ([{"layer": "pool", "as": "a"}, {"layer": "pool", "as": "b"}], ["a", "b"]),
        ([{"layer": "pool", "as": "a"}, {"layer": "pool", "as": "a"}], ["a"]),
        ([{"layer": "block?", "as": "a"}], ["a.block1", "a.block2", "a.block3"]),
        ([{"layer": "block2.relu#*", "as": "a"}], ["a#0", "a#1"]),
        ([{"type": "ReLU", "layer": "block2*", "as": "a"}], ["a"]),
        ([{"layer": "*.relu#*", "as": "a"}], [f"a.{name}" for name in RELUS]),
        ([{"layer": "*.relu:input", "as": "a"}], [f"a.{name}:input" for name in (RELUS[1], RELUS[3])]),
    ],
)
def test_once(live: Live, layers: list[Any], keys: list[str]) -> None:
    """What is asked for twice is given once, but under every name that it was given."""
    assert sorted(arrays_of(extract(live, *layers))) == sorted(keys)


def test_thousands_of_duplicates(live: Live) -> None:
    """Asking for one thing very often is asking for it once."""
    assert list(arrays_of(extract(live, *["pool", "head"] * 20_000))) == ["pool", "head"]


def test_calls_differ(live: Live) -> None:
    """Calls of one module are told apart, and a call's name always means the same one."""
    found = arrays_of(extract(live, "block2.relu#*", {"layer": "block2.relu#-1", "as": "last"}, "block2"))
    assert not np.array_equal(found["block2.relu#0"], found["block2.relu#1"])
    assert np.array_equal(found["block2.relu#1"], found["last"])
    assert np.array_equal(found["block2"], found["last"])


def test_paths(live: Live) -> None:
    """Leaves of a structured output are named by their path, or all of them without one."""
    inputs = tensor(rows()[0])
    replies = {
        layer: live.client.post("/extract", json={"model": "structured", "layers": [layer], "inputs": [inputs]})
        for layer in ("nested[pair][left]", "nested[pair]", "nested[card][more][1]", ".[list][0]")
    }
    assert {layer: list(arrays_of(reply)) for layer, reply in replies.items()} == {
        "nested[pair][left]": ["nested[pair][left]"],
        "nested[pair]": ["nested[pair][left]", "nested[pair][right]"],
        "nested[card][more][1]": ["nested[card][more][1]"],
        ".[list][0]": [".[list][0]"],
    }
    assert replies["nested[pair]"].json()["receipts"]["nested[pair][right]"]["path"] == "[pair][right]"
    split = {"model": "structured", "layers": [{"layer": "nested", "path": "[index]", "as": "i"}], "inputs": [inputs]}
    found = arrays_of(live.client.post("/extract", json=split))
    assert found["i"].dtype == np.int64


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ([{"layer": "block2.relu#0", "call": 1}], {}),
        ([{"layer": "pool:input", "site": "output"}], {}),
        ([{"layer": "pool:output", "site": "input"}], {}),
        ([{"layer": "pool[0]", "path": "[1]"}], {}),
        ([{"layer": "pool", "as": "x"}, {"layer": "head", "as": "x"}], {}),
        (["pool", {"layer": "head", "as": "pool"}], {}),
        ([{"layer": "pool", "pool": "max"}, {"layer": "pool", "pool": "mean"}], {}),
        ([{"layer": "pool", "pool": "none", "normalize": True}], {}),
        (["pool"], {"pool": "none", "normalize": True}),
        (["pool"], {"pool": "cls"}),
        ([{"layer": "pool", "tokens": [0]}], {}),
        ([{"layer": "pool", "channels": [64]}], {}),
        ([{"layer": "pool", "channels": []}], {}),
        ([{"pool": "mean"}], {}),
        ([{}], {}),
    ],
)
def test_contradictions(live: Live, layers: list[Any], options: Json) -> None:
    """Options that contradict each other, or the layer, are refused and say why."""
    problem(extract(live, *layers, **options), 422)


@pytest.mark.parametrize(
    "entry", [{"type": "Conv2d"}, {"layer": "block?"}, {"layer": "block2.relu#*"}, {"layer": "pool"}]
)
def test_two_reductions(live: Live, entry: Json) -> None:
    """The same layers reduced in two ways need two names; what the hint says to type makes them."""
    both = [{**entry, "pool": "mean"}, {**entry, "pool": "max"}]
    hint = problem(extract(live, *both), 422)["errors"][0]["hint"]
    typed = json.loads("{" + re.findall(r'"as": "\w+"', hint)[0] + "}")
    for named in ([both[0], {**both[1], **typed}], [{**both[0], **typed}, both[1]]):
        found = arrays_of(extract(live, *named))
        assert found.keys() >= arrays_of(extract(live, entry)).keys()
        means, highest = (arrays_of(extract(live, each)) for each in both)
        assert len(found) == len(means) + len(highest)
        values = sorted(array.tobytes() for array in (*means.values(), *highest.values()))
        assert sorted(array.tobytes() for array in found.values()) == values


@pytest.mark.parametrize(
    ("layer", "hint"),
    [
        ("bloc1", "block1"),
        ("Head", "head"),
        ("block2.conv3", "block2.conv1"),
        ("pool#1", "#0"),
        ("block2.relu#2", "#0 to #1"),
        ("pool[0]", "leave the path out"),
        ("pool:grad_output", '"objective"'),
        ("pool:attention", "no layer of this model does"),
        ("pool:outptu", "'attention_sink' or 'attention_grad'"),
        ("block2.relu#x", "#0"),
        ("pool[0", "[0]"),
        ("zzz*", "/layers"),
        ("#0", "layer4"),
    ],
)
def test_hints(live: Live, layer: str, hint: str) -> None:
    """A name that does not fit is answered with what to type instead, and with where it stands."""
    body = problem(extract(live, "pool", layer), 422)
    assert body["errors"][0]["pointer"] == "/layers/1"
    assert hint in body["errors"][0]["hint"]


def test_every_bad_name_is_told(live: Live) -> None:
    """Bad names are told at once, as many as fit; of very many the first sixteen."""
    body = problem(extract(live, "pool", "bad1", "head", "bad2"), 422)
    assert [fault["pointer"] for fault in body["errors"]] == ["/layers/1", "/layers/3"]
    assert "more_errors" not in body
    body = problem(extract(live, *(f"bad{number}" for number in range(100))), 422)
    assert len(body["errors"]) + body["more_errors"] == 16


def test_pointer_after_duplicates(live: Live) -> None:
    """A pointer counts entries as they were sent, duplicates included."""
    body = problem(extract(live, "pool", "pool", "head", "pool", "nowhere", "nowhere"), 422)
    assert body["errors"][0]["pointer"] == "/layers/4"


def test_near_models(live: Live) -> None:
    """A model's name that is nearly right is answered with the right one."""
    assert "'digits'" in problem(extract(live, "pool", model="digit"), 404)["errors"][0]["hint"]
    assert "GET /models" in problem(extract(live, "pool", model="zzz"), 404)["errors"][0]["hint"]

"""How layers are named in a request and in its reply."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server import Live
from tests.service.support import Json, arrays_of, image, picture, problem

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
        (["block2.relu#0", "block2.relu#1", "block2.relu#-1", "block2.relu"], None),
        (["."], ["."]),
        (["block?.relu"], [RELUS[1], RELUS[3]]),
        (["*.relu#*"], RELUS),
        (["block*.bn1"], ["block2.bn1", "block3.bn1"]),
        ([{"type": "Conv2d"}], CONVOLUTIONS),
        ([{"layer": "block3.*", "type": "Conv2d"}], CONVOLUTIONS[-3:]),
        ([{"leaf": True, "type": "Conv2d"}], CONVOLUTIONS),
        (
            [{"layer": "bl*1", "leaf": True}],
            [f"block{each}" for each in ("1.1", "2.conv1", "2.bn1", "3.conv1", "3.bn1")],
        ),
        ([{"layer": "block2.relu", "call": 0, "site": "input", "as": "x.y-z_1"}], ["x.y-z_1"]),
        (["pool", "pool"], ["pool"]),
        (["block2.relu#*", "block2.relu#0"], ["block2.relu#0", "block2.relu#1"]),
        ([{"layer": "pool", "as": "a"}, {"layer": "pool", "as": "b"}], ["a", "b"]),
        ([{"layer": "block?", "as": "a"}], ["a.block1", "a.block2", "a.block3"]),
    ],
)
def test_keys(live: Live, layers: list[Any], keys: list[str] | None) -> None:
    """A literal name keeps its spelling; globs, classes and ``#*`` give canonical names in execution order.

    What is asked for twice is given once, but under every name that it was given.
    """
    reply = extract(live, *layers)
    assert list(arrays_of(reply)) == (layers if keys is None else keys)
    assert list(reply.json()["receipts"]) == list(reply.json()["features"])


@pytest.mark.parametrize("entry", [{"layer": "block2.relu#*"}, {"layer": "pool"}])
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


def test_every_bad_name_is_told(live: Live) -> None:
    """Bad names are told at once, as many as fit; of very many the first sixteen."""
    body = problem(extract(live, "pool", "bad1", "head", "bad2"), 422)
    assert [fault["pointer"] for fault in body["errors"]] == ["/layers/1", "/layers/3"]
    assert "more_errors" not in body
    body = problem(extract(live, *(f"bad{number}" for number in range(100))), 422)
    assert len(body["errors"]) + body["more_errors"] == 16

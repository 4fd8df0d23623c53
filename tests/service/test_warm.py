"""Warm plans over HTTP: who asks for their layers is answered by a graph, everybody else by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.digits import spec as digits
from models.loaded import load
from models.spec import WarmSpec
from models.warm.ready import made_ready
from service.config import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, image, picture, raw, same

INPUTS = [image(picture(seed)) for seed in range(3)]
WARM = WarmSpec(("block2", "block3"), pool="mean", compile=True)


@pytest.fixture(scope="module")
def warm(serve: Serve, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that finds its graphs on disk, as on every start but the first."""
    spec = replace(digits(), warm=(WARM, WarmSpec(("head",))))
    place = tmp_path_factory.mktemp("cache")
    made_ready(load(spec, 1, 1), place / "plans")
    with serve(Configuration((spec,), "digits"), cache_dir=place) as live:
        yield live


def extract(live: Live, *layers: str, **body: Any) -> Any:
    return live.client.post("/extract", json={"layers": list(layers), "inputs": INPUTS, "pool": "mean", **body})


def forwards(reply: Any) -> set[str]:
    return {receipt.get("forward", "hooks") for receipt in reply.json()["receipts"].values()}


def close(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5)


def test_answers(warm: Live, live: Live) -> None:
    """The numbers and fingerprints of a server without warm plans; the receipt tells which path it was."""
    for layers in (["block2", "block3"], ["block3"]):
        for inputs in (INPUTS, INPUTS[:1]):
            ours, plain = (extract(each, *layers, inputs=inputs) for each in (warm, live))
            assert (forwards(ours), forwards(plain)) == ({"compiled"}, {"hooks"})
            close(arrays_of(ours), arrays_of(plain))
            assert ours.json()["fingerprint"] == plain.json()["fingerprint"]


@pytest.mark.parametrize(
    "body",
    [
        {"layers": ["block1"]},
        {"pool": "none"},
        {"normalize": True},
        {"verify": True},
        {"interventions": [{"layer": "block1", "op": "scale", "by": 2.0}]},
        {"layers": ["block2:grad_output"], "objective": {"kind": "logit", "class": 1}, "pool": "none"},
        {"layers": ["head"], "pool": "none"},
    ],
    ids=str,
)
def test_everything_else_runs_with_hooks(warm: Live, live: Live, body: Json) -> None:
    """What the graph does not give is answered as on any other server."""
    asked: Json = {"layers": ["block2"], **body}
    ours, plain = (extract(each, *asked["layers"], **{**body, "isolated": True}) for each in (warm, live))
    assert forwards(ours) == {"hooks"}
    assert same(arrays_of(ours), arrays_of(plain))


def test_same_bits(warm: Live) -> None:
    """A request has the same bits each time, alone or beside others that want other layers."""
    one = extract(warm, "block2", isolated=True)
    with ThreadPoolExecutor(12) as pool:
        asked = [("block2",), ("block3",), ("block2", "block3"), ("block1",)] * 10
        replies = list(pool.map(lambda layers: extract(warm, *layers, isolated=True), asked))
    wanted = arrays_of(one)["block2"]
    found = [arrays_of(reply)["block2"] for layers, reply in zip(asked, replies, strict=True) if "block2" in layers]
    assert len(found) == 20
    assert all(np.array_equal(each, wanted) for each in found)


def test_in_company(warm: Live, live: Live) -> None:
    """Rows of many requests share graphs and forwards; each gets its own."""
    bodies = [
        raw(picture(seed), "image/png", layers=layers, pool="mean", format="npz")
        for seed in range(8)
        for layers in ("block2", "block3", "block2,block3", "block1,block2")
    ]
    wanted = [arrays_of(live.client.post("/extract", **body)) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda body: warm.client.post("/extract", **body), bodies))
    for reply, expected in zip(replies, wanted, strict=True):
        close(arrays_of(reply), expected)
    assert warm.client.get("/models/digits").json()["hooks"] == 0


def test_dry_run(warm: Live) -> None:
    """Says what is to come as ever."""
    told = warm.client.post("/extract?dry_run=true", json={"layers": ["block2"], "pool": "mean"}).json()
    assert told["features"]["block2"]["shape"] == [1, 32]

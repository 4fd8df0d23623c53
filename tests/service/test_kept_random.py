"""Random requests to a server that keeps answers and to one that keeps none: no client can tell them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server import Live
from tests.service.conftest import NETS, Serve
from tests.service.gated_server import wait_until
from tests.service.support import Json, configured, image, net, npy, picture, raw, tensor

PICTURES = [picture(seed) for seed in range(4)]
FORMATS = ("json", "npy", "npz", "safetensors")
POOLS = ("none", "mean", "max", "gem", "flatten", "cls")
OF_PICTURES = ("block1", "block2", "block?", "block2.relu#*", "block3.conv1:input", "head", ".", "nowhere")
OF_ROWS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {  # a row's shape and layers of other models
    "encoder": ((5, 8), ("*", ".", ".:input", "missing")),
    "structured": ((4,), ("*", ".", "*:input")),
    "centred": ((4,), ("*", ".")),
    "gated": ((4,), ("linear", "linear:input", "linear:grad_output")),
}
CHANGES: tuple[Json, ...] = (
    {"layer": "block1", "op": "zero"},
    {"layer": "block1", "op": "scale", "by": 0.5},
    {"layer": "block1", "op": "scale", "by": -0.5},
    {"layer": "block2", "op": "zero", "channels": [0, 3]},
    {"layer": "block2", "op": "noise", "std": 0.1, "seed": 1},
    {"layer": "block2", "op": "noise", "std": 0.1, "seed": 2},
)
OBJECTIVES: tuple[Json, ...] = ({"class": 1}, {"class": 2}, {"class": "top"}, {"kind": "probability", "class": 1})
# What a request may ask for besides: each is left out more often than not.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "pool": POOLS,
    "dtype": ("float32", "float16", "int8"),
    "normalize": (True, False),
    "encoding": ("list", "base64"),
    "verify": (True, False),
    "isolated": (True, False),
    "probe": (True, False),
    "on_error": ("skip", "fail"),
    "priority": ("interactive", "bulk"),
}
METHODS = ("grad_cam", "saliency", "attention_rollout")
SERVED = configured(net("gated", "Gated"), *NETS)
SETTINGS = {"max_loaded_models": 20, "max_batch_rows": 1}
STATISTICS = (["mean"], ["std"], ["min", "max"], ["max", "min"], ["histogram", "nonfinite"], True)


def draw_layer(random: Random, names: tuple[str, ...]) -> Any:
    """A layer by its name, in part, or its statistics."""
    name = random.choice(names)
    draw: Json = {"layer": name}
    match random.randrange(6):
        case 0:
            return draw | {"stats": random.choice(STATISTICS)}
        case 1:
            return draw | {"stats": random.choice(STATISTICS), "by": "channel"}
        case 2:
            return draw | {"pool": random.choice(POOLS), "as": random.choice("ab")}
        case 3:
            return draw | {"channels": random.choice(([0, 1], [1, 0], [-1]))}
        case _:
            return name


def draw_body(random: Random) -> Json:
    """What a request for layers of any model asks for; not all of it can be had."""
    fields = {name: random.choice(values) for name, values in OPTIONS.items() if random.random() < 0.15}
    if random.random() < 0.6:
        inputs: list[Json] = [image(random.choice(PICTURES)) for _ in range(random.randint(1, 3))]
        if random.random() < 0.2:
            inputs.append(image(b"broken"))
        if random.random() < 0.2:
            fields["interventions"] = random.sample(CHANGES, random.randint(1, 2))
        elif random.random() < 0.2:
            fields["objective"] = random.choice(OBJECTIVES)
            fields["layers"] = [random.choice(("block2:grad_output", "block1:grad_output", ".:grad_input"))]
            return fields | {"inputs": inputs}
        names = OF_PICTURES
    else:
        fields["model"] = random.choice(list(OF_ROWS))
        shape, names = OF_ROWS[fields["model"]]
        rows = np.random.default_rng(random.randrange(3)).standard_normal((random.randint(1, 3), *shape))
        inputs = [tensor(row) for row in rows.astype(np.float32)]
    if random.random() < 0.9:
        fields["layers"] = [draw_layer(random, names) for _ in range(random.randint(1, 2))]
    return fields | {"inputs": inputs}


def draw_explanation(random: Random) -> Json:
    """What a request for a map asks for."""
    method = random.choice(METHODS)
    layer = {"layer": random.choice(("block1", "block2", "head"))} if random.random() < 0.5 else {}
    objective = {"objective": random.choice(OBJECTIVES)} if random.random() < 0.5 else {}
    inputs = [image(random.choice(PICTURES)) for _ in range(random.randint(1, 2))]
    return {"method": method, "inputs": inputs, **layer, **objective}


def draw_request(random: Random) -> Json:
    """The arguments of a request in one of the forms that it may be sent in."""
    form = random.choice(FORMATS)
    match random.randrange(8):
        case 0 | 1:
            return {"url": "/explain", "json": draw_explanation(random), "params": {"format": form}}
        case 2:
            query = {"layers": random.choice(("block1,head", "head,block1", "block?")), "pool": random.choice(POOLS)}
            return {"url": "/extract", **raw(random.choice(PICTURES), "image/png", format=form, **query)}
        case 3:
            rows = np.random.default_rng(random.randrange(2)).standard_normal((random.randint(1, 3), 4))
            query = {"layers": "linear", "model": "gated", "format": form}
            return {"url": "/extract", **raw(npy(rows.astype(np.float32)), "application/x-npy", **query)}
        case 4:
            files = [("images", (f"{number}.png", data)) for number, data in enumerate(random.sample(PICTURES, 2))]
            request = json.dumps({"layers": [draw_layer(random, OF_PICTURES)]})
            return {"url": "/extract", "files": files, "data": {"request": request}, "params": {"format": form}}
        case _:
            return {"url": "/extract", "json": draw_body(random), "params": {"format": form}}


def change_request(random: Random, request: Json) -> Json:
    """Another request that differs in one thing that it asks for."""
    body: Json = request["json"]
    choices = {"interventions": [[each] for each in CHANGES], "objective": OBJECTIVES, **OPTIONS}
    name = next(
        (name for name in ("interventions", "objective", "method") if name in body), random.choice(list(OPTIONS))
    )
    others = [value for value in choices.get(name, METHODS) if value != body.get(name)]
    return request | {"json": body | {name: random.choice(others)}}


def draw_requests(random: Random, count: int) -> list[Json]:
    """So many requests; many of them are alike but for one thing."""
    requests: list[Json] = []
    while len(requests) < count:
        requests.append(draw_request(random))
        while "json" in requests[-1] and random.random() < 0.6:
            requests.append(change_request(random, requests[-1]))
    return requests


def read_reply(reply: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    """All of a reply that is to be the same each time."""
    kept = {name: value for name, value in reply.headers.items() if name.startswith(("x-layertap", "content-type"))}
    if reply.status_code == 200:
        return 200, reply.content, kept
    error = reply.json() | {"request_id": ""}
    return reply.status_code, json.dumps(error).encode(), kept


@pytest.fixture(scope="module")
def plain(serve: Serve) -> Iterator[Live]:
    """A server that keeps nothing. A forward has one row: bits depend on nobody beside it, not even on how many."""
    with serve(SERVED, **SETTINGS) as live:
        yield live


@pytest.fixture(scope="module", params=[2**18, 2**26], ids=["little room", "room for all"])
def keeping(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Live]:
    """The same server, but that it keeps answers."""
    with serve(SERVED, **SETTINGS, cache_bytes=request.param) as live:
        yield live


@pytest.mark.parametrize("seed", range(2))
def test_as_without_a_cache(keeping: Live, plain: Live, seed: int) -> None:
    """Each request has the same reply, bit for bit and headers and errors too, however often and between which others.

    What is sent again sooner than room runs out is a hit.
    """
    random = Random(seed)
    requests = draw_requests(random, 80)
    expected = [read_reply(plain.client.post(**request)) for request in requests]
    assert sum(status == 200 for status, _, _ in expected) > 25
    assert len({content for _, content, _ in expected}) > 25
    order = [number for number in range(len(requests)) for _ in range(3)]
    random.shuffle(order)
    results: list[str] = []
    for number in order:
        for _ in range(random.randint(1, 2)):
            reply = keeping.client.post(**requests[number])
            assert read_reply(reply) == expected[number], requests[number]
            results.append(reply.headers["server-timing"].partition('cache;desc="')[2].rstrip('"'))
        assert keeping.engine.answers.used_bytes <= keeping.engine.answers.max_bytes
    assert results.count("hit") > 25
    assert results.count("miss") > 25


def test_many_at_once(keeping: Live, plain: Live) -> None:
    """So it is with many clients at once, some of whom wait for what others have asked."""
    random = Random(7)
    requests = draw_requests(random, 40)
    expected = [read_reply(plain.client.post(**request)) for request in requests]
    order = [number for number in range(len(requests)) for _ in range(6)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda number: keeping.client.post(**requests[number]), order))
    for number, reply in zip(order, replies, strict=True):
        assert read_reply(reply) == expected[number], requests[number]
    wait_until(lambda: keeping.engine.admission.used_bytes == 0)
    assert keeping.engine.answers.used_bytes <= keeping.engine.answers.max_bytes

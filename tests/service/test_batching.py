"""Requests that share forwards, over HTTP: who is with whom, that each gets its own, and what the figures say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import gated_module
from tests.service.nets_batch import Stages
from tests.service.queue_harness import (
    HELD_COUNTS,
    HELD_ROWS,
    MetricsDelta,
    batch_counts,
    extract_request,
    gauges,
    hold_queue,
    hook_outputs,
    post,
    random_rows,
    row_counts,
    serving_nets,
    wait_idle,
)
from tests.service.support import Array, Json, arrays_of, problem

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "int8": 1e-5}
AXES = {"linear": "NC", "conv": "NCHW", "act": "NCHW", "norm": "TNC", "tail": "NC", ".": "NC"}
POOLED: dict[str, Callable[[Array, str], Array]] = {
    "none": lambda value, axes: value,
    "mean": lambda value, axes: _positions(value, axes).mean(2),
    "max": lambda value, axes: _positions(value, axes).max(2),
    "gem": lambda value, axes: (np.maximum(_positions(value, axes), 1e-6) ** 3).mean(2) ** (1 / 3),
    "flatten": lambda value, axes: np.moveaxis(value, axes.index("N"), 0).reshape(value.shape[axes.index("N")], -1),
}
# Rows, layers, and options of requests that all wait at once.
CROWD: tuple[tuple[int, str, Json], ...] = (
    (2, "linear", {}),
    (1, "conv", {"pool": "mean", "format": "npz"}),
    (3, "conv,act", {"pool": "max", "dtype": "float16", "format": "safetensors"}),
    (2, "norm,table", {"encoding": "base64"}),
    (1, "tail,.", {"dtype": "int8", "format": "npz"}),
    (2, "norm", {"pool": "flatten", "dtype": "int8"}),
    (1, "act", {"pool": "gem", "format": "npy"}),
    (1, "norm", {"pool": "mean"}),
)


def _positions(value: Array, axes: str) -> Array:
    """(N, C, all others)."""
    moved = np.moveaxis(value, (axes.index("N"), axes.index("C")), (0, 1))
    found: Array = moved.reshape(*moved.shape[:2], -1)
    return found


@pytest.fixture(scope="module")
def crowded(serve: Serve) -> Iterator[Live]:
    """A server of models that can be held up."""
    with serving_nets(serve, "tower", "stages") as live:
        yield live


def own(live: Live, batch: Array, layers: str, pool: str = "none", name: str = "tower") -> dict[str, Array]:
    """What a request gets that ran alone, by hooks offline."""
    seen = hook_outputs(live, name, batch)
    found = {layer: seen[layer, 0, (), "output"] for layer in layers.split(",")}
    return {layer: POOLED[pool](value, AXES.get(layer, "")) for layer, value in found.items()}


def check(reply: httpx.Response, wanted: dict[str, Array], dtype: str = "float32") -> None:
    """A reply has what is wanted, under the same names, within its dtype's rounding."""
    found = arrays_of(reply)
    if list(found) == [""]:  # a .npy file has no names
        found = dict(zip(wanted, found.values(), strict=True))
    scales = {key: found.pop(f"{key}.scale") for key in wanted if dtype == "int8"}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype.name == dtype
        assert found[key].shape == value.shape
        limit: Any = TOLERANCE[dtype] * max(float(np.abs(value).max()), 1.0)
        got = found[key].astype(np.float64)
        if dtype == "int8":
            scale = scales[key].reshape(-1, *[1] * (value.ndim - 1))
            got, limit = got * scale, limit + scale * 0.51
        assert (np.abs(got - value) <= limit).all(), key


def test_different_wishes_share_a_forward(crowded: Live) -> None:
    """Whatever layers, pools, dtypes and formats are asked for, one forward serves all that wait."""
    total, ledger = sum(count for count, _, _ in CROWD), MetricsDelta(crowded, "tower")
    with hold_queue(crowded, "tower") as pile:
        replies = [
            pile.enqueue(extract_request(random_rows(count, seed), "tower", layers, **query), count)
            for seed, (count, layers, query) in enumerate(CROWD)
        ]
        now = gauges(crowded)
        assert (now["queue_rows"], now["running_rows"]) == (total, HELD_ROWS)
        assert now["queue_bytes"] > 0
    assert pile.module.forwards == [total]
    for seed, ((count, layers, query), reply) in enumerate(zip(CROWD, replies, strict=True)):
        wanted = own(crowded, random_rows(count, seed), layers, query.get("pool", "none"))
        check(reply.result(), wanted, query.get("dtype", "float32"))
    ledger.check(HELD_COUNTS, batch_counts("sharing_pays", total, len(CROWD)), row_counts(total))
    wait_idle(crowded)


def test_timings(crowded: Live) -> None:
    """Server-Timing tells each step's time, how full the forward was and how deep it went."""
    with hold_queue(crowded, "stages") as pile:
        early, late = (pile.enqueue(extract_request(random_rows(2), "stages", layer), 2) for layer in ("early", "late"))
    for reply in (early.result(), late.result()):
        steps = dict(re.findall(r"(\w+);dur=([\d.]+)", reply.headers["server-timing"]))
        assert {"parse", "decode", "queue", "forward", "copy", "encode", "total"} == steps.keys()
        notes = dict(re.findall(r'(\w+);desc="([^"]*)"', reply.headers["server-timing"]))
        assert notes["fill"] == "4/32"
        assert notes.keys() == {"fill", "depth"}
        assert 0 < float(notes["depth"]) <= 1
        # The held forward ended before this one began, which no clock can show otherwise.
        assert 0 < float(steps["forward"]) < float(steps["total"])
        assert 0 < float(steps["queue"]) < float(steps["total"])


def stages(live: Live) -> Stages:
    """The module that notes which of its parts ran, as if it never had."""
    module = gated_module(live, "stages")
    assert isinstance(module, Stages)
    module.ran.clear()
    return module


@pytest.mark.parametrize("wanted", [("early",), ("middle", "early", "early"), ("late", "early")])
def test_the_deepest_decides_where_it_stops(crowded: Live, wanted: tuple[str, ...]) -> None:
    """A forward goes as far as the deepest layer that any of its requests wants, and no further."""
    module, order = stages(crowded), ("early", "middle", "late")
    with hold_queue(crowded, "stages") as pile:
        replies = [
            pile.enqueue(extract_request(random_rows(2, seed), "stages", layer), 2) for seed, layer in enumerate(wanted)
        ]
    deepest = max(order.index(layer) for layer in wanted)
    assert module.ran == [(layer, 2 * len(wanted)) for layer in order[: deepest + 1]]
    for seed, (layer, reply) in enumerate(zip(wanted, replies, strict=True)):
        check(reply.result(), own(crowded, random_rows(2, seed), layer, name="stages"))


@pytest.fixture(scope="module")
def narrow(serve: Serve) -> Iterator[Live]:
    """A server whose forwards have few rows."""
    with serving_nets(serve, "tower", max_batch_rows=4) as live:
        yield live


@pytest.mark.parametrize(
    ("form", "layers", "query"),
    [
        ("json", "linear,norm,table", {}),
        ("npz", "conv,norm", {"pool": "mean", "dtype": "int8"}),
        ("safetensors", "linear,table", {"dtype": "int8"}),
        ("npz", "norm,tail", {"pool": "flatten", "dtype": "float16"}),
    ],
)
def test_large_request(narrow: Live, form: str, layers: str, query: Json) -> None:
    """A request of many rows comes back in one piece, rows in order on their axis, what has none once."""
    module, ledger = gated_module(narrow, "tower"), MetricsDelta(narrow, "tower")
    module.forwards.clear()
    reply = post(narrow, extract_request(random_rows(10), "tower", layers, format=form, **query))
    assert module.forwards == [4, 4, 2]
    check(reply, own(narrow, random_rows(10), layers, query.get("pool", "none")), query.get("dtype", "float32"))
    ledger.check(batch_counts("single", 10, 3, times=3), row_counts(10))


def test_large_request_in_company(narrow: Live) -> None:
    """Each forward is filled up with whoever is next, and nobody's rows come to another."""
    ledger, counts = MetricsDelta(narrow, "tower"), (3, 10, 2)
    with hold_queue(narrow, "tower") as pile:
        replies = [
            pile.enqueue(extract_request(random_rows(count, seed), "tower", "conv,norm"), count)
            for seed, count in enumerate(counts)
        ]
    assert pile.module.forwards == [4, 4, 4, 3]
    for seed, (count, reply) in enumerate(zip(counts, replies, strict=True)):
        check(reply.result(), own(narrow, random_rows(count, seed), "conv,norm"))
    shared, alone = batch_counts("same_depth", 4 + 3, 2 + 2, times=2), batch_counts("single", 4 + 4, 2, times=2)
    ledger.check(HELD_COUNTS, shared, alone, row_counts(15))


def test_layers_that_mix_rows(narrow: Live) -> None:
    """What is computed of all rows is that of its request's own rows; one of more than a forward's is refused."""
    ledger = MetricsDelta(narrow, "tower")
    with hold_queue(narrow, "tower") as pile:
        others = [pile.enqueue(extract_request(random_rows(1, 7), "tower", "tail"), 1)]
        mean = pile.enqueue(extract_request(random_rows(3), "tower", "mean"), 3)
        others.append(pile.enqueue(extract_request(random_rows(1, 8), "tower", "tail"), 1))
    assert pile.module.forwards == [2, 3]
    check(mean.result(), own(narrow, random_rows(3), "mean"))
    for seed, reply in zip((7, 8), others, strict=True):
        check(reply.result(), own(narrow, random_rows(1, seed), "tail"))
    assert "4" in problem(post(narrow, extract_request(random_rows(5), "tower", "mean")), 422)["detail"]
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 2, 2), batch_counts("isolated", 3, 1), row_counts(5))


def under_load(live: Live, requests: list[Json], others: list[Json], times: int = 6) -> list[list[httpx.Response]]:
    """The replies while others keep the models busy: for each request all that came."""
    stop = Event()

    def busy(request: Json) -> None:
        while not stop.is_set():
            assert post(live, request).status_code == 200

    with ThreadPoolExecutor(len(others) + len(requests)) as pool:
        load = [pool.submit(busy, other) for other in others]
        try:
            found = [pool.submit(lambda each=each: [post(live, each) for _ in range(times)]) for each in requests]
            return [each.result() for each in found]
        finally:
            stop.set()
            assert [each.result() for each in load] == [None] * len(load)


def test_isolated(crowded: Live) -> None:
    """An isolated request shares with nobody, isolated or not, and gets the same bytes whatever else goes on."""
    ledger, layers = MetricsDelta(crowded, "tower"), "conv,act,norm,tail"
    lone = [extract_request(random_rows(count, 9), "tower", layers, pool="mean", isolated="true") for count in (2, 1)]
    plain = [extract_request(random_rows(count, 5), "tower", "tail") for count in (1, 3)]
    quiet = [post(crowded, request).content for request in lone]
    with hold_queue(crowded, "tower") as pile:
        replies = [
            pile.enqueue(lone[0], 2),
            pile.enqueue(plain[0], 1),
            pile.enqueue(lone[1], 1),
            pile.enqueue(plain[1], 3),
        ]
    assert pile.module.forwards == [2, 4, 1]
    assert [replies[0].result().content, replies[2].result().content] == quiet
    runs = [batch_counts("isolated", 6, 4, times=4), batch_counts("same_depth", 4, 2)]
    ledger.check(HELD_COUNTS, *runs, row_counts(3 + 3 + 4))
    others = [extract_request(random_rows(count, count), "tower", "conv", pool="gem") for count in (1, 2, 3, 5)]
    for expected, found in zip(quiet, under_load(crowded, lone, others), strict=True):
        assert {reply.content for reply in found} == {expected}


def test_priority(crowded: Live) -> None:
    """Interactive requests run before bulk ones that came earlier, and share nothing with them."""
    ledger, kinds = MetricsDelta(crowded, "tower"), ("bulk", "interactive", "bulk", None)
    with hold_queue(crowded, "tower") as pile:
        replies = []
        for count, kind in enumerate(kinds, 1):
            query = {} if kind is None else {"priority": kind}
            replies.append(pile.enqueue(extract_request(random_rows(count, count), "tower", "tail", **query), count))
    assert pile.module.forwards == [2 + 4, 1 + 3]
    for count, reply in enumerate(replies, 1):
        check(reply.result(), own(crowded, random_rows(count, count), "tail"))
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 10, 4, times=2), row_counts(10))
    urgent = post(crowded, extract_request(random_rows(1), "tower", "tail", priority="urgent"))
    assert "bulk" in str(problem(urgent, 422)["errors"])


@pytest.fixture(scope="module")
def fixed(serve: Serve) -> Iterator[Live]:
    """A server whose forwards all have eight rows."""
    with serving_nets(serve, "tower", fixed_batch_rows=8) as live:
        yield live


FIXED: tuple[tuple[int, str, Json], ...] = (
    (3, "conv,act,norm", {"pool": "mean", "normalize": "true"}),
    (1, "conv,norm", {"pool": "gem"}),
    (5, "conv,norm,table", {}),
    (8, "act,norm", {"pool": "mean"}),
    (11, "conv,norm", {"pool": "mean", "dtype": "int8"}),
    (2, "act,tail", {"pool": "flatten", "normalize": "true"}),
)


def test_fixed_rows(fixed: Live) -> None:
    """Every forward has as many rows as are set, and a request gets the same bytes in any company."""
    module = gated_module(fixed, "tower")
    module.forwards.clear()
    requests = [
        extract_request(random_rows(count, seed), "tower", layers, **query)
        for seed, (count, layers, query) in enumerate(FIXED)
    ]
    quiet = [post(fixed, request) for request in requests]
    for seed, ((count, layers, query), reply) in enumerate(zip(FIXED, quiet, strict=True)):
        if "normalize" not in query:
            wanted = own(fixed, random_rows(count, seed), layers, query.get("pool", "none"))
            check(reply, wanted, query.get("dtype", "float32"))
    for ahead in range(8):  # each request begins at every place of a forward once
        with hold_queue(fixed, "tower") as pile:
            replies = [pile.enqueue(extract_request(random_rows(ahead), "tower", "tail"), ahead)] if ahead else []
            replies += [pile.enqueue(request, count) for (count, _, _), request in zip(FIXED, requests, strict=True)]
        for expected, reply in zip(quiet, replies[-len(FIXED) :], strict=True):
            assert reply.result().content == expected.content
        assert len(pile.module.forwards) < len(FIXED)
    others = [extract_request(random_rows(count, 50 + count), "tower", "tail") for count in (1, 3, 6)]
    for expected, contents in zip(quiet, under_load(fixed, requests, others, times=3), strict=True):
        assert {reply.content for reply in contents} == {expected.content}
    assert set(module.forwards) == {8}

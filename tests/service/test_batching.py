"""Requests that share forwards, over HTTP: who is with whom, that each gets its own, and what the figures say."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from tests.server import Live
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
    post,
    queue_server_of,
    random_rows,
    right,
    row_counts,
    wait_idle,
)
from tests.service.support import Json, arrays_of, problem

crowded = queue_server_of("tower", "stages")
narrow = queue_server_of("tower", max_batch_rows=4)
fixed = queue_server_of("tower", fixed_batch_rows=8)
# Rows, layers, and options of requests that all wait at once.
CROWD: tuple[tuple[int, str, Json], ...] = (
    (2, "linear", {}),
    (3, "conv,act", {"pool": "max", "dtype": "float16", "format": "safetensors"}),
    (2, "norm,table", {"encoding": "base64"}),
    (1, "tail,.", {"dtype": "int8", "format": "npz"}),
    (1, "act", {"pool": "gem", "format": "npy"}),
    (1, "norm", {"pool": "mean"}),
)


def test_different_wishes_share_a_forward(crowded: Live) -> None:
    """Whatever layers, pools, dtypes and formats are asked for, one forward serves all that wait."""
    requests = [
        (extract_request(random_rows(count, seed), "tower", layers, **query), count)
        for seed, (count, layers, query) in enumerate(CROWD)
    ]
    alone = [post(crowded, request) for request, _ in requests]
    total, ledger = sum(count for count, _, _ in CROWD), MetricsDelta(crowded, "tower")
    with hold_queue(crowded, "tower") as pile:
        replies = [pile.enqueue(*each) for each in requests]
        now = gauges(crowded)
        assert (now["queue_rows"], now["running_rows"]) == (total, HELD_ROWS)
        assert now["queue_bytes"] > 0
    assert pile.module.forwards == [total]
    for reply, other in zip(replies, alone, strict=True):
        check(reply.result(), other)
    ledger.check(HELD_COUNTS, batch_counts("sharing_pays", total, len(CROWD)), row_counts(total))
    wait_idle(crowded)


def check(reply: httpx.Response, alone: httpx.Response) -> None:
    """A reply has what the same request gets alone, to the last bits; int8 to a step of its scale."""
    found, wanted = arrays_of(reply), arrays_of(alone)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        near = {"int8": 1.0, "float16": 2e-3}.get(value.dtype.name, 1e-5)
        np.testing.assert_allclose(found[key].astype(float), value.astype(float), rtol=1e-5, atol=near, err_msg=key)


def stages(live: Live) -> Stages:
    """The module that notes which of its parts ran, as if it never had."""
    module = gated_module(live, "stages")
    assert isinstance(module, Stages)
    module.ran.clear()
    return module


@pytest.mark.parametrize("wanted", [("early",), ("late", "early")])
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
        right(crowded, reply, random_rows(2, seed), layer, name="stages")


def test_large_request(narrow: Live) -> None:
    """Each forward is filled up with whoever is next, and nobody's rows come to another. What has none comes once."""
    ledger, counts = MetricsDelta(narrow, "tower"), (3, 10, 2)
    with hold_queue(narrow, "tower") as pile:
        replies = [
            pile.enqueue(extract_request(random_rows(count, seed), "tower", "norm,table", encoding="base64"), count)
            for seed, count in enumerate(counts)
        ]
    assert pile.module.forwards == [4, 4, 4, 3]
    for seed, (count, reply) in enumerate(zip(counts, replies, strict=True)):
        right(narrow, reply, random_rows(count, seed), "norm", "table")
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
    right(narrow, mean, random_rows(3), "mean")
    for seed, reply in zip((7, 8), others, strict=True):
        right(narrow, reply, random_rows(1, seed), "tail")
    assert "4" in problem(post(narrow, extract_request(random_rows(5), "tower", "mean")), 422)["detail"]
    ledger.check(HELD_COUNTS, batch_counts("same_depth", 2, 2), batch_counts("isolated", 3, 1), row_counts(5))


def test_isolated(crowded: Live) -> None:
    """An isolated request shares with nobody, isolated or not, and gets the same bytes."""
    ledger, layers = MetricsDelta(crowded, "tower"), "conv,act,norm,tail"
    lone = [extract_request(random_rows(count, 9), "tower", layers, pool="mean", isolated="true") for count in (2, 1)]
    plain = [extract_request(random_rows(count, 5), "tower", "tail") for count in (1, 3)]
    quiet = [post(crowded, request).content for request in lone]
    with hold_queue(crowded, "tower") as pile:
        sent = ((lone[0], 2), (plain[0], 1), (lone[1], 1), (plain[1], 3))
        replies = [pile.enqueue(request, count) for request, count in sent]
    assert pile.module.forwards == [2, 4, 1]
    assert [replies[0].result().content, replies[2].result().content] == quiet
    runs = [batch_counts("isolated", 6, 4, times=4), batch_counts("same_depth", 4, 2)]
    ledger.check(HELD_COUNTS, *runs, row_counts(3 + 3 + 4))


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
    for ahead in (0, 3):  # each request begins at other places of a forward
        with hold_queue(fixed, "tower") as pile:
            replies = [pile.enqueue(extract_request(random_rows(ahead), "tower", "tail"), ahead)] if ahead else []
            replies += [pile.enqueue(request, count) for (count, _, _), request in zip(FIXED, requests, strict=True)]
        for expected, reply in zip(quiet, replies[-len(FIXED) :], strict=True):
            assert reply.result().content == expected.content
        assert len(pile.module.forwards) < len(FIXED)
    assert set(module.forwards) == {8}

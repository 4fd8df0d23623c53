"""Two recordings of this checkout are the same, and what differs is told."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import pytest

from tests.recorded.cases import explanations, inputs, interventions, replies, routes
from tests.recorded.client import Answer
from tests.recorded.comparison import UNSTABLE, compare
from tests.recorded.masks import describe
from tests.recorded.recorder import record
from tests.recorded.request import Request, picture, send
from tests.recorded.server import Checkout
from tests.recorded.setups import SETUPS, Setup

HERE = Checkout(Path(__file__).parents[2], Path(sys.executable))
MODULES = (inputs, replies, interventions, explanations, routes)
FIRST, CHANGED = "inputs/png", "changed/png"
ANSWER = Answer(
    200,
    (("content-type", "application/json"), ("content-length", "73"), ("x-request-id", "0" * 32)),
    b'{"seconds":0.25,"request_id":"' + b"0" * 32 + b'","rows":1}',
)


def few_requests() -> Iterator[Request]:
    """A few requests of several kinds, and one picture under two names, with another pixel under the second."""
    yield from chain.from_iterable(islice(module.requests(), 3) for module in MODULES)
    for name, seed in ((FIRST, 1), (CHANGED, 2)):
        yield send(name, picture(seed), "image/png", layers="head")


@pytest.mark.slow
def test_recorded() -> None:
    """A server that starts anew gives the same answers; an answer to another picture is told from the one before."""
    first, second = (record(HERE, [Setup("digits", few_requests)], ()) for _ in range(2))
    assert len(first["answers"]) == 3 * len(MODULES) + 2
    assert compare(first, second) == []
    changed = copy.deepcopy(second)
    changed["answers"][FIRST] = second["answers"][CHANGED]
    differences = compare(first, changed)
    assert differences
    assert all(line.startswith(f"{FIRST}: ") for line in differences)


def test_names() -> None:
    """Requests have names of their own, and so have those that are not compared."""
    names = Counter(request.name for setup in SETUPS for request in setup.requests())
    assert names.total() > 200
    assert names.most_common(1)[0][1] == 1
    assert UNSTABLE.keys() <= names.keys()


def test_masks() -> None:
    """Random ids and measured numbers are left out, whatever their length; all else is compared."""
    other = replace(ANSWER, body=ANSWER.body.replace(b"0" * 32, b"a" * 32).replace(b"0.25", b"0.125"))
    other = replace(other, headers=(ANSWER.headers[0], ("content-length", "74"), ("x-request-id", "a" * 32)))
    assert describe(other) == describe(ANSWER)
    for changed in (
        replace(ANSWER, status=201),
        replace(ANSWER, headers=ANSWER.headers[1:]),
        replace(ANSWER, body=ANSWER.body.replace(b"1}", b"2}")),
    ):
        recordings = ({"answers": {"a": describe(each)}, "documents": {}} for each in (ANSWER, changed))
        assert [line for line in compare(*recordings) if line.startswith("a: ")]

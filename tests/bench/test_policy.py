"""The simulation of batching rules: it repeats itself, its clients are answered, and it tells rules apart."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.policy.clients import add_closed_loop
from bench.policy.models import MODELS
from bench.policy.rules import GROWING, RULES
from bench.policy.server import SimulatedRequest, SimulatedServer

MODEL = "mobilenet"


@pytest.mark.parametrize("rule", RULES)
def test_all_that_is_sent_is_answered_once(rule: str) -> None:
    """Two hundred requests, half of them bulk, in a burst and one by one: each has one answer and one row."""
    server, answers = SimulatedServer(MODELS[MODEL], RULES[rule], cores=2, seed=0), Counter[int]()
    for number in range(200):
        sent_at = 0.0 if number < 50 else 0.007 * number
        request = SimulatedRequest(
            "bulk" if number % 2 else "interactive", sent_at, lambda n=number: answers.update([n])
        )
        server.call_at(sent_at, lambda request=request: server.send(request))
    server.run(10.0)
    assert answers == Counter(range(200))
    assert sum(rows * forwards for rows, forwards in server.record.forwards.items()) == 200


def test_batch_takes_in_what_comes_while_it_decodes() -> None:
    """Of five requests to one core, three come while the first is decoded and the last in the forward of these four."""
    server = SimulatedServer(MODELS[MODEL], RULES[GROWING], cores=1, seed=0)
    for sent_at in (0.0, 1e-3, 1e-3, 1e-3, 30e-3):
        server.call_at(sent_at, lambda sent_at=sent_at: server.send(SimulatedRequest("interactive", sent_at)))
    server.run(1.0)
    assert server.record.forwards == {4: 1, 1: 1}


@pytest.mark.parametrize(("rule", "rows"), [("threads", 1), (GROWING, 4)])
def test_rules_are_told_apart(rule: str, rows: int) -> None:
    """Eight clients: in threads one row after the other runs alone beside seven; batches that grow share them out."""
    server = SimulatedServer(MODELS[MODEL], RULES[rule], cores=2, seed=0)
    add_closed_loop(server, 8)
    server.run(10.0)
    assert server.record.forwards.most_common(1)[0][0] == rows

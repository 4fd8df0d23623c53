"""The simulation of batching rules: it repeats itself, its clients are answered, and it tells rules apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.policy.clients import add_closed_loop
from bench.policy.loads import Load, simulate
from bench.policy.models import MODELS
from bench.policy.processor import Processor
from bench.policy.rules import GROWING, RULES, Rule
from bench.policy.server import SimulatedRequest, SimulatedServer

MODEL = "mobilenet"


def test_more_threads_than_cores_run_slower() -> None:
    """Three threads on two cores: each has two thirds of a core, until one of them ends."""
    processor, ended = Processor(2), list[str]()
    for name, seconds in (("short", 1.0), ("long", 2.0), ("longer", 3.0)):
        processor.run(seconds, lambda name=name: ended.append(name))
    assert processor.seconds_to_next_end == pytest.approx(1.5)
    processor.advance(1.5)
    assert ended == ["short"]
    assert processor.seconds_to_next_end == pytest.approx(1.0)


def test_one_client_is_answered_as_soon_as_costs_allow() -> None:
    """Nothing is in its way: receive, decode, forward, reply, with the times' spread."""
    model, server = MODELS[MODEL], SimulatedServer(MODELS[MODEL], RULES[GROWING], cores=2, seed=0)
    add_closed_loop(server, 1)
    server.run(10.0)
    seconds = server.record.seconds["interactive"]
    expected = model.receive + model.decode + model.costs.estimate_seconds(1) + model.reply
    assert sum(seconds) / len(seconds) == pytest.approx(expected, rel=0.05)
    assert set(server.record.forwards) == {1}


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


@pytest.mark.parametrize(("seconds", "forwards"), [(20e-3, {2: 1}), (1e-3, {1: 2})])
def test_batch_waits_for_what_it_expects_and_no_longer(seconds: float, forwards: dict[int, int]) -> None:
    """The second request is received some six milliseconds after the first has been decoded."""
    rule = Rule(count_expected=lambda expected: expected.arriving, seconds=seconds)
    server = SimulatedServer(replace(MODELS[MODEL], receive=10e-3), rule, cores=1, seed=0)
    for _ in range(2):
        server.send(SimulatedRequest("interactive", 0.0))
    server.run(1.0)
    assert server.record.forwards == forwards


@pytest.mark.parametrize(("rule", "rows"), [("threads", 1), (GROWING, 4)])
def test_rules_are_told_apart(rule: str, rows: int) -> None:
    """Eight clients: in threads one row after the other runs alone beside seven; batches that grow share them out."""
    server = SimulatedServer(MODELS[MODEL], RULES[rule], cores=2, seed=0)
    add_closed_loop(server, 8)
    server.run(10.0)
    assert server.record.forwards.most_common(1)[0][0] == rows


@pytest.mark.parametrize("rule", ["threads", GROWING])
def test_large_request_beside_small_ones(rule: str) -> None:
    """256 rows of all layers take seconds, and a single row beside them a small part of one."""
    alone, beside = (simulate(MODEL, load, rule, 2, 0) for load in (Load(clients=4), Load(clients=4, large=1)))
    assert beside.p99_ms < alone.p99_ms + 150
    assert 3.0 < beside.large_s < 7.0


def test_interactive_clients_are_first() -> None:
    """Beside bulk ones, which get what is left."""
    server = SimulatedServer(MODELS[MODEL], RULES[GROWING], cores=2, seed=0)
    add_closed_loop(server, 4)
    add_closed_loop(server, 16, "bulk")
    server.run(10.0)
    seconds = {priority: sum(each) / len(each) for priority, each in server.record.seconds.items()}
    assert seconds["interactive"] < seconds["bulk"]

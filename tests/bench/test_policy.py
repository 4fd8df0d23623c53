"""The simulation of batching rules: it repeats itself, its clients are answered, and it tells rules apart."""

from __future__ import annotations

import pytest

from bench.policy.clients import add_closed_loop
from bench.policy.loads import Load, compare, find_capacity, simulate
from bench.policy.models import MODELS
from bench.policy.processor import Processor
from bench.policy.rules import NO_WAITING, RULES
from bench.policy.server import SimulatedServer

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
    model, server = MODELS[MODEL], SimulatedServer(MODELS[MODEL], RULES[NO_WAITING], cores=2, seed=0)
    add_closed_loop(server, 1)
    server.run(10.0)
    seconds = server.record.seconds["interactive"]
    expected = model.receive + model.decode + model.costs.estimate_seconds(1) + model.reply
    assert sum(seconds) / len(seconds) == pytest.approx(expected, rel=0.05)
    assert set(server.record.forwards) == {1}


def test_same_seed_same_figures() -> None:
    load = Load(clients=8)
    first, second, other = (simulate(MODEL, load, NO_WAITING, 2, seed) for seed in (0, 0, 1))
    assert first == second != other


def test_open_loop_is_answered_as_it_comes() -> None:
    figures = simulate(MODEL, Load(share=0.5), NO_WAITING, 2, 0)
    assert figures.per_s == pytest.approx(0.5 * find_capacity(MODEL, 2), rel=0.1)


def test_lone_client_feels_no_rule_but_a_timer() -> None:
    compared = compare(MODEL, Load(clients=1), list(RULES), 2, seeds=1)
    slower = {rule for rule, figures in compared.items() if figures["p50_ms_ratio"] != 1.0}
    assert slower == {"timer 5 ms"}


def test_clients_that_come_back_alone_are_seen() -> None:
    """Eight clients without waiting: one row after the other runs alone beside a forward of the seven others."""
    server = SimulatedServer(MODELS[MODEL], RULES[NO_WAITING], cores=2, seed=0)
    add_closed_loop(server, 8)
    server.run(10.0)
    forwards = server.record.forwards
    assert [rows for rows, _ in forwards.most_common(2)] == [1, 7]


def test_interactive_clients_are_first() -> None:
    """Beside bulk ones, which get what is left."""
    server = SimulatedServer(MODELS[MODEL], RULES[NO_WAITING], cores=2, seed=0)
    add_closed_loop(server, 4)
    add_closed_loop(server, 16, "bulk")
    server.run(10.0)
    seconds = {priority: sum(each) / len(each) for priority, each in server.record.seconds.items()}
    assert seconds["interactive"] < seconds["bulk"]

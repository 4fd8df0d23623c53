"""What a worker knows of specs: each is sent once, and the table has a bound."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from layertap.models.plan.planner import make_plan
from layertap.models.plan.selectors import parse_selector
from layertap.service.engine.execute.processes.wire import MAX_SPECS, NO_KEY, KnownSpecs, SentSpecs
from layertap.service.engine.prepared_request import ForwardSpec, PreparedRequest
from tests.conftest import net_spec
from tests.loading import load_model


def make_specs(count: int, layer: str = ".") -> list[ForwardSpec]:
    catalog = load_model(net_spec("Chain")).catalog
    return [ForwardSpec(make_plan([parse_selector(layer)], catalog)) for _ in range(count)]


def send(table: SentSpecs, worker: KnownSpecs, specs: Sequence[ForwardSpec]) -> int:
    """Have a worker get specs as it does with a batch; how many of them were new to it."""
    sent = [table.refer(PreparedRequest(key=NO_KEY, spec=spec)) for spec in specs]
    for (reference, captures), spec in zip(sent, specs, strict=True):
        found, numbers = worker.get(reference)
        assert vars(found.spec) == vars(spec)
        assert {captures[number] for number in numbers.values()} == spec.plan.captures
    return sum(not isinstance(reference, int) for reference, _ in sent)


def test_sent_once() -> None:
    """A spec is new once, whatever object asks for it."""
    table, worker, specs = SentSpecs(), KnownSpecs(), make_specs(3)
    for spec in specs:
        assert send(table, worker, [spec, spec]) == 1
        assert send(table, worker, [spec, ForwardSpec(spec.plan)]) == 0
    assert send(table, worker, specs) == 0


def test_bound() -> None:
    """A table that is full begins anew, and the worker forgets what it knew."""
    table, worker, specs = SentSpecs(), KnownSpecs(), make_specs(MAX_SPECS)
    for spec in specs:
        table.make_room()
        assert send(table, worker, [spec]) == 1
    assert send(table, worker, specs) == 0
    table.make_room()
    assert send(table, worker, specs[-2:]) == 2
    with pytest.raises(IndexError):
        worker.get(2)


def test_large_batch() -> None:
    """All specs of a batch have numbers at the same time, also where they are more than the table has room for."""
    table, worker, specs = SentSpecs(), KnownSpecs(), make_specs(2 * MAX_SPECS)
    send(table, worker, specs[:3])
    assert send(table, worker, [*specs, *specs]) == len(specs) - 3
    assert len({table.refer(PreparedRequest(key=NO_KEY, spec=spec))[0] for spec in specs}) == len(specs)

"""What a worker knows of specs: each is sent once, and the table has a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from layertap.models.catalog.catalog import Costs
from layertap.models.planner import make_plan
from layertap.models.selection.selectors import parse_selector
from layertap.service.engine.batch import CPU, Batch, BatchKey, ForwardSpec, Job, RowSlice
from layertap.service.engine.execute.processes.references import (
    MAX_SPECS,
    RESET,
    Known,
    ServerReferences,
    WorkerReferences,
)
from tests.conftest import net_spec
from tests.loading import load_model

KEY = BatchKey("chain", (CPU,), Costs(0.0, 1.0), 64)


def make_specs(count: int) -> list[ForwardSpec]:
    catalog = load_model(net_spec("Chain")).catalog
    return [ForwardSpec(make_plan([parse_selector(".")], catalog)) for _ in range(count)]


def make_batch(specs: Sequence[ForwardSpec]) -> Batch:
    requests = [Job(KEY, 1, inputs={"x": torch.zeros(1)}, spec=spec) for spec in specs]
    return Batch(KEY, CPU, tuple(RowSlice(each, 0, 1) for each in requests), 1, 1, 1.0, 1.0, "single")


def take_new(table: ServerReferences, specs: Sequence[ForwardSpec]) -> Mapping[int, Known]:
    new = table.take_new(make_batch(specs))
    return cast("Mapping[int, Known]", {number: known for number, known in new.items() if number != RESET})


def test_sent_once() -> None:
    """A spec is new once, whatever object asks for it; what was not used for longest makes room."""
    table = ServerReferences()
    specs = make_specs(MAX_SPECS + 1)
    for number, spec in enumerate(specs[:MAX_SPECS]):
        assert list(take_new(table, [spec])) == [number]
    again = ForwardSpec(specs[0].plan)
    assert take_new(table, [again]) == {}
    assert table.find(again) == 0
    assert list(take_new(table, [specs[-1]])) == [1]
    assert list(take_new(table, [specs[1]])) == [2]


def test_large_batch() -> None:
    """All specs of a batch have numbers at the same time, also where they are more than the table has room for."""
    table, specs = ServerReferences(), make_specs(2 * MAX_SPECS)
    take_new(table, specs[:3])
    new = take_new(table, [*specs, *specs])
    assert len(new) == len(specs) - 3
    numbers = [table.find(spec) for spec in specs]
    assert len(set(numbers)) == len(specs)
    assert all(new[number][0] is spec for number, spec in zip(numbers, specs, strict=True) if number in new)


def test_captures() -> None:
    """What a worker calls a capture of a spec is that capture for the server."""
    table, worker, (spec,) = ServerReferences(), WorkerReferences(), make_specs(1)
    worker.learn(take_new(table, [spec]))
    for capture in spec.plan.captures:
        assert table.get(worker.find(capture)) is capture


def test_begun_again() -> None:
    """A worker forgets its specs where the server begins another table: each capture has a number that both know."""
    worker, specs = WorkerReferences(), make_specs(2)
    worker.learn(ServerReferences().take_new(make_batch(specs)))
    table = ServerReferences()
    worker.learn(table.take_new(make_batch(specs[1:])))
    for capture in specs[1].plan.captures:
        assert table.get(worker.find(capture)) is capture

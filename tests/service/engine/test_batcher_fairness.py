"""Models that want the same device get the same time on it."""

from __future__ import annotations

from itertools import islice

import pytest

from layertap.models.catalog.catalog import Costs
from layertap.service.engine.batch import Batch
from layertap.service.engine.schedule.waiting import DeviceSlots
from tests.service.engine.batcher_harness import (
    CORES,
    BatcherHarness,
    make_key,
    sum_slot_seconds,
)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("factor", [1.0, 5.0], ids=["as expected", "five times as long"])
def test_models_share_fairly(device: str, factor: float) -> None:
    """Two models, both with rows at all times, one with forwards three times as long, and wrongly estimated."""
    harness = BatcherHarness(cpu=DeviceSlots(CORES), gpu=DeviceSlots(1, parallel=False))
    harness.add(make_key(device), 10_000)
    harness.add(make_key(device, Costs(per_row=3.0), model="b"), 10_000)
    slots = 1 if device == "gpu" else CORES
    used_seconds, running, longest_batch = {"a": 0.0, "b": 0.0}, [], 12.0 * factor
    for _ in range(200):
        running += harness.start_batches()
        batch = running.pop(0)
        seconds = batch.seconds * (factor if batch.key.model == "a" else 1.0)
        harness.finish(batch, seconds)
        used_seconds[batch.key.model] += seconds
        expected_seconds = {
            model: used_seconds[model] + sum(batch.seconds for batch in running if batch.key.model == model)
            for model in used_seconds
        }
        assert abs(expected_seconds["a"] - expected_seconds["b"]) <= slots * longest_batch
    assert min(used_seconds.values()) > 50


@pytest.mark.parametrize("pause", [0.0, 100.0])
def test_time_used_alone_is_not_held_against_a_model(pause: float) -> None:
    """Who had a device for itself shares it evenly from the moment on that another one wants it, after a pause too."""
    harness = BatcherHarness()
    harness.add(make_key(), 400)
    assert len(list(harness.run_in_turn())) == 100
    harness.now += pause
    harness.add(make_key(model="b"), 400)
    harness.add(make_key(), 400)
    used_seconds = sum_slot_seconds(list(islice(harness.run_in_turn(), 10)))
    assert abs(used_seconds["a"] - used_seconds["b"]) <= 8.0


def test_newcomer_takes_no_more_than_its_share() -> None:
    """A model with one replica has had less than one with many: who comes then does not have to be waited for."""
    harness = BatcherHarness()
    harness.add(make_key("cpu"), 10_000)
    harness.add(make_key("cpu", model="b"), 10_000)
    replicas = {"a": 9, "b": 1, "c": 9}
    models: list[str] = []
    for step in range(400):
        if step == 200:
            harness.add(make_key("cpu", model="c"), 10_000)
        while True:
            busy = [batch.key.model for batch in harness.running if isinstance(batch, Batch)]
            batch = harness.start(**{model: count - busy.count(model) for model, count in replicas.items()})
            if batch is None:
                break
            assert isinstance(batch, Batch)
            models.append(batch.key.model)
        harness.finish(harness.running[0])
    assert abs(models[-60:].count("a") - models[-60:].count("c")) <= 2

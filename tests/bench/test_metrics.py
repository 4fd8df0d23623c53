"""``bench.serving.metrics``: rows per forward, as our server counts them."""

from __future__ import annotations

import math

import pytest

from bench.serving.metrics import BatchRows, get_rows_per_forward, parse_samples, sum_batch_rows
from layertap.service.metrics import Metrics


def test_rows_per_forward() -> None:
    """Between two readings: 4 forwards of one row, one of two, three of 5 to 8, of 24 rows in all."""
    before = BatchRows({1.0: 10.0, 2.0: 10.0, 4.0: 12.0, 8.0: 12.0, math.inf: 12.0}, 18.0)
    after = BatchRows({1.0: 14.0, 2.0: 15.0, 4.0: 17.0, 8.0: 20.0, math.inf: 20.0}, 42.0)
    assert get_rows_per_forward(before, after) == {
        "rows_mean": 3.0,
        "rows_median": 1.0,
        "single_forwards": 0.5,
        "single_rows": pytest.approx(1 / 6),
        "forwards": {"1": 4, "2": 1, "4": 0, "8": 3, "inf": 0},
    }
    assert get_rows_per_forward(after, after) == {}


def test_rows_are_those_of_our_metrics() -> None:
    """Of all models together."""
    metrics = Metrics()
    for model, rows in (("a", 1), ("a", 7), ("b", 1), ("b", 2)):
        metrics.observe_batch(model, rows, 32, rows, 1.0, 0.01, "same_depth")
    found = get_rows_per_forward(BatchRows({}, 0.0), sum_batch_rows(parse_samples(metrics.render().decode())))
    assert (found["rows_mean"], found["rows_median"]) == (2.75, 1.0)
    assert (found["single_forwards"], found["single_rows"]) == (0.5, pytest.approx(2 / 11))
    assert {edge: number for edge, number in found["forwards"].items() if number} == {"1": 2, "2": 1, "8": 1}

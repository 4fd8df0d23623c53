"""``bench.serving.metrics``: rows per forward, as our server counts them."""

from __future__ import annotations

import math

import pytest

from bench.machine import get_cpu_shares, parse_cpu_times
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


# hundredths of a second
STAT = "cpu  1000 200 300 4000 500 60 40 700 50 10\ncpu0 500 100 150 2000 250 30 20 350 25 5\n"
LATER = "cpu  1900 300 400 4600 600 110 90 800 950 10\ncpu0 950 150 200 2300 300 55 45 400 475 5\n"


def test_cpu_shares() -> None:
    """Of 20 s of two cores 1 s was stolen and 12 s were used, 9 s of them by what is measured."""
    shares = get_cpu_shares(parse_cpu_times(STAT), parse_cpu_times(LATER), 9.0)
    assert shares == pytest.approx({"steal": 0.05, "others": 0.15})
    assert get_cpu_shares(parse_cpu_times(STAT), parse_cpu_times(LATER), 12.01)["others"] == 0.0

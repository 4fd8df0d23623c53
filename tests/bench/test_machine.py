"""``bench.machine``: who used the cores during a measurement."""

from __future__ import annotations

import pytest

from bench.machine import get_cpu_shares, parse_cpu_times

# hundredths of a second
STAT = "cpu  1000 200 300 4000 500 60 40 700 50 10\ncpu0 500 100 150 2000 250 30 20 350 25 5\n"
LATER = "cpu  1900 300 400 4600 600 110 90 800 950 10\ncpu0 950 150 200 2300 300 55 45 400 475 5\n"


def test_cpu_shares() -> None:
    """Of 20 s of two cores 1 s was stolen and 12 s were used, 9 s of them by what is measured."""
    shares = get_cpu_shares(parse_cpu_times(STAT), parse_cpu_times(LATER), 9.0)
    assert shares == pytest.approx({"steal": 0.05, "others": 0.15})
    assert get_cpu_shares(parse_cpu_times(STAT), parse_cpu_times(LATER), 12.01)["others"] == 0.0

"""How many inputs go in a request and how many requests at once, against servers that are simulated by their rates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layertap_client.pace import Pace


def simulate(pace: Pace, rate: Callable[[int, int], float], batches: int) -> None:
    """A server that answers ``rate(rows, requests)`` rows a second, for so many requests one after another."""
    now = 0.0
    for _ in range(batches):
        now += pace.rows / rate(pace.rows, pace.requests)
        pace.record(pace.rows, 0, now)


@pytest.mark.parametrize("best", [32, 64, 256])
def test_pace_finds_the_batch(best: int) -> None:
    """More inputs in a request as long as that brings something."""
    pace = Pace()
    simulate(pace, lambda rows, requests: min(rows, best), 500)
    assert pace.is_settled
    assert (pace.rows, pace.requests) == (best, 2)


@pytest.mark.parametrize("best", [2, 8])
def test_pace_finds_the_requests(best: int) -> None:
    """More requests at once as long as that brings something."""
    pace = Pace()
    simulate(pace, lambda rows, requests: min(requests, best), 500)
    assert (pace.rows, pace.requests) == (32, best)


def test_pace_is_bounded() -> None:
    """However much it brings, never more than the limits say."""
    pace = Pace.from_limits({"max_inputs": 50, "max_queue_rows": 300, "max_body_bytes": 1000}, 32)
    simulate(pace, lambda rows, requests: rows * requests, 1000)
    assert (pace.rows, pace.requests, pace.max_bytes) == (50, 3, 900)


def test_pace_gives_way() -> None:
    """Refusals halve what is under way; without any more it comes back one by one, within bounds."""
    pace = Pace(rows=8, requests=16)
    pace.record(8, 1, 1.0)
    assert pace.requests == 8
    for _ in range(10):
        pace.record(8, 2, 2.0)
    assert pace.requests == 1
    simulate(pace, lambda rows, requests: 1, 40)
    assert pace.requests == 2
    simulate(pace, lambda rows, requests: 1, 20_000)
    assert pace.requests == 16
    pace.shrink(3)
    assert pace.rows == 3

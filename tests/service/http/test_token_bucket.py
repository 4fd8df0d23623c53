"""How often a key may be used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layertap.service.http.auth import TokenBucket

PAUSES = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@given(rate=st.floats(0.05, 20), burst=st.integers(1, 10), pauses=PAUSES)
def test_rate(rate: float, burst: int, pauses: list[float]) -> None:
    """In no stretch of time there are more than a burst and what the rate gives; nobody is refused before that."""
    bucket, now, taken = TokenBucket(rate, burst), 1000.0, list[float]()
    for pause in pauses:
        now += pause
        seconds = bucket.take(now)
        if not seconds:
            taken.append(now)
            assert all(len(taken) - at <= burst + (now - begun) * rate + 1e-6 for at, begun in enumerate(taken))
            continue
        at = max(range(len(taken)), key=lambda at: len(taken) - at - (now - taken[at]) * rate)
        assert len(taken) - at + 1 > burst + (now - taken[at]) * rate - 1e-6
        assert 0 < seconds <= 1 / rate + 1e-6


def test_waiting_as_told() -> None:
    """Whoever comes again when told is let in, and whoever asks too early does not have to wait longer for it."""
    bucket = TokenBucket(0.5, 2)
    assert [bucket.take(5.0) for _ in range(3)] == [0, 0, 2.0]
    assert bucket.take(6.0) == 1.0
    assert bucket.take(7.0) == 0
    assert bucket.take(7.0) == 2.0


def test_clock_that_stands_or_goes_back() -> None:
    """A clock that does not go on gives nothing."""
    bucket = TokenBucket(1.0, 1)
    assert bucket.take(50.0) == 0
    assert bucket.take(50.0) == 1.0
    assert bucket.take(-50.0) == 1.0

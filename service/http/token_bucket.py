"""How often a key may be used: a bucket of tokens that fills steadily. Pure; the clock is the caller's."""

from __future__ import annotations


class TokenBucket:
    """``rate`` tokens a second, at most ``burst`` at a time; full at first."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at = float("-inf")

    def take(self, now: float) -> float:
        """Take a token: 0, or in how many seconds there will be one."""
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0

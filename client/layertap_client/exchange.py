"""One request until it is answered: deadlines, and when it is sent again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from layertap_client.errors import BadReplyError, ConnectionFailedError, InputError, LayertapError, make_problem
from layertap_client.messages import Outcome, Reply, Request, Send, Steps, Wait

DEADLINE = "X-Request-Timeout"
MAX_TIMEOUT_S = 1e6
REPLY_SHARE, MAX_REPLY_S = 0.1, 0.5  # of what is left of a timeout, kept for the way of the reply
JITTER = 0.25
TRANSIENT = frozenset({408, 429, 502, 503, 504})


@dataclass(frozen=True)
class RetryPolicy:
    """When a request is sent again.

    A refusal that says ``Retry-After`` is waited out for as long as the call's timeout allows, and layertap's own 503
    that says none is final: the model has failed. Anything else (a broken
    connection, a proxy's 502) is tried ``attempts`` times more, after ``backoff_s`` that doubles up to
    ``max_backoff_s``; a server that answered before and can't be reached now is tried until the timeout: it restarts.
    ``attempts=0`` repeats nothing at all. ``statuses`` are those that are tried again.
    ``on_wait`` is called before each pause, with the reason and the seconds. With ``patience_s`` a request is tried
    again for that many seconds after its first failure, whatever ``attempts`` and ``Retry-After`` say, at the latest
    every ``max_backoff_s``.
    """

    attempts: int = 3
    backoff_s: float = 0.25
    max_backoff_s: float = 5.0
    statuses: frozenset[int] = TRANSIENT
    on_wait: Callable[[LayertapError, float], None] | None = None
    patience_s: float | None = None


@dataclass
class Session:
    """What the calls of one client have in common; ``answered``: whether the server has ever replied.

    ``timeout`` is that of calls that name none; a connection on which nothing moves for ``silence_s`` is given up.
    ``proxy``: the variable of the environment that has the proxy to the server, if one has.
    """

    timeout: float = 60.0
    model: str | None = None
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    silence_s: float = float("inf")
    answered: bool = False
    proxy: str = ""
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random

    def exchange(self, request: Request, timeout: float | None = None) -> Steps[Reply]:
        """The good reply to a request; LayertapError.

        ``timeout`` in seconds is for all attempts together. Each attempt sends the server a deadline: what is left of
        it, at most ``silence_s``, less the time that the reply needs to arrive.
        """
        deadline = self.clock() + check_timeout(self.timeout if timeout is None else timeout)
        given_up = deadline
        failures = attempts = 0
        while True:
            left = max(deadline - self.clock(), 0.001)
            silence = min(left, self.silence_s)
            told = silence - min(MAX_REPLY_S, REPLY_SHARE * silence)
            outcome: Outcome = yield Send(request.with_headers({DEADLINE: f"{told:.3f}"}), left, silence)
            attempts += 1
            if isinstance(outcome, Reply):
                self.answered = True
                if outcome.status == 200:
                    return replace(outcome, attempts=attempts)
            if attempts == 1 and self.retries.patience_s is not None:  # an attempt itself may take longer
                given_up = min(deadline, self.clock() + self.retries.patience_s)
            pause = self._choose_pause(outcome, failures)
            if pause is None or self.clock() + pause >= given_up:
                raise make_error(outcome, self.proxy)
            failures += _retry_after(outcome) is None
            if self.retries.on_wait is not None:
                self.retries.on_wait(make_error(outcome, self.proxy), pause)
            yield Wait(pause)

    def _choose_pause(self, outcome: Outcome, failures: int) -> float | None:
        """Seconds until the request is sent again; None where it must not be, or it would be no use."""
        passing = (
            isinstance(outcome, ConnectionFailedError)
            or outcome.status in self.retries.statuses
            or _is_of_proxy(outcome)
        )
        if not self.retries.attempts or not passing:
            return None
        patient = self.retries.patience_s is not None
        told = _retry_after(outcome)
        if told is None and isinstance(outcome, Reply) and outcome.status == 503 and _is_own(outcome):
            return None
        if told is not None:
            if patient:
                told = min(max(told, self.retries.backoff_s), self.retries.max_backoff_s)
            return told * (1 + JITTER * self.draw())  # so that clients which were refused together come back apart
        restarting = isinstance(outcome, ConnectionFailedError) and not outcome.sent and self.answered
        if failures >= self.retries.attempts and not restarting and not patient:
            return None
        pause = min(self.retries.backoff_s * 2.0 ** min(failures, 30), self.retries.max_backoff_s)
        return pause * (1 - JITTER * self.draw())


def check_timeout(seconds: float) -> float:
    """The seconds of a timeout; InputError where they are no number above 0 and below ``MAX_TIMEOUT_S``."""
    if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise InputError(f"timeout {seconds!r} is no number of seconds above 0 and at most {MAX_TIMEOUT_S:g}")
    return seconds


def make_error(outcome: Outcome, proxy: str) -> LayertapError:
    """The error that the last outcome means; ``proxy``: the variable of the one that may have made it."""
    if isinstance(outcome, ConnectionFailedError):
        return outcome
    if outcome.status < 400:
        check = " and ".join(filter(None, ("the URL", proxy)))
        return BadReplyError(f"status {outcome.status}, which layertap never sends: check {check}")
    return make_problem(outcome.status, outcome.body, _retry_after(outcome), proxy)


def _is_of_proxy(reply: Reply) -> bool:
    """Whether a proxy sent a 500, as Ray's does when a replica has died."""
    return reply.status == 500 and not _is_own(reply)


def _is_own(reply: Reply) -> bool:
    """Whether an error is the server's own, which are JSON."""
    return "json" in reply.headers.get("content-type", "")


def _retry_after(outcome: Outcome) -> float | None:
    """The seconds that a refusal asks for, None where it says none; a date, as a proxy may write it, is not read."""
    try:
        seconds = float(outcome.headers["retry-after"][:32]) if isinstance(outcome, Reply) else -1
    except (KeyError, ValueError):
        return None
    return seconds if seconds >= 0 else None

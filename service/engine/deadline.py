"""Moments on the monotonic clock after which nobody waits for an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from layertap.service.errors import DeadlineError

T = TypeVar("T")


class RunInThread(Protocol):
    """Runs a function that computes in a pool of threads; DeadlineError."""

    def __call__(self, function: Callable[[], T], deadline: float) -> Awaitable[T]:
        """The function's result; ``deadline`` is a moment on the monotonic clock."""


async def wait_until(deadline: float, awaited: Awaitable[T]) -> T:
    """Await until a moment on the monotonic clock; DeadlineError then."""
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
            return await awaited
    except TimeoutError:
        raise deadline_error() from None


def deadline_error() -> DeadlineError:
    """The error of an answer that came too late."""
    return DeadlineError("the deadline passed before the answer was there", retry_after=1.0)

"""Deadlines: moments on the monotonic clock after which a request is abandoned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from layertap.service.errors import DeadlineError

T = TypeVar("T")


class RunInThread(Protocol):
    """Runs a CPU-bound function in a thread pool; DeadlineError."""

    def __call__(self, function: Callable[[], T], deadline: float) -> Awaitable[T]:
        """The function's result; ``deadline`` is a moment on the monotonic clock."""


async def wait_until(deadline: float | None, awaited: Awaitable[T]) -> T:
    """Await until a deadline on the monotonic clock, if there is one; DeadlineError when it passes."""
    try:
        async with asyncio.timeout(None if deadline is None else max(deadline - time.monotonic(), 0.0)):
            return await awaited
    except TimeoutError:
        raise deadline_error() from None


def deadline_error() -> DeadlineError:
    """The error of a request past its deadline."""
    return DeadlineError("the deadline passed before the answer was there", retry_after=1.0)

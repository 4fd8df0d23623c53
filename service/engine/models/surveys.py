"""Surveys of a model: what only forwards of noise tell, found out once for all that ask the same at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from layertap.service.engine.deadline import wait_until

T = TypeVar("T")


@dataclass(eq=False)
class _Survey:
    """One survey, and how many callers wait for it."""

    task: asyncio.Task[Any]
    callers: int = 0


class Surveys:
    """The surveys of one model, of which one runs at a time. For the event loop only.

    A survey belongs to no caller: whoever asks the same meanwhile gets its result, or its error. Once nobody waits for
    it any more, it is cancelled: one that runs is ended, the others never begin.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._surveys: dict[Hashable, _Survey] = {}

    async def ask(self, key: Hashable, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """The result of ``work``, which is shared by all callers with this ``key``; DeadlineError, its errors."""
        survey = self._surveys.get(key)
        if survey is None:
            survey = self._surveys[key] = _Survey(asyncio.ensure_future(self._run(work)))
            survey.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # asyncio would log it
        survey.callers += 1
        try:
            return cast("T", await wait_until(deadline, asyncio.shield(survey.task)))
        finally:
            survey.callers -= 1
            if not survey.callers:
                del self._surveys[key]
                survey.task.cancel()

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._lock:
            return await work()

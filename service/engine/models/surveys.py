"""Surveys of a model: what only forwards of noise tell, found out once for all that ask the same at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from layertap.service.engine.deadline import wait_until
from layertap.service.errors import DeadlineError

T = TypeVar("T")


@dataclass(eq=False)
class _Survey:
    """One survey, and how many callers wait for it."""

    task: asyncio.Task[Any]
    callers: int = 0
    runs: bool = False


class Surveys:
    """The surveys of one model, of which one runs at a time. For the event loop only.

    A survey belongs to no caller: whoever asks the same meanwhile gets its result, or its error. Once nobody waits for
    it any more, it is cancelled: one that runs is ended, the others never begin. Only where the deadline of the last
    caller passed does one that runs go on, if it is ``bounded``: the next try finds it further, or its result.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._surveys: dict[Hashable, _Survey] = {}

    async def ask(
        self, key: Hashable, work: Callable[[], Awaitable[T]], deadline: float, *, bounded: bool = False
    ) -> T:
        """The result of ``work``, which is shared by all callers with this ``key``; DeadlineError, its errors.

        ``bounded``: it ends by itself in any case.
        """
        survey = self._surveys.get(key)
        if survey is None:
            survey = self._surveys[key] = self._begin(key, work)
        survey.callers += 1
        outlives = False
        try:
            return cast("T", await wait_until(deadline, asyncio.shield(survey.task)))
        except DeadlineError:
            outlives = bounded and survey.runs and not survey.task.done()
            raise
        finally:
            survey.callers -= 1
            if not survey.callers and not outlives:
                self._surveys.pop(key, None)
                survey.task.cancel()

    def _begin(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> _Survey:
        async def run() -> T:
            async with self._lock:
                survey.runs = True
                return await work()

        def forget(task: asyncio.Task[T]) -> None:
            if not survey.callers and self._surveys.get(key) is survey:
                del self._surveys[key]
            if not task.cancelled():
                task.exception()  # asyncio would log it

        survey = _Survey(asyncio.ensure_future(run()))
        survey.task.add_done_callback(forget)
        return survey

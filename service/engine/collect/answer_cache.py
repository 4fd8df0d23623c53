"""Answers of late, so that equal requests are computed once.

What is kept are features, not replies: whatever dialect asks the engine profits, their arrays are sent as they are, and
compression comes later and is chosen by each client. Encoding is all that a hit still costs. The reply's format is a
part of the key all the same, since what is refused (a reply that would be too large, a name that it needs) goes by it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Literal

import numpy as np

from layertap.service.engine.deadline import wait_until
from layertap.service.errors import RetryLaterError
from layertap.service.features import Array, Features, Receipt
from layertap.service.types import CacheResult

Key = tuple[int, str]  # which loading of a model, and the digest of a request to it
Outcome = Features | Literal["refused", "given up"]
SHORT_COPY = 2**20  # bytes that are copied in less than a way to another thread and back takes

# What Python takes for an answer, beside its arrays; measured, and rounded up.
ANSWER_BYTES, RESULT_BYTES, ENTRY_BYTES, CHARACTER_BYTES = 2048, 4096, 128, 4
TOP_ENTRIES = 3  # as which one of a row's best classes counts


class AnswerCache:
    """Features by keys, those that were used most recently. For the event loop only.

    ``used_bytes`` is what they take now, never more than ``max_bytes``.
    """

    def __init__(self, max_bytes: int, executor: Executor) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._executor = executor
        self._answers: OrderedDict[Key, Features] = OrderedDict()
        self._computing: dict[Key, asyncio.Future[Outcome]] = {}
        self._copying_bytes = 0  # of those used, what copies take that are being made

    async def get_or_compute(
        self, key: Key, compute: Callable[[], Awaitable[Features]], deadline: float
    ) -> tuple[Features, CacheResult]:
        """The features of a key, where need be by ``compute``, which one of all that want them calls at a time.

        Errors are the caller's own: where ``compute`` was refused everybody calls his own, where whoever called it has
        gone or ran out of time the next one does. DeadlineError, and what ``compute`` raises.
        """
        while True:
            if (features := self._answers.get(key)) is not None:
                self._answers.move_to_end(key)
                return features, "hit"
            computing = self._computing.get(key)
            if computing is None:
                return await self._compute(key, compute), "miss"
            outcome = await wait_until(deadline, asyncio.shield(computing))
            if isinstance(outcome, Features):
                return outcome, "shared"
            if outcome == "refused":
                return await compute(), "miss"

    def forget(self, generation: int) -> None:
        """Let go what a model gave that was loaded then, and keep nothing that it is still giving."""
        for key in [key for key in self._answers if key[0] == generation]:
            self.used_bytes -= measure(self._answers.pop(key))
        for key in [key for key in self._computing if key[0] == generation]:
            del self._computing[key]

    async def _compute(self, key: Key, compute: Callable[[], Awaitable[Features]]) -> Features:
        computing = self._computing[key] = asyncio.get_running_loop().create_future()
        outcome: Outcome = "given up"  # as it is where this is cancelled
        try:
            features = await compute()
            if features.errors:  # some inputs failed: they might not another time
                outcome = "refused"
            else:
                outcome = features
                await self._keep(key, features, computing)
        except RetryLaterError:
            raise
        except Exception:
            outcome = "refused"
            raise
        finally:
            if self._computing.get(key) is computing:
                del self._computing[key]
            computing.set_result(outcome)
        return features

    async def _keep(self, key: Key, features: Features, computing: asyncio.Future[Outcome]) -> None:
        """Keep features that have a place here; where there is no memory for a copy they are not kept."""
        size = measure(features)
        if size > self.max_bytes - self._copying_bytes:
            return
        self.used_bytes += size  # before there is a copy
        while self.used_bytes > self.max_bytes:
            _, oldest = self._answers.popitem(last=False)
            self.used_bytes -= measure(oldest)
        self._copying_bytes += size
        is_kept = False
        try:
            kept = await self._copy(features, size)
            is_kept = self._computing.get(key) is computing  # else its model has gone meanwhile
            if is_kept:
                self._answers[key] = kept
        except MemoryError:
            return
        finally:
            self._copying_bytes -= size
            if not is_kept:
                self.used_bytes -= size

    async def _copy(self, features: Features, size: int) -> Features:
        if size <= SHORT_COPY:
            return _copy(features)
        return await asyncio.get_running_loop().run_in_executor(self._executor, _copy, features)


def measure(features: Features) -> int:
    """About how many bytes features take in memory, at least as many as they do."""
    texts = (*features.arrays, *features.warnings, *(name for names in features.interventions for name in names))
    entries = len(texts) + sum(map(_count_entries, features.receipts.values()))
    entries += TOP_ENTRIES * sum(map(len, features.top_classes))
    return (
        features.nbytes
        + ANSWER_BYTES
        + RESULT_BYTES * len(features.arrays)
        + ENTRY_BYTES * entries
        + CHARACTER_BYTES * sum(map(len, texts))
    )


def _count_entries(receipt: Receipt) -> int:
    return sum(len(value) for value in vars(receipt).values() if isinstance(value, tuple))


def _copy(features: Features) -> Features:
    """Features that share no memory with a batch, of which they may be a small part, and that nobody writes to."""
    return replace(features, arrays=_copy_arrays(features.arrays), scales=_copy_arrays(features.scales))


def _copy_arrays(arrays: dict[str, Array]) -> dict[str, Array]:
    copies = {key: np.array(array, order="C") for key, array in arrays.items()}
    for copy in copies.values():
        copy.flags.writeable = False
    return copies

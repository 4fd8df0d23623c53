"""What is kept of answers: bounded in bytes, one computation at a time, errors nobody's but the caller's."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest

from layertap.models.errors import Fault, RequestError
from layertap.service.engine.collect.answer_cache import AnswerCache, measure
from layertap.service.errors import DeadlineError, QueueFullError, RetryLaterError
from layertap.service.features import Features, Receipt

T = TypeVar("T")
MIB = 2**20
FAR = 60.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Where large answers are copied."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives, within a time that nothing here takes."""

    async def limited() -> T:
        async with asyncio.timeout(FAR):
            return await coroutine

    return asyncio.run(limited())


def answer(number: int, size: int = 1000, results: int = 1, **changes: Any) -> Features:
    """Features of so many numbers in each result."""
    names = [f"layer{number}.{place}" for place in range(results)]
    receipts = {name: receipt(name, tuple(f"{number}{row:031}" for row in range(20))) for name in names}
    arrays = {name: np.full(size, number, np.float32) for name in names}
    return Features("m", f"{number:032}", 1, arrays, receipts, **changes)


def receipt(name: str, fingerprints: tuple[str, ...]) -> Receipt:
    """A receipt with texts of its own for each row."""
    return Receipt(
        layer=name,
        call=0,
        module="M",
        site="output",
        captured=(20, 8),
        dtype="float32",
        pool="none",
        fingerprint=f"{name}:{len(name)}",
        fingerprints=fingerprints,
        token_counts=tuple(range(1000, 1020)),
    )


def giving(features: Features, calls: list[int]) -> Callable[[], Awaitable[Features]]:
    """Computes features, and notes that it did."""

    async def compute() -> Features:
        calls.append(1)
        return features

    return compute


async def get(cache: AnswerCache, number: int, compute: Callable[[], Awaitable[Features]]) -> tuple[Features, str]:
    """An answer by its number."""
    return await cache.get_or_compute((1, str(number)), compute, time.monotonic() + FAR)


def test_kept(pool: ThreadPoolExecutor) -> None:
    """An answer is computed once, is equal, and is no part of somebody's batch; nobody can write to it."""
    batch = np.arange(4000, dtype=np.float32)
    features = answer(1)
    features.arrays["layer1.0"] = batch[1000:2000]
    cache, calls = AnswerCache(MIB, pool), list[int]()

    async def ask() -> None:
        assert (await get(cache, 1, giving(features, calls)))[1] == "miss"
        kept, result = await get(cache, 1, giving(features, calls))
        assert result == "hit"
        assert calls == [1]
        np.testing.assert_array_equal(kept.arrays["layer1.0"], batch[1000:2000])
        assert not np.shares_memory(kept.arrays["layer1.0"], batch)
        with pytest.raises(ValueError, match="read-only"):
            kept.arrays["layer1.0"][0] = 5

    run(ask())


@pytest.mark.parametrize(("size", "results"), [(0, 1), (1000, 20), (60_000, 1)])
def test_bounded(pool: ThreadPoolExecutor, size: int, results: int) -> None:
    """However many answers come, they take no more memory than is counted, and no more is counted than the bound."""
    bound = max(MIB // 8, 4 * measure(answer(0, size, results)))
    cache = AnswerCache(bound, pool)

    async def fill() -> None:
        for number in range(3 * bound // measure(answer(0, size, results)) + 3):
            await get(cache, number, giving(answer(number, size, results), []))
            assert cache.used_bytes <= bound

    run(get(AnswerCache(bound, pool), 0, giving(answer(0, size, results), [])))  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        run(fill())
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < cache.used_bytes <= bound
    assert used <= cache.used_bytes


def test_oldest_goes_first(pool: ThreadPoolExecutor) -> None:
    """What was not asked for longest makes room."""
    cache, calls = AnswerCache(2 * measure(answer(1)), pool), list[int]()

    async def ask() -> None:
        results = [(await get(cache, number, giving(answer(number), calls)))[1] for number in (1, 2, 1, 3, 1, 2)]
        assert results == ["miss", "miss", "hit", "miss", "hit", "miss"]

    run(ask())


@pytest.mark.parametrize("features", [answer(1, MIB), answer(1, errors=(Fault("broken"),))])
def test_not_kept(pool: ThreadPoolExecutor, features: Features) -> None:
    """An answer that is larger than the cache, or to some inputs only is given, not kept."""
    cache, calls = AnswerCache(MIB, pool), list[int]()

    async def ask() -> None:
        await get(cache, 2, giving(answer(2), calls))
        used = cache.used_bytes
        for _ in range(2):
            given, result = await get(cache, 1, giving(features, calls))
            assert (given, result) == (features, "miss")
        assert (len(calls), cache.used_bytes) == (3, used)
        assert (await get(cache, 2, giving(answer(2), calls)))[1] == "hit"

    run(ask())


def test_forgotten(pool: ThreadPoolExecutor) -> None:
    """What a model gave goes with it, and nothing else."""
    cache, calls = AnswerCache(MIB, pool), list[int]()

    async def ask() -> None:
        for generation in (1, 2):
            await cache.get_or_compute((generation, "a"), giving(answer(generation), calls), time.monotonic() + FAR)
        cache.forget(1)
        assert cache.used_bytes == measure(answer(2))
        for generation, expected in ((2, "hit"), (1, "miss")):
            key = (generation, "a")
            assert (await cache.get_or_compute(key, giving(answer(1), calls), time.monotonic() + FAR))[1] == expected

    run(ask())


@contextmanager
def busy(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Keep a pool of one thread from doing anything, until the block ends."""
    free = threading.Event()
    pool.submit(free.wait, FAR)
    try:
        yield
    finally:
        free.set()


def test_bounded_while_copying(pool: ThreadPoolExecutor) -> None:
    """Large answers that are copied at the same time have no more room than others; one that finds none is given."""
    cache, calls = AnswerCache(7 * MIB, pool), list[int]()

    async def ask() -> None:
        await get(cache, 0, giving(answer(0), calls))
        with busy(pool):
            tasks = [
                asyncio.create_task(get(cache, number, giving(answer(number, MIB), calls))) for number in (1, 2, 3)
            ]
            await settle()
            assert [task.done() for task in tasks] == [False, True, True]
            assert cache.used_bytes <= cache.max_bytes
        assert [(await task)[1] for task in tasks] == ["miss"] * 3
        assert cache.used_bytes == measure(answer(0)) + measure(answer(1, MIB))
        results = [(await get(cache, number, giving(answer(number, MIB), calls)))[1] for number in (0, 1, 2)]
        assert results == ["hit", "hit", "miss"]

    run(ask())


class Held:
    """A computation that ends when it is told to, for each that calls it."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Features]] = []

    async def __call__(self) -> Features:
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_shared(pool: ThreadPoolExecutor) -> None:
    """Equal questions at the same time are computed once, and others beside them."""
    cache, held, features = AnswerCache(MIB, pool), Held(), answer(1)
    followers = 5

    async def ask() -> None:
        tasks = [asyncio.create_task(get(cache, 1, held)) for _ in range(followers + 1)]
        other = asyncio.create_task(get(cache, 2, held))
        await settle()
        assert len(held.calls) == 2
        held.calls[0].set_result(features)
        results = [await task for task in tasks]
        assert [result for _, result in results] == ["miss", *["shared"] * followers]
        assert all(given is features for given, _ in results)
        assert not other.done()
        held.calls[1].set_result(answer(2))
        await other

    run(ask())


@pytest.mark.parametrize("error", [None, DeadlineError("late", retry_after=1), QueueFullError("full", retry_after=1)])
def test_first_gives_up(pool: ThreadPoolExecutor, error: RetryLaterError | None) -> None:
    """Where the first leaves, or finds no time or place, the next one computes, and the others go on waiting."""
    cache, held = AnswerCache(MIB, pool), Held()

    async def ask() -> None:
        tasks = [asyncio.create_task(get(cache, 1, held)) for _ in range(4)]
        await settle()
        if error is None:
            tasks[0].cancel()
        else:
            held.calls[0].set_exception(error)
        await settle()
        assert isinstance(
            (await asyncio.gather(tasks[0], return_exceptions=True))[0],
            type(error) if error else asyncio.CancelledError,
        )
        assert len(held.calls) == 2
        tasks[2].cancel()
        await settle()
        held.calls[1].set_result(answer(1))
        assert [(await tasks[place])[1] for place in (1, 3)] == ["miss", "shared"]
        assert (await get(cache, 1, held))[1] == "hit"

    run(ask())


def test_refused(pool: ThreadPoolExecutor) -> None:
    """An error is not kept; those who waited all compute for themselves, at once."""
    cache, held = AnswerCache(MIB, pool), Held()

    async def ask() -> None:
        tasks = [asyncio.create_task(get(cache, 1, held)) for _ in range(4)]
        await settle()
        held.calls[0].set_exception(RequestError("no such layer"))
        await settle()
        assert len(held.calls) == 4
        for number, call in enumerate(held.calls[1:]):
            call.set_exception(RequestError(f"no such layer {number}"))
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert len({str(error) for error in errors}) == 4
        assert all(isinstance(error, RequestError) for error in errors)
        assert cache.used_bytes == 0
        assert (await get(cache, 1, giving(answer(1), [])))[1] == "miss"

    run(ask())

"""What a function gives or raises, handed from the thread that ran it to whoever waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from layertap.models.errors import LayertapError

T = TypeVar("T")
Failed = LayertapError | RuntimeError


def wrap_error(error: BaseException, kind: type[RuntimeError] = RuntimeError) -> RuntimeError:
    """What to hand on instead of an error that would mean something else to whoever gets it."""
    wrapped = kind(f"the model raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def call_and_catch(run: Callable[[], T]) -> T | Failed:
    """What a function gives, or what it raises: that belongs to whoever waits."""
    try:
        return run()
    except LayertapError as error:
        return error
    except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
        return wrap_error(error)


def settle(future: Future[T] | asyncio.Future[T], result: T | Failed) -> None:
    """Give a future its result or exception, where it has none yet; an asyncio one on its event loop."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def deliver(results: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Settle futures of one event loop, all of them in one turn of it; called by any thread."""
    if results:
        results[0][0].get_loop().call_soon_threadsafe(_settle_all, results)


def _settle_all(results: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in results:
        settle(future, result)

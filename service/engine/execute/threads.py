"""Threads of this process: how they begin, and how the event loop has something done in one."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def start_single_threaded() -> None:
    """Begin a thread: the system shows its name, and torch's operations in it use no other thread."""
    publish_name()
    torch.set_num_threads(1)


def publish_name() -> None:
    """Have the system's tools (``top -H``) know this thread by its name, to 15 letters; Python 3.14 does so itself."""
    with suppress(OSError):  # other systems have no such file
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(threading.current_thread().name[:15])


def wrap_error(error: BaseException, kind: type[RuntimeError] = RuntimeError) -> RuntimeError:
    """What to hand on instead of an error that would mean something else to its receiver."""
    wrapped = kind(f"the model raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


class WorkerThread:
    """A daemon thread that runs one function after another for the event loop.

    Not an executor of the standard library: Python waits at its end for the threads of these, and a forward, or a
    model's loading, may take for ever.
    """

    def __init__(self, name: str, initialize: Callable[[], None] = publish_name) -> None:
        """``initialize`` runs first, in the thread. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._initialize = initialize
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._running = 0
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function after all that was given before; the future has what it gives or raises."""
        future = self._loop.create_future()
        self._running += 1
        self._tasks.put((future, function))
        return future

    @property
    def is_idle(self) -> bool:
        """Whether it has done all that was given."""
        return not self._running

    def shutdown(self) -> None:
        """End the thread after what was given."""
        self._tasks.put(None)

    async def close(self) -> None:
        """Return once the thread has done what was given, and has ended."""
        self.shutdown()
        await asyncio.shield(self._ended)

    def _work(self) -> None:
        failure: Exception | None = None
        try:
            self._initialize()
        except BaseException as error:  # whatever it is given fails then
            failure = wrap_error(error)
        while (task := self._tasks.get()) is not None:
            future, function = task
            try:
                self._tell(future, failure, None if failure is not None else function())
            except BaseException as error:
                clean = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
                self._tell(future, clean or wrap_error(error), None)
            del task, future, function  # or what they hold would live until the next one comes
        self._tell(self._ended, None, None)

    def _tell(self, future: asyncio.Future[Any], error: Exception | None, result: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(partial(self._settle, future, error, result))

    def _settle(self, future: asyncio.Future[Any], error: Exception | None, result: Any) -> None:
        self._running -= 1
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


async def run_in_new_thread(name: str, function: Callable[[], T]) -> T:
    """What a function gives or raises that may take long, in a thread that ends with it."""
    thread = WorkerThread(name)
    try:
        return await thread.run(function)
    finally:
        thread.shutdown()

"""Threads of this process: how they start, and how the event loop runs a function in one."""

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

from layertap.models.errors import HookError

T = TypeVar("T")
Settle = Callable[[Any, Exception | None], object]  # takes a result or an error


def start_single_threaded() -> None:
    """Set up a thread: publish its name, and let torch's operations in it use no other thread."""
    publish_name()
    torch.set_num_threads(1)


def publish_name() -> None:
    """Show this thread's name, up to 15 characters, in system tools (``top -H``); Python 3.14 does so itself."""
    with suppress(OSError):  # other systems have no such file
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(threading.current_thread().name[:15])


def wrap_error(error: BaseException, kind: type[RuntimeError] = RuntimeError, said: str = "") -> RuntimeError:
    """A wrapper for an error that its receiver would mistake for one of its own; ``said`` of it, if not its class.

    ``kind`` is for what a model raised; what a hook raised is none.
    """
    is_own = isinstance(error, HookError)
    wrapped = RuntimeError(str(error)) if is_own else kind(f"the model raised {said or type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


class WorkerThread:
    """A daemon thread that runs one function after another for the event loop.

    Not an executor of the standard library: at exit Python waits for the threads of these, and a forward, or a model's
    loading, may take forever.
    """

    def __init__(self, name: str, initialize: Callable[[], None] = publish_name) -> None:
        """``initialize`` runs first, in the thread. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Settle] | None] = queue.SimpleQueue()
        self._initialize = initialize
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def post(self, function: Callable[[], Any], settle: Settle) -> None:
        """Run a function after all earlier ones; then the event loop calls ``settle`` with its result or its error."""
        self._tasks.put((function, settle))

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """As ``post``; the future has the function's result or error."""
        future: asyncio.Future[T] = self._loop.create_future()
        self.post(function, partial(_settle, future))
        return future

    def shutdown(self) -> None:
        """End the thread after the functions that were submitted."""
        self._tasks.put(None)

    async def close(self) -> None:
        """Return once the thread has run all its functions and has ended."""
        self.shutdown()
        await asyncio.shield(self._ended)

    def _work(self) -> None:
        failure: Exception | None = None
        try:
            self._initialize()
        except BaseException as error:  # then every function fails with it
            failure = wrap_error(error)
        while (task := self._tasks.get()) is not None:
            function, settle = task
            try:
                self._tell(settle, None if failure is not None else function(), failure)
            except BaseException as error:
                clean = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
                self._tell(settle, None, clean or wrap_error(error))
            del task, function, settle  # or their objects would live until the next task
        self._tell(partial(_settle, self._ended), None, None)

    def _tell(self, settle: Settle, result: Any, error: Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(settle, result, error)


def _settle(future: asyncio.Future[T], result: T, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


async def run_in_new_thread(name: str, function: Callable[[], T]) -> T:
    """Run a function that may take long in a new thread that ends with it."""
    thread = WorkerThread(name)
    try:
        return await thread.run(function)
    finally:
        thread.shutdown()

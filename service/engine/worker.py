"""The one thread that ever touches a model: it loads it, surveys it, runs it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from models.errors import LayertapError
from models.loaded import LoadedModel

T = TypeVar("T")


@dataclass(eq=False)
class _Task(Generic[T]):
    run: Callable[[LoadedModel], T] | None
    future: Future[T]

    def do(self, model: LoadedModel) -> None:
        run = self.run
        if run is None or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = run(model)
        except LayertapError as error:
            self.future.set_exception(error)
        except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
            self.future.set_exception(_raised(error))
        else:
            self.future.set_result(result)

    def let_go(self, future: Future[T]) -> None:
        """Once answered or cancelled, hold no rows: a cancelled task stays in the queue until its turn."""
        self.run = None


def _raised(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"the model raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


class Worker:
    """A model's thread and its queue.

    ``loaded`` tells when the model is there, or why it is not. Tasks run one after another, in the order given; a task
    whose future was cancelled before its turn never runs.
    """

    def __init__(self, name: str, load: Callable[[], LoadedModel]) -> None:
        self.loaded: Future[LoadedModel] = Future()
        self.rows = 0  # admitted and not answered; touched by the event loop only
        self.last_used = 0.0
        self.stopping = False  # from now on it takes no task
        self._load = load
        self._queue: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"model-{name}", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> bool:
        """Whether the thread ended though its model was loaded and nobody stopped it."""
        return not self._thread.is_alive() and self.loaded.done() and not self.failed and not self.stopping

    @property
    def failed(self) -> bool:
        """Whether its model could not be loaded."""
        return self.loaded.done() and self.loaded.exception() is not None

    def submit(self, run: Callable[[LoadedModel], T]) -> Future[T]:
        """Run a function of the model in its thread."""
        future: Future[T] = Future()
        task = _Task(run, future)
        future.add_done_callback(task.let_go)
        self._queue.put(task)
        return future

    def stop(self) -> None:
        """End the thread after the tasks that were submitted before."""
        self.stopping = True
        self._queue.put(None)

    def join(self, timeout: float | None) -> None:
        """Wait for the thread's end, at most so many seconds."""
        self._thread.join(timeout)

    def _work(self) -> None:
        try:
            model = self._load()
        except LayertapError as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(model)
        while (task := self._queue.get()) is not None:
            task.do(model)
            del task  # or its rows would live until the next one comes

"""Streams of embedded inputs: two thin drivers of ``EmbeddingScheduler``, one with threads and one with tasks."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from layertap_client.arrays import Array
from layertap_client.bodies import ExtractOptions, check_options
from layertap_client.embedding import Batch, BatchOutcome, Embedded, EmbeddingScheduler
from layertap_client.errors import Fault
from layertap_client.exchange import Session
from layertap_client.inputs import Input, check_many, to_plain
from layertap_client.messages import Steps
from layertap_client.operations import LayerSpecs, list_layers
from layertap_client.operations import models as list_models
from layertap_client.pace import Pace
from layertap_client.tables import make_table

Update = Callable[[int, int], None]  # told how many inputs are done, and how many of them have failed


@contextmanager
def show_progress(total: int | None, shown: bool | None) -> Iterator[Update]:
    """Show how far things are while the block runs; None shows it on terminals and in notebooks only."""
    wanted = (sys.stderr.isatty() or "ipykernel" in sys.modules) if shown is None else shown
    library = next((name for name in BARS if find_spec(name)), None) if wanted else None
    if library is None:
        yield lambda done, failed: None
        return
    with BARS[library](total) as update:
        yield update


@contextmanager
def _show_rich(total: int | None) -> Iterator[Update]:
    progress, console = import_module("rich.progress"), import_module("rich.console")
    columns = (
        progress.TextColumn("embedding"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[errors]}"),
    )
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, rate="", errors="")

        def update(done: int, failed: int) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed:.0f}/s" if speed else ""
            bar.update(task, completed=done, rate=rate, errors=f"{failed} failed" if failed else "")

        yield update


@contextmanager
def _show_tqdm(total: int | None) -> Iterator[Update]:
    with import_module("tqdm").tqdm(total=total, desc="embedding") as bar:

        def update(done: int, failed: int) -> None:
            bar.update(done - bar.n)
            if failed:
                bar.set_postfix(failed=failed)

        yield update


BARS: dict[str, Callable[[int | None], Any]] = {"rich": _show_rich, "tqdm": _show_tqdm}


TIMEOUT_S = 600.0  # for one batch with all attempts: a restart or an upgrade of the server is waited for
SILENCE_S = 30.0  # beyond the server's own deadline: then a connection is dead
NOT_TAKEN = ("on_error", "format")
T = TypeVar("T")


class Driver(Protocol):
    """What a client has of its own."""

    session: Session
    connections: int


class BlockingDriver(Driver, Protocol):
    """A client that waits for what it does."""

    def perform(self, steps: Steps[T]) -> T:
        """Do step after step, and give what they come to."""


class AsyncDriver(Driver, Protocol):
    """A client of an event loop."""

    async def perform(self, steps: Steps[T]) -> T:
        """Do step after step, and give what they come to."""


@dataclass(frozen=True, repr=False)
class Embeddings:
    """All good inputs' arrays, (N, …): ``indices`` has the places of their inputs, ``errors`` those of the others."""

    arrays: Mapping[str, Array]
    indices: NDArray[np.int64]
    errors: Mapping[int, Fault] = field(default_factory=dict)
    fingerprints: tuple[str, ...] = ()

    @property
    def array(self) -> Array:
        """The only array; ValueError where there are several, or none."""
        if len(self.arrays) != 1:
            raise ValueError(f"there are {len(self.arrays)} arrays: {', '.join(self.arrays)}")
        return next(iter(self.arrays.values()))

    @property
    def fingerprint(self) -> str:
        """That of all rows; ValueError where they have several, so that they can't all be compared."""
        if len(self.fingerprints) != 1:
            raise ValueError(f"the rows have {len(self.fingerprints)} fingerprints: {', '.join(self.fingerprints)}")
        return self.fingerprints[0]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
        return f"Embeddings({shapes}; {len(self.errors)} failed; fingerprints {', '.join(self.fingerprints)})"

    def _repr_html_(self) -> str:
        rows = [(name, str(array.shape), array.dtype.name) for name, array in self.arrays.items()]
        failed = [(f"input {index}", str(fault), "") for index, fault in list(self.errors.items())[:10]]
        caption = f"{len(self.indices)} inputs, {len(self.errors)} failed, fingerprint {', '.join(self.fingerprints)}"
        return make_table(("result", "shape", "dtype"), [*rows, *failed], caption)


@dataclass
class EmbeddingStream(Iterator[Embedded]):
    """Embedded inputs in order, as they come; ``collect`` waits for all of them.

    It is read once: InputError where it is iterated or collected again after its end.
    """

    items: Generator[Embedded, None, None]

    def __iter__(self) -> EmbeddingStream:
        check_many(self.items)
        return self

    def __next__(self) -> Embedded:
        return next(self.items)

    def collect(self) -> Embeddings:
        """All that is left, in one array for each result."""
        return join(list(self))

    def close(self) -> None:
        """Take no more: nothing is sent any longer, and what is under way is not waited for."""
        self.items.close()


@dataclass
class AsyncEmbeddingStream(AsyncIterator[Embedded]):
    """Embedded inputs in order, as they come; ``collect`` waits for all of them.

    It is read once: InputError where it is iterated or collected again after its end.
    """

    items: AsyncGenerator[Embedded, None]

    def __aiter__(self) -> AsyncEmbeddingStream:
        check_many(self.items)
        return self

    async def __anext__(self) -> Embedded:
        return await anext(self.items)

    async def collect(self) -> Embeddings:
        """All that is left, in one array for each result."""
        return join([each async for each in self])

    async def aclose(self) -> None:
        """Take no more: nothing is sent any longer, and what is under way is cancelled."""
        await self.items.aclose()


def join(embedded: list[Embedded]) -> Embeddings:
    """Rows as arrays."""
    good = [each for each in embedded if each.error is None]
    names = good[0].arrays if good else ()
    return Embeddings(
        {name: np.stack([each.arrays[name] for each in good]) for name in names},
        np.array([each.index for each in good], np.int64),
        {each.index: each.error for each in embedded if each.error is not None},
        tuple(dict.fromkeys(each.fingerprint for each in good)),
    )


def stream(
    client: BlockingDriver, inputs: Iterable[Input], layers: LayerSpecs | None, progress: bool | None, options: Any
) -> Generator[Embedded, None, None]:
    """Embed by threads, each of which performs one batch at a time."""
    scheduler = make_scheduler(client, client.perform(list_models(client.session)).limits, layers, options)
    source = iter(inputs)
    running: set[Future[BatchOutcome]] = set()
    done = 0
    pool = ThreadPoolExecutor(scheduler.pace.max_requests, "layertap-embed")
    try:
        with show_progress(count(inputs), progress) as update:
            while True:
                while scheduler.can_start and (batch := scheduler.pull(source)) is not None:
                    running.add(pool.submit(client.perform, scheduler.send(batch)))
                for each in scheduler.pop_ready():
                    done += 1
                    yield each
                update(done, scheduler.failed)
                if not running:
                    if scheduler.exhausted:
                        return
                    continue  # all that waited for a slow batch is taken: there is room for others
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    scheduler.finish(future.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever stops early does not wait for what nobody wants


async def stream_async(
    client: AsyncDriver,
    inputs: Iterable[Input] | AsyncIterable[Input],
    layers: LayerSpecs | None,
    progress: bool | None,
    options: Any,
) -> AsyncGenerator[Embedded, None]:
    """Embed by tasks, one for each batch."""
    scheduler = make_scheduler(client, (await client.perform(list_models(client.session))).limits, layers, options)
    source = aiter(inputs) if isinstance(inputs, AsyncIterable) else iter(inputs)
    running: set[asyncio.Task[BatchOutcome]] = set()
    finished: set[asyncio.Task[BatchOutcome]] = set()
    done = 0
    try:
        with show_progress(count(inputs), progress) as update:
            while True:
                while scheduler.can_start and (batch := await _pull(scheduler, source)) is not None:
                    running.add(asyncio.ensure_future(client.perform(scheduler.send(batch))))
                for each in scheduler.pop_ready():
                    done += 1
                    yield each
                update(done, scheduler.failed)
                if not running:
                    if scheduler.exhausted:
                        return
                    continue  # all that waited for a slow batch is taken: there is room for others
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    scheduler.finish(task.result())
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *finished, return_exceptions=True)  # an error may have company


async def _pull(scheduler: EmbeddingScheduler, source: Iterator[Input] | AsyncIterator[Input]) -> Batch | None:
    """The next batch; files are read in a thread, and so is a source that is no asynchronous one."""
    if isinstance(source, Iterator):
        return await asyncio.to_thread(scheduler.pull, source)
    async for value in source:
        if batch := await asyncio.to_thread(scheduler.builder.add, value):
            return batch
    return scheduler.end()


def make_scheduler(
    client: Driver, limits: Mapping[str, float], layers: LayerSpecs | None, options: Mapping[str, Any]
) -> EmbeddingScheduler:
    """A scheduler within a server's limits; TypeError for options that embedding does not have."""
    check_options(options, ExtractOptions, "embed")
    if taken := options.keys() & set(NOT_TAKEN):
        raise TypeError(f"embed() has no option {taken.pop()!r}: bad inputs are always told one by one")
    named = {"model": client.session.model, "priority": "bulk", **options, "layers": list_layers(layers)}
    timeout = named.pop("timeout", None) or TIMEOUT_S
    fields = {name: to_plain(value) for name, value in named.items() if value is not None}
    return EmbeddingScheduler(
        client.session,
        {**fields, "on_error": "skip"},
        timeout,
        limits["deadline_s"] + SILENCE_S,
        Pace.from_limits(limits, client.connections),
        time.monotonic,
    )


def count(inputs: Any) -> int | None:
    """How many inputs there are, where that is known."""
    return len(inputs) if hasattr(inputs, "__len__") else None

"""Streams of embedded inputs: two thin drivers of ``Embedder``, one with threads and one with tasks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layertap_client.arrays import Array, get_only
from layertap_client.embedding import Batch, Embedded, Embedder
from layertap_client.errors import Fault
from layertap_client.inputs import Input
from layertap_client.operations import LayerSpecs
from layertap_client.operations import models as list_models

if TYPE_CHECKING:
    from layertap_client.client import AsyncClient, Client

AHEAD = 2  # times as many batches as are under way are in memory: those behind one that is slow wait


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
        return get_only(self.arrays)

    @property
    def fingerprint(self) -> str:
        """That of all rows; ValueError where they have several, so that they can't all be compared."""
        if len(self.fingerprints) != 1:
            raise ValueError(f"the rows have {len(self.fingerprints)} fingerprints: {', '.join(self.fingerprints)}")
        return self.fingerprints[0]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
        return f"Embeddings({shapes}; {len(self.errors)} failed; fingerprints {', '.join(self.fingerprints)})"


@dataclass
class EmbeddingStream(Iterator[Embedded]):
    """Embedded inputs in order, as they come; ``collect`` waits for all of them."""

    items: Generator[Embedded, None, None]

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
    """Embedded inputs in order, as they come; ``collect`` waits for all of them."""

    items: AsyncGenerator[Embedded, None]

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
    client: Client, inputs: Iterable[Input], layers: LayerSpecs | None, options: Mapping[str, Any], **sizes: int
) -> Generator[Embedded, None, None]:
    """Embed by threads, each of which performs one batch at a time."""
    limits = client.perform(list_models(client.session)).limits
    embedder = Embedder(client.session, limits, layers, options, **sizes)
    source = iter(inputs)
    window: deque[Future[list[Embedded]]] = deque()
    pool = ThreadPoolExecutor(embedder.concurrency, "layertap-embed")
    try:
        while True:
            if batch := embedder.pull(source):
                window.append(pool.submit(client.perform, embedder.send(batch)))
            while window and (not batch or window[0].done() or len(window) >= AHEAD * embedder.concurrency):
                yield from window.popleft().result()
            if not batch:
                return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever stops early does not wait for what nobody wants


async def stream_async(
    client: AsyncClient,
    inputs: Iterable[Input] | AsyncIterable[Input],
    layers: LayerSpecs | None,
    options: Mapping[str, Any],
    **sizes: int,
) -> AsyncGenerator[Embedded, None]:
    """Embed by tasks, one for each batch."""
    limits = (await client.perform(list_models(client.session))).limits
    embedder = Embedder(client.session, limits, layers, options, **sizes)
    source = aiter(inputs) if isinstance(inputs, AsyncIterable) else iter(inputs)
    window: deque[asyncio.Task[list[Embedded]]] = deque()
    slots = asyncio.Semaphore(embedder.concurrency)

    async def send(batch: Batch) -> list[Embedded]:
        async with slots:
            return await client.perform(embedder.send(batch))

    try:
        while True:
            if batch := await _pull(embedder, source):
                window.append(asyncio.create_task(send(batch)))
            while window and (not batch or window[0].done() or len(window) >= AHEAD * embedder.concurrency):
                for each in await window[0]:
                    yield each
                window.popleft()
            if not batch:
                return
    finally:
        for task in window:
            task.cancel()
        await asyncio.gather(*window, return_exceptions=True)  # an error may have company


async def _pull(embedder: Embedder, source: Iterator[Input] | AsyncIterator[Input]) -> Batch:
    """The next batch; files are read in a thread, and so is a source that is no asynchronous one."""
    if isinstance(source, Iterator):
        return await asyncio.to_thread(embedder.pull, source)
    async for value in source:
        if batch := await asyncio.to_thread(embedder.add, value):
            return batch
    return embedder.finish()

"""The two clients: thin drivers over httpx of what ``operations`` says once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx

from layertap_client import operations
from layertap_client.bodies import ExtractOptions
from layertap_client.embedding import BATCH_SIZE, CONCURRENCY
from layertap_client.errors import InputError, ReplyTimeoutError
from layertap_client.exchange import RetryPolicy, Session
from layertap_client.inputs import Input, check_many
from layertap_client.messages import Outcome, Reply, Send, Step, Steps, Wait
from layertap_client.operations import LayerSpecs
from layertap_client.streams import AsyncEmbeddingStream, EmbeddingStream, stream, stream_async
from layertap_client.transport import URL, describe_failure, find_proxy, make_arguments, make_http, make_options

P = ParamSpec("P")
T = TypeVar("T")
SHARED = frozenset({"transport", "mounts"})  # options that hold connections
INCOMPLETE = "the reply was not complete after {:.3g} s"


def blocking(operation: Callable[Concatenate[Session, P], Steps[T]]) -> Callable[Concatenate[Client, P], T]:
    """An operation as a method of ``Client``."""

    @wraps(operation)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.perform(operation(self.session, *args, **kwargs))

    return method


def awaitable(
    operation: Callable[Concatenate[Session, P], Steps[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """An operation as a method of ``AsyncClient``."""

    @wraps(operation)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.perform(operation(self.session, *args, **kwargs))

    return method


class Connection:
    """What both clients have: the address of a server, and what their calls have in common."""

    _make_http: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        url: str = URL,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: RetryPolicy | None = None,
        **httpx_options: Any,
    ) -> None:
        self.url = url
        self._options = make_options(url, api_key, httpx_options)
        self.session = Session(timeout, model, retries or RetryPolicy(), proxy=find_proxy(self._options))
        self._owner, self._made = os.getpid(), make_http(self._make_http, self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def _http(self) -> Any:
        """The HTTP client of this process: a forked one has no connections and locks of its parent. InputError."""
        if self._owner != os.getpid():
            if shared := SHARED & self._options.keys():
                raise InputError(f"a client with {min(shared)}= can't be used after a fork: make one in each process")
            self._made = make_http(self._make_http, self._options)
            self._owner = os.getpid()  # last: other threads may ask meanwhile
        return self._made


class Client(Connection):
    """A layertap server, asked by blocking calls; threads may share one.

    ``model`` is asked where a call names none, else the server's default. ``timeout``: seconds that a call may take
    with all its attempts; it is sent as the server's deadline. ``httpx_options`` go to ``httpx.Client``
    (``verify``, ``cert``, ``proxy``, ``transport`` …). Use it in a ``with`` block, or ``close`` it.
    """

    _make_http = httpx.Client

    extract = blocking(operations.extract)
    explain = blocking(operations.explain)
    sweep = blocking(operations.sweep)
    optimise = blocking(operations.optimise)
    compare = blocking(operations.compare)
    put_projection = blocking(operations.put_projection)
    projections = blocking(operations.projections)
    post = blocking(operations.post)
    get = blocking(operations.get)
    dry_run = blocking(operations.dry_run)
    models = blocking(operations.models)
    model = blocking(operations.model)
    layers = blocking(operations.layers)
    probe = blocking(operations.probe)

    def embed(
        self,
        inputs: Iterable[Input],
        layers: LayerSpecs | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        concurrency: int = CONCURRENCY,
        **options: Unpack[ExtractOptions],
    ) -> EmbeddingStream:
        """Many inputs, a list or whatever gives one after another: a stream of ``Embedded``, one each, in order.

        Inputs are those of ``extract``, arrays without an axis of rows. ``batch_size`` of them go in a request, and
        ``concurrency`` requests are under way at once, fewer where the server's limits ask for it. Memory is bounded. A
        bad input is an ``Embedded`` with an ``error``. ``options``: those of ``ExtractOptions``; ``timeout`` (600) is
        for a batch with all attempts.
        LayertapError where the server can't be asked; FingerprintChangedError where its model changes meanwhile.
        """
        sizes = {"batch_size": batch_size, "concurrency": concurrency}
        return EmbeddingStream(stream(self, check_many(inputs), layers, options, **sizes))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def perform(self, steps: Steps[T]) -> T:
        """Do step after step, and give what they come to."""
        try:
            step = next(steps)
            while True:
                try:
                    outcome = self._perform_step(step)
                except Exception as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform_step(self, step: Step) -> Any:
        if isinstance(step, Send):
            return self._send(step)
        if isinstance(step, Wait):
            return time.sleep(step.seconds)
        return step.function()

    def _send(self, step: Send) -> Outcome:
        end = time.monotonic() + step.seconds
        body = bytearray()
        try:
            with self._http.stream(**make_arguments(step)) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > end:
                        return ReplyTimeoutError(INCOMPLETE.format(step.seconds), sent=True)
        except httpx.RequestError as error:
            return describe_failure(error, step, self.session.proxy)
        return Reply(response.status_code, response.headers, body)


class AsyncClient(Connection):
    """A layertap server, asked by coroutines of one event loop; as ``Client`` otherwise.

    Use it in an ``async with`` block, or ``await client.aclose()``.
    """

    _make_http = httpx.AsyncClient

    extract = awaitable(operations.extract)
    explain = awaitable(operations.explain)
    sweep = awaitable(operations.sweep)
    optimise = awaitable(operations.optimise)
    compare = awaitable(operations.compare)
    put_projection = awaitable(operations.put_projection)
    projections = awaitable(operations.projections)
    post = awaitable(operations.post)
    get = awaitable(operations.get)
    dry_run = awaitable(operations.dry_run)
    models = awaitable(operations.models)
    model = awaitable(operations.model)
    layers = awaitable(operations.layers)
    probe = awaitable(operations.probe)

    def embed(
        self,
        inputs: Iterable[Input] | AsyncIterable[Input],
        layers: LayerSpecs | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        concurrency: int = CONCURRENCY,
        **options: Unpack[ExtractOptions],
    ) -> AsyncEmbeddingStream:
        """As ``Client.embed``, a stream for ``async for``; inputs may come asynchronously too."""
        sizes = {"batch_size": batch_size, "concurrency": concurrency}
        return AsyncEmbeddingStream(stream_async(self, check_many(inputs), layers, options, **sizes))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()

    async def perform(self, steps: Steps[T]) -> T:
        """Do step after step, and give what they come to."""
        try:
            step = next(steps)
            while True:
                try:
                    outcome = await self._perform_step(step)
                except Exception as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _perform_step(self, step: Step) -> Any:
        if isinstance(step, Send):
            return await self._send(step)
        if isinstance(step, Wait):
            return await asyncio.sleep(step.seconds)
        return await asyncio.to_thread(step.function)

    async def _send(self, step: Send) -> Outcome:
        body = bytearray()
        try:
            async with asyncio.timeout(step.seconds), self._http.stream(**make_arguments(step)) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
        except TimeoutError:
            return ReplyTimeoutError(INCOMPLETE.format(step.seconds), sent=True)
        except httpx.RequestError as error:
            return describe_failure(error, step, self.session.proxy)
        return Reply(response.status_code, response.headers, body)

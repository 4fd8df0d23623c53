"""A server that the client's tests share, and both clients behind one way of calling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from layertap.models.spec import InputSpec
from layertap_client import AsyncClient, Client
from tests.server import Live, serving
from tests.service.support import configured, net

Open = Callable[..., Any]


class Awaited:
    """An ``AsyncClient`` whose methods are run to their ends, each in the same event loop."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self.client, self.runner = client, runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        return lambda *args, **options: self.runner.run(method(*args, **options))


@contextmanager
def awaited(*args: Any, **options: Any) -> Iterator[Awaited]:
    """An ``AsyncClient`` for a test that does not await."""
    with asyncio.Runner() as runner:
        client = AsyncClient(*args, **options)
        try:
            yield Awaited(client, runner)
        finally:
            runner.run(client.aclose())


@pytest.fixture(params=[Client, awaited], ids=["sync", "async"])
def open_client(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Makes clients of one of the two kinds, closed at the end."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(request.param(*args, **{"verify": False, **options}))


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """A server with ``digits``, a model of two inputs and one that can be held up."""
    two = net("two", "TwoInputs", InputSpec("pixels", (4,)), InputSpec("kind", (), "int64"))
    gated = net("gated", "Gated", labels=("red", "green", "blue"))
    with serving(configured(two, gated, net("never", "Never", required=False), load="startup")) as live:
        yield live


@pytest.fixture
def client(open_client: Open, live: Live) -> Any:
    """A client of that server."""
    return open_client(live.url)

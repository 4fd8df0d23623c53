"""A real server on a loopback port, in this process: tests speak HTTP to it and may look at its models."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, TypeVar

import httpx
import uvicorn

from layertap.service.app import create_app
from layertap.service.config.configuration import Configuration
from layertap.service.engine.engine import Engine
from layertap.service.fetch.fetcher import Fetcher
from layertap.service.http.protocol import make_server_config
from layertap.service.settings import Settings

STARTUP_TRIES = 10_000  # longer than a test may take, on any machine
WORKERS = int(os.environ.get("TEST_WORKERS", "0"))  # where nothing else is asked for; 0 lets tests look at models
CACHE = Path(gettempdir()) / "layertap-tests"  # of servers that are processes: not that of whoever runs the tests
TRY_S = 0.02
RUN_S = 120.0
T = TypeVar("T")


@dataclass(frozen=True)
class Live:
    """A running server."""

    url: str
    engine: Engine
    client: httpx.Client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives on the server's event loop."""
        loop = next(iter(self.engine.manager._tasks)).get_loop()
        return asyncio.run_coroutine_threadsafe(work, loop).result(RUN_S)


@contextmanager
def serving(
    configuration: Configuration | None = None,
    *,
    wait: bool = True,
    fetcher: Callable[[Settings], Fetcher] | None = None,
    send_buffer: int | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """Run a server with a configuration and settings until the block ends; by default wait until it is ready.

    ``fetcher`` makes what fetches URLs, where it is not the usual one; of replies the system holds ``send_buffer``
    bytes for each connection.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    folder = TemporaryDirectory()
    # Tests count forwards: those that compare shared rows are asked for where they are looked at.
    chosen = Settings(**{"cache_dir": Path(folder.name), "workers": WORKERS, "check_shared": 0, **settings})
    app = create_app(chosen, configuration, fetcher(chosen) if fetcher else None)
    server = uvicorn.Server(make_server_config(app, chosen, app.state.engine.metrics, timeout_graceful_shutdown=30))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        # Unlike verifying, which nothing does here, that reads no file of authorities, for 20 ms a client.
        with httpx.Client(base_url=url, timeout=120, verify=False) as client:
            if wait:
                _until_ready(client, thread)
            yield Live(url, app.state.engine, client)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        folder.cleanup()


def _until_ready(client: httpx.Client, thread: threading.Thread) -> None:
    for _ in range(STARTUP_TRIES):
        assert thread.is_alive(), "the server ended while starting"
        if client.get("/readyz").status_code == 200:
            return
        thread.join(TRY_S)
    raise AssertionError("the server did not become ready")

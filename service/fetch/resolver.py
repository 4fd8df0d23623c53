"""Host names become addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class ThreadedResolver:
    """The system's resolver, in threads of its own: a look-up can't be ended, and an event loop has few for that."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a host, best first; OSError."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        entries = await asyncio.get_running_loop().run_in_executor(self._pool, look_up)
        return [str(address[0]) for *_, address in entries]

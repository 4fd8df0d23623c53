"""Work that is done only as long as there is someone to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from layertap.service.errors import ClientGoneError


@asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the block as soon as the client is gone: ClientGoneError then.

    The body must have been read: all that is received after it is the end of the connection.
    """
    task, disconnected = asyncio.current_task(), False
    assert task is not None  # noqa: S101  (a coroutine that runs is some task's)

    async def watch() -> None:
        nonlocal disconnected
        await _wait_for_disconnect(request)
        disconnected = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        # As asyncio.timeout does it: whoever else cancelled the task is heard.
        if disconnected and not task.uncancel():
            raise ClientGoneError("the client closed the connection") from None
        raise
    finally:
        watcher.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

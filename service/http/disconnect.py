"""Work that is done only as long as there is someone to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from layertap.service.errors import ClientGoneError

T = TypeVar("T")


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work, and cancel it as soon as the client is gone: ClientGoneError then.

    The body must have been read: all that is received after it is the end of the connection.
    """
    task, disconnected = asyncio.current_task(), False
    assert task is not None  # noqa: S101  (a coroutine that runs is some task's)

    async def cancel_on_disconnect() -> None:
        nonlocal disconnected
        await _wait_for_disconnect(request)
        disconnected = True
        task.cancel()

    watcher = asyncio.ensure_future(cancel_on_disconnect())
    try:
        return await work
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

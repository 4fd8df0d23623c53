"""Work that is done only as long as there is someone to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from service.errors import ClientGoneError

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work, and cancel it as soon as the client is gone: ClientGoneError then.

    The body must have been read: all that is received after it is the end of the connection.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_end(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        gone.cancel()
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)  # what it held is let go before anyone hears of it
    raise ClientGoneError("the client closed the connection")


async def _end(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""The load tester's connections: whatever moment a client leaves at, the next request is answered."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from layertap.service.load.options import Options
from layertap.service.load.scenario import Body, RequestKind
from layertap.service.load.sender import Sender

STEPS = 80  # of the event loop; a request to a server on the same loop takes fewer than 40


@asynccontextmanager
async def answering() -> AsyncIterator[tuple[str, list[int]]]:
    """A server on this loop: its URL, and a port of a client for each connection."""
    clients: list[int] = []

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        clients.append(writer.get_extra_info("peername")[1])
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", clients


def make_sender(url: str) -> Sender:
    """A sender of one kind of request."""
    return Sender([RequestKind("get", "/", (Body(b"", {}),))], Options(url, timeout=10))


@pytest.mark.parametrize("opened", [False, True], ids=["connecting", "connected"])
def test_cancelled_at_any_moment(opened: bool) -> None:
    """Some cancelled requests are held by httpcore for ever: their connections are not used again."""

    async def cancel_after(steps: int) -> bool:
        async with answering() as (url, _), aclosing(make_sender(url)) as sender:
            if opened:
                assert (await sender.send(0, 0.0, 0.0)).status == 200
            task = asyncio.create_task(sender.send(0, 0.0, 0.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            whole = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert (await sender.send(0, 0.0, 0.0)).size == len("ok")
            return whole

    whole = [asyncio.run(cancel_after(steps)) for steps in range(STEPS)]
    assert not whole[0]
    assert whole[-1]


def test_connections_are_used_again() -> None:
    """As many are open as there are requests at once."""

    async def run() -> list[int]:
        async with answering() as (url, clients), aclosing(make_sender(url)) as sender:
            for _ in range(5):
                await sender.send(0, 0.0, 0.0)
            await asyncio.gather(*(sender.send(0, 0.0, 0.0) for _ in range(3)))
            return clients

    assert len(asyncio.run(run())) == 3

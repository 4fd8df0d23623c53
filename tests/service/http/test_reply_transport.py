"""What is written for a reply arrives whole and in order, and a head does not wait for a body that is not there yet."""

from __future__ import annotations

import asyncio
import logging

from layertap.service.http.protocol import ReplyTransport

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


async def _connect() -> tuple[ReplyTransport, asyncio.StreamReader, asyncio.StreamWriter, asyncio.Server]:
    """The transport of a connection's server, and its client."""
    made: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            made.set_result(transport)

    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    transport = await made
    return ReplyTransport(transport, transport.close, 60, logging.getLogger("uvicorn.error")), reader, writer, server


def test_head_without_body() -> None:
    async def begin_reply() -> tuple[bytes, bytes]:
        transport, reader, writer, server = await _connect()
        transport.write(HEAD)
        head = await reader.readexactly(len(HEAD))  # nothing else is written until it is here
        transport.write(b"body")
        transport.close()
        body = await reader.read()
        writer.close()
        server.close()
        return head, body

    assert asyncio.run(begin_reply()) == (HEAD, b"body")

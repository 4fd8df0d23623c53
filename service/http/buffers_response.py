"""A large reply, sent piece by piece as the peer takes it: what is sent is kept no longer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from layertap.service.formats.buffers import Buffer, Buffers

SMALL = 2**16  # bytes that are copied in less time than another call of the system takes
LARGE = 2**16  # bytes that uvicorn gives away without waiting for the peer
PIECE = 2**20  # bytes that wait for the peer at a time


class BuffersResponse(Response):
    """A reply of buffers, of which the list is emptied; the next is sent when the peer has taken those before it."""

    def __init__(self, buffers: Buffers, headers: Mapping[str, str], media_type: str) -> None:
        self.status_code = 200
        self.background = None
        self._size = sum(map(len, buffers))
        self._buffers = deque(buffers)
        self.raw_headers = [(b"content-length", b"%d" % self._size), (b"content-type", media_type.encode())]
        for name, value in headers.items():
            self.raw_headers.append((name.lower().encode(), value.encode("latin-1")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; what is sent here waits until the system has taken nearly all that came before."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._size <= LARGE:
            await send({"type": "http.response.body", "body": b"".join(self._buffers)})
            return
        for piece in _cut_pieces(self._buffers):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


def _cut_pieces(buffers: deque[Buffer]) -> Iterator[Buffer]:
    """Buffers in pieces of bounded size, small ones joined; they are taken out of the queue."""
    small: list[Buffer] = []
    size = 0
    while buffers:
        buffer = buffers.popleft()
        if small and size + len(buffer) > SMALL:
            yield b"".join(small)
            small, size = [], 0
        if len(buffer) <= SMALL:
            small.append(buffer)
            size += len(buffer)
            continue
        view = memoryview(buffer)
        del buffer
        for begin in range(0, len(view), PIECE):
            yield view[begin : begin + PIECE]
        del view
    if small:
        yield b"".join(small)

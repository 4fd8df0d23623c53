"""Messages between two processes of one server: pickled, what is large in shared memory.

Only these processes write here: nothing that comes from outside is ever unpickled.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import select
import socket
import struct
import time
import traceback
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layertap.models.plain_tensor import view_bytes

HEADER = struct.Struct("=QQQ")  # bytes of the pickle, of the buffers behind it with their padding, how many these are
FLAGS = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
MAX_INLINE_BYTES = 64 * 1024  # of buffers that go through the socket; more are in memory that both processes map
ALIGNMENT = 64
LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})  # the last: closed at this end
MAX_BUFFERS_A_WRITE = 512  # the system takes 1,024 in one call


class Channel:
    """One end of a connection. One thread at a time may use it, and the two ends take turns.

    EOFError where the other end is gone, TimeoutError where it does not read or send a whole message in time: the
    connection is of no use any more then. Any other OSError is this process's own, which has no descriptor left for
    one: the other end is well, and the message was not sent, or is lost.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def send(self, message: object, descriptors: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send a message within so many seconds, and with it descriptors of files, which stay the caller's."""
        body, buffers = _pickle(message)
        sizes = [buffer.nbytes for buffer in buffers]
        payload_bytes = sum(map(_pad, sizes))
        head = HEADER.pack(len(body), payload_bytes, len(sizes)) + struct.pack(f"={len(sizes)}Q", *sizes)
        with _end_where_lost():
            if payload_bytes <= MAX_INLINE_BYTES:
                self._send(b"".join([head, body, *_align(buffers)]), descriptors, timeout)
                return
            memory = os.memfd_create("layertap", os.MFD_CLOEXEC)
            try:
                _write(memory, list(_align(buffers)))
                self._send(head + body, [*descriptors, memory], timeout)
            finally:
                os.close(memory)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message, waited for so many seconds at most; its tensors are the caller's."""
        return self.receive_with_descriptors(0, timeout)[0]

    def receive_with_descriptors(self, count: int, timeout: float | None = None) -> tuple[Any, list[int]]:
        """The next message, and the descriptors that came with it, so many at most, which are the caller's."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with _end_where_lost():
            self._wait(select.POLLIN, deadline)
            head, descriptors, _, _ = socket.recv_fds(self._socket, HEADER.size, count + 1, FLAGS)
            try:
                if len(head) < HEADER.size:
                    raise EOFError("the other process has ended")
                body_bytes, payload_bytes, buffer_count = HEADER.unpack(head)
                sizes_bytes = 8 * buffer_count
                inline_bytes = payload_bytes if payload_bytes <= MAX_INLINE_BYTES else 0
                data = self._receive(sizes_bytes + body_bytes + inline_bytes, deadline)  # each call may lose the GIL
                sizes = struct.unpack(f"={buffer_count}Q", data[:sizes_bytes])
                body, inline = data[sizes_bytes : sizes_bytes + body_bytes], data[sizes_bytes + body_bytes :]
                payload = _align_copy(inline) if inline_bytes == payload_bytes else _map(payload_bytes, descriptors)
            except BaseException:
                for each in descriptors:
                    os.close(each)
                raise
        return pickle.loads(body, buffers=_split(payload, sizes)), descriptors  # noqa: S301  (from our own processes)

    def _wait(self, event: int, deadline: float | None) -> None:
        if deadline is None:
            return
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            raise TimeoutError("the other process does not answer")

    def _send(self, data: bytes, descriptors: Sequence[int], timeout: float | None) -> None:
        rest, ancillary = memoryview(data), _attach(descriptors)
        deadline = None if timeout is None else time.monotonic() + timeout
        while rest:
            try:
                sent = self._socket.sendmsg([rest], ancillary, _choose_flags(deadline))
            except BlockingIOError:  # the socket is full; most messages are smaller than it
                self._wait(select.POLLOUT, deadline)
            else:
                rest, ancillary = rest[sent:], ()

    def _receive(self, count: int, deadline: float | None) -> memoryview:
        data = memoryview(bytearray(count))
        received = 0
        while received < count:
            try:
                more = self._socket.recv_into(data[received:], 0, _choose_flags(deadline))
            except BlockingIOError:  # its sender is in the middle of it
                self._wait(select.POLLIN, deadline)
                continue
            if not more:
                raise EOFError("the other process has ended")
            received += more
        return data


def _choose_flags(deadline: float | None) -> int:
    """For a call that waits, or for one that must not wait beyond a deadline."""
    return 0 if deadline is None else socket.MSG_DONTWAIT


def _attach(descriptors: Sequence[int]) -> Sequence[tuple[int, int, array[int]]]:
    """Descriptors as they go with the first bytes of a message."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []


def connect() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end, for another process."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(own), other


@dataclass(frozen=True)
class LargeBytes:
    """Bytes that are not copied into a message; as received, ``data`` is the memory that came with it."""

    data: bytes | memoryview


class RemoteTracebackError(Exception):
    """Where an error was raised in another process, as text."""


class _Pickler(pickle.Pickler):
    """Writes the numbers of tensors elsewhere, and of errors also what they came from."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            buffer = pickle.PickleBuffer(view_bytes(value).numpy().data)
            return _make_tensor, (value.dtype, tuple(value.shape), buffer)
        if isinstance(value, LargeBytes):
            return LargeBytes, (pickle.PickleBuffer(value.data),)
        if isinstance(value, Exception) and value.__cause__ is not None:
            lines = "".join(traceback.format_exception(value.__cause__))
            return _make_error, (type(value), value.args, vars(value), lines)
        return NotImplemented


def _pickle(message: object) -> tuple[bytes, list[memoryview]]:
    """A message without its large parts, and these."""
    buffers: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    _Pickler(body, protocol=5, buffer_callback=buffers.append).dump(message)
    return body.getvalue(), [buffer.raw() for buffer in buffers]


def _align_copy(payload: memoryview) -> memoryview:
    """The bytes in memory of their own, which begins where numbers may."""
    return memoryview(bytearray(payload))


def _map(size: int, descriptors: list[int]) -> memoryview:
    """The memory that came with a message."""
    if not descriptors:  # the system leaves out what this process has no number for
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    memory = descriptors.pop()
    try:
        return memoryview(mmap.mmap(memory, size))
    finally:
        os.close(memory)


def _make_tensor(dtype: torch.dtype, shape: tuple[int, ...], data: Any) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _make_error(kind: type[Exception], args: tuple[Any, ...], more: dict[str, Any], lines: str) -> Exception:
    error = kind(*args)
    vars(error).update(more)
    error.__cause__ = RemoteTracebackError(f"\n{lines}")
    return error


def _pad(size: int) -> int:
    return size + -size % ALIGNMENT


def _align(buffers: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Buffers with what makes each begin at a multiple of ``ALIGNMENT``."""
    for buffer in buffers:
        yield buffer
        if len(buffer) % ALIGNMENT:
            yield bytes(-len(buffer) % ALIGNMENT)


def _split(payload: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield payload[start : start + size]
        start += _pad(size)


def _write(memory: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts; a single call may write less, of 2 GiB and above."""
    for first in range(0, len(parts), MAX_BUFFERS_A_WRITE):
        group = list(parts[first : first + MAX_BUFFERS_A_WRITE])
        missing = sum(map(len, group)) - os.writev(memory, group)
        if missing:
            rest = memoryview(b"".join(group))[-missing:]
            while rest:
                rest = rest[os.write(memory, rest) :]


@contextmanager
def _end_where_lost() -> Iterator[None]:
    """EOFError for whatever the system calls a connection that one of its ends has closed."""
    try:
        yield
    except ValueError as error:  # poll's, of a socket that this end has closed
        raise EOFError("the other process has ended") from error
    except OSError as error:
        if error.errno not in LOST:
            raise
        raise EOFError("the other process has ended") from error

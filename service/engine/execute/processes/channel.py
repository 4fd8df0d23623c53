"""Messages between two processes of one server: pickled, what is large in shared memory.

Only these processes write here: nothing that comes from outside is ever unpickled.
"""

from __future__ import annotations

import asyncio
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from layertap.models.plain_tensor import view_bytes
from layertap.service.inputs.items import ImageItem

HEADER = struct.Struct("=QQQ")  # bytes of the pickle, of the buffers behind it with their padding, how many these are
FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
MAX_INLINE_BYTES = 64 * 1024  # of buffers that go through the socket; more are in memory that both processes map
LARGE_BYTES = 2**20  # of tensors and pictures: these are packed in a thread, beside the event loop
ALIGNMENT = 64
LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})  # the last: closed at this end
MAX_BUFFERS_A_WRITE = 512  # the system takes 1,024 in one call
MAX_DESCRIPTORS = 3  # that come with one message


class References(Protocol):
    """Objects that both ends know, and that cross as a number or two."""

    def take_new(self, message: object) -> Mapping[int, object]:
        """What a message refers to and the other end does not know yet, by number; from now on it does."""

    def learn(self, new: Mapping[int, object]) -> None:
        """Know what came with a message."""

    def find(self, value: object) -> Any:
        """The reference to an object; None where it crosses as it is."""

    def get(self, reference: Any) -> object:
        """The object of a reference."""


class UnsentError(Exception):
    """A message was not sent, since this process has no descriptor or no memory for it: the other end is well."""


class NoReferences:
    """For connections whose messages cross as they are."""

    def take_new(self, message: object) -> Mapping[int, object]:
        """Nothing."""
        return {}

    def learn(self, new: Mapping[int, object]) -> None:
        """Nothing is new."""

    def find(self, value: object) -> Any:
        """None: everything crosses as it is."""

    def get(self, reference: Any) -> object:
        """There are no references."""
        raise pickle.UnpicklingError(f"unknown reference {reference!r}")


class Channel:
    """One end of a connection. One thread at a time may use it, and the two ends take turns.

    EOFError where the other end is gone, TimeoutError where it does not read or send a whole message in time: the
    connection is of no use any more then. Any other OSError is this process's own, which has no descriptor left for
    one: the other end is well, and the message was not sent, or is lost.
    """

    def __init__(self, connection: socket.socket, references: References | None = None) -> None:
        self.connection = connection
        self._references = references or NoReferences()

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def send(self, message: object, descriptors: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send a message within so many seconds, and with it descriptors of files, which stay the caller's."""
        deadline = _set_deadline(timeout)
        with _end_where_lost(), closing(pack(message, self._references)) as outgoing:
            outgoing.attach(descriptors)
            while not outgoing.write(self.connection):
                self._wait(select.POLLOUT, deadline)  # the socket is full; most messages are smaller than it

    def receive(self, timeout: float | None = None) -> Any:
        """The next message, waited for so many seconds at most; its tensors are the caller's."""
        return self.receive_with_descriptors(timeout)[0]

    def receive_with_descriptors(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """The next message, and the descriptors that came with it, which are the caller's."""
        deadline, incoming = _set_deadline(timeout), Incoming()
        with _end_where_lost():
            try:
                self._wait(select.POLLIN, deadline)
                while not incoming.read(self.connection):
                    self._wait(select.POLLIN, deadline)
                return incoming.unpack(self._references), incoming.descriptors
            except BaseException:
                incoming.close()
                raise

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self.connection, event)
        if not poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000):
            raise TimeoutError("the other process does not answer")


class LoopChannel:
    """An end that the event loop reads; errors as of ``Channel``, but that callers bound the time.

    ``on_lost`` is called once the other end is gone and nobody waits for a message of it.
    """

    def __init__(self, connection: socket.socket, references: References, on_lost: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.references = references
        self._on_lost = on_lost
        self._incoming = Incoming()
        self._messages: deque[tuple[Any, Exception | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()  # set once the socket may be written to, or is lost
        self._lost = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)

    def close(self) -> None:
        """Close this end."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._incoming.close()
            self._socket.close()
        self._lost = True
        self._on_lost = _ignore  # which knows the owner: it shall not wait for the collector
        self._wake()

    @property
    def is_closed(self) -> bool:
        """Whether this end is closed."""
        return self._socket.fileno() < 0

    async def send(self, message: object, nbytes: int = 0) -> None:
        """Send a message whose tensors and pictures have about so many bytes; UnsentError."""
        with _end_where_lost():
            if self._lost:
                raise EOFError("the other process has ended")
            with closing(await self._pack(message, nbytes)) as outgoing:
                while not outgoing.write(self._socket):
                    await self._wait_for_room()

    async def receive(self) -> Any:
        """The next message; its tensors are the caller's."""
        while not self._messages:
            if self._lost:
                raise EOFError("the other process has ended")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, error = self._messages.popleft()
        if error is not None:
            raise error
        return message

    async def _pack(self, message: object, nbytes: int) -> Outgoing:
        """The message ready to be sent; what is large is packed in a thread."""
        make = partial(pack, message, self.references)
        try:
            if nbytes <= LARGE_BYTES:
                return make()
            packing = asyncio.ensure_future(asyncio.to_thread(make))
            try:
                return await asyncio.shield(packing)
            except asyncio.CancelledError:
                packing.add_done_callback(_close_packed)
                raise
        except (OSError, MemoryError) as error:
            raise UnsentError(error.strerror if isinstance(error, OSError) else "no memory") from error

    async def _wait_for_room(self) -> None:
        self._room.clear()
        self._loop.add_writer(self._socket, self._room.set)
        try:
            await self._room.wait()
        finally:
            if self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        """Take what has come; called by the loop."""
        try:
            while self._incoming.read(self._socket):
                incoming, self._incoming = self._incoming, Incoming()
                self._messages.append(self._unpack(incoming))
        except Exception:  # also where there is no memory for the message: what follows could not be told from it
            self._loop.remove_reader(self._socket)
            self._lost = True
            if self._waiter is None:
                self._on_lost()
        if self._messages or self._lost:
            self._wake()

    def _unpack(self, incoming: Incoming) -> tuple[Any, Exception | None]:
        try:
            return incoming.unpack(self.references), None
        except Exception as error:  # no descriptor, or no memory: the other end is well
            incoming.close()
            return None, error

    def _wake(self) -> None:
        if self._lost:
            self._room.set()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _ignore() -> None:
    """Of an end that is closed."""


def _close_packed(packing: asyncio.Future[Outgoing]) -> None:
    if not packing.cancelled() and packing.exception() is None:
        packing.result().close()


class Outgoing:
    """A message on its way out: its bytes, and the memory that goes with it."""

    def __init__(self, data: bytes, memory: int | None) -> None:
        self._rest = memoryview(data)
        self._memory = memory
        self._descriptors: list[int] = [] if memory is None else [memory]

    def attach(self, descriptors: Sequence[int]) -> None:
        """Send descriptors, too, which stay the caller's."""
        self._descriptors = [*descriptors, *self._descriptors]

    def write(self, connection: socket.socket) -> bool:
        """Send as much as there is room for; whether that is all."""
        while self._rest:
            try:
                sent = connection.sendmsg([self._rest], _make_ancillary(self._descriptors), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._rest, self._descriptors = self._rest[sent:], []
        return True

    def close(self) -> None:
        """Let go of the memory, which whoever received it has mapped."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None


class Incoming:
    """A message on its way in, as much of it as has come; ``descriptors`` came with it and are the reader's."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._data = memoryview(bytearray(HEADER.size))
        self._received = 0
        self._head: tuple[int, int, int] | None = None

    def read(self, connection: socket.socket) -> bool:
        """Take what has come; whether the message is whole. EOFError."""
        while True:
            while self._received < len(self._data):
                try:
                    count = self._read_some(connection)
                except BlockingIOError:
                    return False
                if not count:
                    raise EOFError("the other process has ended")
                self._received += count
            if self._head is not None:
                return True
            self._head = body_bytes, payload_bytes, count = HEADER.unpack(self._data)
            inline_bytes = payload_bytes if payload_bytes <= MAX_INLINE_BYTES else 0
            self._data, self._received = memoryview(bytearray(8 * count + body_bytes + inline_bytes)), 0

    def unpack(self, references: References) -> Any:
        """The message; OSError where this process had no number for the descriptor of its memory."""
        if self._head is None:
            raise ValueError("the message is not whole")
        body_bytes, payload_bytes, count = self._head
        sizes = struct.unpack(f"={count}Q", self._data[: 8 * count])
        body, inline = self._data[8 * count : 8 * count + body_bytes], self._data[8 * count + body_bytes :]
        payload = _align_copy(inline) if payload_bytes <= MAX_INLINE_BYTES else _map(payload_bytes, self.descriptors)
        return _unpickle(body, _split(payload, sizes), references)

    def close(self) -> None:
        """Close what came with it."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _read_some(self, connection: socket.socket) -> int:
        if self._head is not None:
            return connection.recv_into(self._data[self._received :], 0, socket.MSG_DONTWAIT)
        size = len(self._data) - self._received
        data, descriptors, _, _ = socket.recv_fds(connection, size, MAX_DESCRIPTORS, FLAGS)
        self._data[self._received : self._received + len(data)] = data
        self.descriptors += descriptors
        return len(data)


def pack(message: object, references: References) -> Outgoing:
    """A message ready to be sent, which the caller closes; OSError where there is no descriptor for its memory."""
    body, buffers = _pickle(message, references)
    sizes = [buffer.nbytes for buffer in buffers]
    payload_bytes = sum(map(_pad, sizes))
    head = HEADER.pack(len(body), payload_bytes, len(sizes)) + struct.pack(f"={len(sizes)}Q", *sizes)
    if payload_bytes <= MAX_INLINE_BYTES:
        return Outgoing(b"".join([head, body, *_align(buffers)]), None)
    memory = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        _write(memory, list(_align(buffers)))
    except BaseException:
        os.close(memory)
        raise
    return Outgoing(head + body, memory)


def connect() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end, for another process."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(own), other


class RemoteTracebackError(Exception):
    """Where an error was raised in another process, as text."""


class _Pickler(pickle.Pickler):
    """Writes the numbers of tensors and the bytes of pictures elsewhere, and of errors also what they came from."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            buffer = pickle.PickleBuffer(view_bytes(value).numpy().data)
            return _make_tensor, (value.dtype, tuple(value.shape), buffer)
        if isinstance(value, ImageItem):
            return _make_image, (pickle.PickleBuffer(value.data),)
        if isinstance(value, Exception) and value.__cause__ is not None:
            lines = "".join(traceback.format_exception(value.__cause__))
            return _make_error, (type(value), value.args, vars(value), lines)
        return NotImplemented


class _ReferringPickler(_Pickler):
    def __init__(self, references: References, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._references = references

    def persistent_id(self, value: Any) -> Any:
        return self._references.find(value)


class _ReferringUnpickler(pickle.Unpickler):
    def __init__(self, references: References, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._references = references

    def persistent_load(self, reference: Any) -> Any:
        return self._references.get(reference)


def _pickle(message: object, references: References) -> tuple[bytes, list[memoryview]]:
    """A message without its large parts, and these; in front of it what it refers to and the other end lacks."""
    buffers: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    new = references.take_new(message)
    _Pickler(body, protocol=5, buffer_callback=buffers.append).dump(new)
    _ReferringPickler(references, body, protocol=5, buffer_callback=buffers.append).dump(message)
    return body.getvalue(), [buffer.raw() for buffer in buffers]


def _unpickle(body: memoryview, buffers: Iterator[memoryview], references: References) -> Any:
    file = io.BytesIO(body)
    references.learn(pickle.Unpickler(file, buffers=buffers).load())  # noqa: S301  (from our own processes)
    return _ReferringUnpickler(references, file, buffers=buffers).load()


def _align_copy(payload: memoryview) -> memoryview:
    """A copy of the bytes that is aligned for any dtype."""
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


def _make_image(data: memoryview) -> ImageItem:
    return ImageItem(bytes(data))


def _make_error(kind: type[Exception], args: tuple[Any, ...], more: dict[str, Any], lines: str) -> Exception:
    error = kind(*args)
    vars(error).update(more)
    error.__cause__ = RemoteTracebackError(f"\n{lines}")
    return error


def _set_deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _make_ancillary(descriptors: Sequence[int]) -> Sequence[tuple[int, int, array[int]]]:
    """Descriptors as they go with the first bytes of a message."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []


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
        if isinstance(error, TimeoutError) or error.errno not in LOST:
            raise
        raise EOFError("the other process has ended") from error

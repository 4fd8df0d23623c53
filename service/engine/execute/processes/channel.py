"""Messages between two processes of one server: pickled, with large buffers in shared memory.

Only these processes write here: nothing from outside is ever unpickled.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from layertap.models.hooks.tensor_tree import view_bytes
from layertap.models.selection.hook_points import TensorData
from layertap.service.inputs.items import ImageItem

HEADER = struct.Struct("=QQQ")  # bytes of the pickle, bytes of the shared memory, number of buffers
FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
MAX_INLINE_BYTES = 64 * 1024  # of a message's buffers that stay in its pickle; more go into shared memory
LARGE_BYTES = 2**20  # of tensors and pictures: copied in a thread, so that the event loop goes on
ALIGNMENT = 64
PADDING = memoryview(bytes(ALIGNMENT))
MAX_VECTORS = os.sysconf("SC_IOV_MAX")  # of one system call
LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})  # the last: closed at this end
ANCILLARY_BYTES = socket.CMSG_SPACE(3 * array("i").itemsize)  # of the descriptors of one message
SIZE_BYTES = 8  # of one buffer's size


class References:
    """Objects that both ends know, sent as references; in this base class there are none."""

    def find(self, value: object) -> Any:
        """The reference to an object; None if the object itself is sent."""
        return None

    def get(self, reference: Any) -> object:
        """The object of a reference."""
        raise pickle.UnpicklingError(f"unknown reference {reference!r}")


class UnsentError(Exception):
    """A message was not sent because this process is out of descriptors or memory; the other end is well."""


class Channel:
    """One end of a connection. One thread at a time may use it, and the two ends take turns.

    EOFError if the other end is gone, TimeoutError if it does not read or send a whole message in time: the connection
    is unusable after either. Any other OSError means that this process is out of descriptors: the other end is well,
    and the message was not sent, or is lost.
    """

    def __init__(self, connection: socket.socket, references: References | None = None) -> None:
        self.connection = connection
        self._references = references or References()

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def send(self, message: object, descriptors: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send a message, and descriptors of files, which stay the caller's, within ``timeout`` seconds."""
        deadline = _set_deadline(timeout)
        data, buffers = _pickle(message, self._references)
        with _end_where_lost(), closing(Outgoing(data, descriptors, _share(buffers))) as outgoing:
            while not outgoing.write(self.connection):
                self._wait(select.POLLOUT, deadline)  # the socket is full; most messages are smaller than it

    def ask(self, message: object, timeout: float | None, descriptors: Sequence[int] = ()) -> Any:
        """Send a message and receive the next one, each within ``timeout`` seconds."""
        self.send(message, descriptors, timeout)
        return self.receive(timeout)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message, within ``timeout`` seconds; its tensors belong to the caller."""
        return self.receive_with_descriptors(timeout)[0]

    def receive_with_descriptors(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """The next message and the descriptors sent with it, which belong to the caller."""
        deadline, incoming = _set_deadline(timeout), Incoming()
        with _end_where_lost():
            try:
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
    """The event loop's end of a connection. Raises what ``Channel`` raises, except TimeoutError.

    One task at a time may use it. ``on_lost`` is called once the other end is gone.
    """

    def __init__(self, connection: socket.socket, references: References, on_lost: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._references = references
        self._on_lost = on_lost
        self._incoming = Incoming()
        self._messages: deque[tuple[Any, Exception | None]] = deque()
        self._changed = asyncio.Event()  # a message has arrived, the socket is writable, or the other end is gone
        self._lost = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)

    def close(self) -> None:
        """Close this end."""
        if not self.is_closed:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._incoming.close()
            self._socket.close()
        self._on_lost = lambda: None  # breaks the reference cycle with the owner
        self._lost = True
        self._changed.set()

    @property
    def is_closed(self) -> bool:
        """Whether this end is closed."""
        return self._socket.fileno() < 0

    async def send(self, message: object) -> None:
        """Send a message; UnsentError."""
        if self._lost:
            raise EOFError("the other process has ended")
        with closing(await self._pack(message)) as outgoing, _end_where_lost():
            while not outgoing.write(self._socket):
                self._loop.add_writer(self._socket, self._changed.set)
                try:
                    await self._wait()
                finally:
                    if not self.is_closed:
                        self._loop.remove_writer(self._socket)

    async def receive(self) -> Any:
        """The next message; its tensors belong to the caller."""
        while not self._messages:
            await self._wait()
        message, error = self._messages.popleft()
        if error is not None:
            raise error
        return message

    async def _pack(self, message: object) -> Outgoing:
        """The message ready to be sent; large buffers are copied in a thread."""
        try:
            data, buffers = _pickle(message, self._references)
            if sum(buffer.nbytes for buffer in buffers) <= LARGE_BYTES:
                return Outgoing(data, (), _share(buffers))
            sharing = asyncio.ensure_future(asyncio.to_thread(_share, buffers))
            try:
                return Outgoing(data, (), await asyncio.shield(sharing))
            except asyncio.CancelledError:
                sharing.add_done_callback(_close_shared)
                raise
        except (OSError, MemoryError) as error:
            raise UnsentError(error.strerror if isinstance(error, OSError) else "no memory") from error

    async def _wait(self) -> None:
        """Return once ``_changed`` is set; EOFError."""
        if self._lost:
            raise EOFError("the other process has ended")
        self._changed.clear()
        await self._changed.wait()

    def _read(self) -> None:
        """Read what has arrived; called by the loop."""
        try:
            while self._incoming.read(self._socket):
                incoming, self._incoming = self._incoming, Incoming()
                self._messages.append(self._unpack(incoming))
        except Exception:  # also if the message does not fit in memory: the start of the next one would be unknown
            self._loop.remove_reader(self._socket)
            self._lost = True
            self._on_lost()
        if self._messages or self._lost:
            self._changed.set()

    def _unpack(self, incoming: Incoming) -> tuple[Any, Exception | None]:
        try:
            return incoming.unpack(self._references), None
        except Exception as error:  # out of descriptors or memory: the other end is well
            incoming.close()
            return None, error


def _close_shared(sharing: asyncio.Future[int | None]) -> None:
    if not sharing.cancelled() and sharing.exception() is None and (memory := sharing.result()) is not None:
        os.close(memory)


class Outgoing:
    """A message being sent: its bytes, and the descriptors that go with the first of them.

    The caller's descriptors stay open; the descriptor of its ``memory`` is closed: the receiver has mapped it.
    """

    def __init__(self, data: memoryview, descriptors: Sequence[int], memory: int | None) -> None:
        self._rest = data
        self._memory = memory
        numbers = array("i", [*descriptors, *([] if memory is None else [memory])])
        self._ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if numbers else []

    def write(self, connection: socket.socket) -> bool:
        """Send as much as the socket takes; return whether the message is complete."""
        while self._rest:
            try:
                sent = connection.sendmsg([self._rest], self._ancillary, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self._rest, self._ancillary = self._rest[sent:], []
        return True

    def close(self) -> None:
        """Close the shared memory."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None


class Incoming:
    """A message being received, so far; ``descriptors`` came with it and belong to the reader."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self._data = memoryview(bytearray(HEADER.size))
        self._received = 0
        self._head: tuple[int, int, int] | None = None

    def read(self, connection: socket.socket) -> bool:
        """Read what has arrived; return whether the message is complete. EOFError."""
        while True:
            while self._received < len(self._data):
                rest = self._data[self._received :]
                try:
                    count, ancillary, _, _ = connection.recvmsg_into([rest], ANCILLARY_BYTES, FLAGS)
                except BlockingIOError:
                    return False
                if not count:
                    raise EOFError("the other process has ended")
                self._received += count
                for _, _, numbers in ancillary:
                    self.descriptors += array("i", numbers)
            if self._head is not None:
                return True
            self._head = HEADER.unpack(self._data)
            body_bytes, _, count = self._head
            self._data, self._received = memoryview(bytearray(SIZE_BYTES * count + body_bytes)), 0

    def unpack(self, references: References) -> Any:
        """The message; OSError if this process had no free descriptor for its memory."""
        if self._head is None:
            raise ValueError("the message is not whole")
        body_bytes, memory_bytes, _ = self._head
        body, sizes = self._data[:body_bytes], self._data[body_bytes:].cast("Q")
        buffers = _split(_map(memory_bytes, self.descriptors), sizes) if memory_bytes else ()
        return _Unpickler(references, io.BytesIO(body), buffers=buffers).load()

    def close(self) -> None:
        """Close the message's descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


def connect() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end for another process."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(own), other


class RemoteTracebackError(Exception):
    """The traceback of an error in another process, as text."""


class _Pickler(pickle.Pickler):
    """Pickles references, tensors' numbers and pictures' bytes; with an error also its cause."""

    def __init__(self, references: References, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, protocol=5, **options)
        self._references = references

    def reducer_override(self, value: Any) -> Any:
        # Not persistent_id, which is also called for every number and text of a message.
        if (reference := self._references.find(value)) is not None:
            return _refer, (reference,)
        if isinstance(value, Tensor):
            buffer = pickle.PickleBuffer(view_bytes(value).numpy().data)
            return _make_tensor, (value.dtype, tuple(value.shape), buffer)
        if isinstance(value, ImageItem):
            return _make_of_bytes, (ImageItem, (), pickle.PickleBuffer(value.data))
        if isinstance(value, TensorData):
            return _make_of_bytes, (TensorData, (value.shape,), pickle.PickleBuffer(value.data))
        if isinstance(value, Exception) and value.__cause__ is not None:
            lines = "".join(traceback.format_exception(value.__cause__))
            return _make_error, (type(value), value.args, vars(value), lines)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, references: References, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._references = references

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._references.get if found is _refer else found


def _refer(reference: Any) -> object:
    """In a message, stands for a call of the other end's ``References.get``."""
    raise pickle.UnpicklingError(f"unknown reference {reference!r}")


def _pickle(message: object, references: References) -> tuple[memoryview, list[memoryview]]:
    """The pickle of a message, and its buffers that are too large for it."""
    room = MAX_INLINE_BYTES
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle."""
        nonlocal room
        raw = buffer.raw()
        room -= raw.nbytes
        if room < 0:
            buffers.append(raw)
        return room >= 0

    data = io.BytesIO()
    data.seek(HEADER.size)
    _Pickler(references, data, buffer_callback=keep).dump(message)
    body_bytes, sizes = data.tell() - HEADER.size, [buffer.nbytes for buffer in buffers]
    data.write(struct.pack(f"={len(sizes)}Q", *sizes))
    data.seek(0)
    data.write(HEADER.pack(body_bytes, sum(map(_pad, sizes)), len(sizes)))
    return data.getbuffer(), buffers


def _share(buffers: Sequence[memoryview]) -> int | None:
    """Copy buffers, if any, into shared memory, each aligned to ``ALIGNMENT``; return its descriptor.

    OSError if no descriptor or no memory is left.
    """
    if not buffers:
        return None
    memory = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        rest = deque(part for each in buffers for part in (each, PADDING[: -each.nbytes % ALIGNMENT]) if part.nbytes)
        while rest:  # in few calls: other threads take their turn at each
            written = os.writev(memory, list(islice(rest, MAX_VECTORS)))
            while rest and written >= rest[0].nbytes:
                written -= rest.popleft().nbytes
            if written:
                rest[0] = rest[0][written:]
    except BaseException:
        os.close(memory)
        raise
    return memory


def _map(size: int, descriptors: list[int]) -> memoryview:
    """Map the memory that came with a message."""
    if not descriptors:  # the kernel drops descriptors when this process has no free number
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


def _make_of_bytes(make: Callable[..., object], args: tuple[Any, ...], data: bytes | memoryview) -> object:
    return make(*args, bytes(data))


def _make_error(kind: type[Exception], args: tuple[Any, ...], more: dict[str, Any], lines: str) -> Exception:
    error = kind(*args)
    vars(error).update(more)
    error.__cause__ = RemoteTracebackError(f"\n{lines}")
    return error


def _set_deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _pad(size: int) -> int:
    return size + -size % ALIGNMENT


def _split(payload: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield payload[start : start + size]
        start += _pad(size)


@contextmanager
def _end_where_lost() -> Iterator[None]:
    """EOFError for each error by which the system reports a closed connection."""
    try:
        yield
    except (OSError, ValueError) as error:  # poll raises ValueError for a socket closed at this end
        if isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno not in LOST):
            raise
        raise EOFError("the other process has ended") from error

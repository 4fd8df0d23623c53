"""Messages between two processes of one server: pickled, with large buffers in shared memory.

Only these processes write here: nothing from outside is ever unpickled.
"""

from __future__ import annotations

import copyreg
import errno
import io
import mmap
import os
import pickle
import socket
import struct
import traceback
from array import array
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from layertap.models.hooks.tensor_tree import view_bytes
from layertap.models.selection.hook_points import TensorData
from layertap.service.inputs.items import ImageItem

HEADER = struct.Struct("=QQQQ")  # bytes behind it, of these the pickle's, bytes of shared memory, number of buffers
MAX_INLINE_BYTES = 192 * 1024  # of a message's buffers that are sent behind its pickle; more go into shared memory
LARGE_BYTES = 2**20  # of buffers: copied in a thread, so that the event loop goes on
KEPT_BYTES = MAX_INLINE_BYTES + 64 * 1024  # of the buffer that a channel receives into; a longer message gets its own
ALIGNMENT = 64
PADDING = bytes(ALIGNMENT)
LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})  # the last: closed at this end
CUT = int(socket.MSG_CTRUNC)  # an integer, because operators of flags are slow
ANCILLARY_BYTES = socket.CMSG_SPACE(3 * array("i").itemsize)  # of the descriptors of one message


class Channel:
    """One end of a connection. One thread at a time may use it, and the two ends take turns.

    It blocks as its ``connection`` does. EOFError if the other end is gone, TimeoutError if it does not read or send in
    time. Any other OSError means that this process is out of descriptors or memory. The channel is unusable after
    each of them, unless it was raised by ``pack`` or ``share``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = memoryview(bytearray(KEPT_BYTES))
        self._filled = 0  # bytes of the buffer
        self._messages: list[Any] = []  # complete, not asked for yet
        self._descriptors: list[int] = []  # received, of no message yet
        self._unsent = memoryview(b"")
        self._to_send: Sequence[int] = ()  # descriptors that go with the first of the unsent bytes
        self._memory: int | None = None  # one of them: the message's own

    def close(self) -> None:
        """Close this end."""
        self.connection.close()
        self._close_memory()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def send(self, message: object, descriptors: Sequence[int] = (), timeout: float | None = None) -> None:
        """Send a message, and descriptors of files, which stay the caller's; the other end reads within ``timeout``."""
        data, buffers = pack(message)
        self._set_timeout(timeout)
        if not self.write(data, share(buffers) if buffers else None, descriptors):
            raise TimeoutError("the other process does not answer")

    def ask(self, message: object, timeout: float | None, descriptors: Sequence[int] = ()) -> Any:
        """Send a message and receive the next one."""
        self.send(message, descriptors, timeout)
        return self.receive(timeout)

    def wait(self) -> None:
        """Return once a message begins to arrive, on a socket that blocks; EOFError."""
        if not self._messages and not self._filled and not self.connection.recv(1, socket.MSG_PEEK):
            raise EOFError("the other process has ended")

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; its tensors belong to the caller."""
        self._set_timeout(timeout)
        while not self._messages:
            try:
                self._messages += self.read()
            except BlockingIOError as error:
                raise TimeoutError("the other process does not answer") from error
        return self._messages.pop(0)

    def receive_with_descriptors(self) -> tuple[Any, list[int]]:
        """The next message and the descriptors sent with it, which belong to the caller."""
        message = self.receive()
        descriptors, self._descriptors = self._descriptors, []
        return message, descriptors

    def write(self, data: memoryview, memory: int | None = None, descriptors: Sequence[int] = ()) -> bool:
        """Begin to send what ``pack`` returned, with its memory, which is closed; as ``flush``."""
        self._unsent, self._memory = data, memory
        self._to_send = descriptors if memory is None else (memory, *descriptors)
        return self.flush()

    def flush(self) -> bool:
        """Send the rest of a message; whether all of it is sent. False only for a socket that does not block."""
        try:
            while self._unsent:
                if self._to_send:
                    sent = socket.send_fds(self.connection, [self._unsent], list(self._to_send))
                    self._to_send = ()
                    self._close_memory()
                else:
                    sent = self.connection.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return False
        except OSError as error:
            _check_connected(error)
            raise
        return True

    def read(self) -> list[Any]:
        """Receive once: the messages that are complete by now. BlockingIOError from a socket that does not block."""
        try:
            count, ancillary, flags, _ = self.connection.recvmsg_into(
                [self._buffer[self._filled :]], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            _check_connected(error)
            raise
        if not count:
            raise EOFError("the other process has ended")
        for _, _, numbers in ancillary:
            self._descriptors += array("i", numbers)
        if flags & CUT:  # the kernel drops descriptors when this process has no free number
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._filled += count
        messages, start = list[Any](), 0
        while self._filled - start >= HEADER.size:
            rest, *sizes = HEADER.unpack_from(self._buffer, start)
            stop = start + HEADER.size + rest
            if stop > self._filled:
                self._keep(start, stop - start)
                return messages
            messages.append(self._unpack(self._buffer[start + HEADER.size : stop], *sizes))
            start = stop
        self._keep(start, HEADER.size)
        return messages

    def _keep(self, start: int, needed: int) -> None:
        """Move what is left of the buffer to its start, in a buffer that has the bytes needed."""
        rest = self._buffer[start : self._filled]
        self._filled -= start
        if needed > len(self._buffer) or (not rest and len(self._buffer) > KEPT_BYTES):
            self._buffer = memoryview(bytearray(max(needed, KEPT_BYTES)))
        if rest and (start or rest.obj is not self._buffer.obj):
            self._buffer[: len(rest)] = rest

    def _unpack(self, body: memoryview, pickle_bytes: int, memory_bytes: int, count: int) -> Any:
        if not count:
            return pickle.loads(body)  # noqa: S301  (of our own processes)
        if memory_bytes:
            memory = self._descriptors.pop(0)
            try:
                payload = memoryview(mmap.mmap(memory, memory_bytes))
            finally:
                os.close(memory)
        else:
            payload = memoryview(bytearray(body[pickle_bytes + 8 * count :]))
        buffers, start = [], 0
        for size in struct.unpack_from(f"={count}Q", body, pickle_bytes):
            buffers.append(payload[start : start + size])
            start += size + -size % ALIGNMENT
        return pickle.loads(body[:pickle_bytes], buffers=buffers)  # noqa: S301  (of our own processes)

    def _set_timeout(self, timeout: float | None) -> None:
        if self.connection.gettimeout() != timeout:
            self.connection.settimeout(timeout)

    def _close_memory(self) -> None:
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None


def connect() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end for another process."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for each in (own, other):  # so that most messages are sent at once
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KEPT_BYTES)
    return Channel(own), other


def pack(message: object) -> tuple[memoryview, list[memoryview]]:
    """A message for ``Channel.write``, and its buffers that are too large for it: to be copied by ``share``."""
    data, pickled = io.BytesIO(bytes(HEADER.size)), list[pickle.PickleBuffer]()
    data.seek(HEADER.size)
    pickler = pickle.Pickler(data, 5, buffer_callback=pickled.append)
    pickler.dispatch_table = _reducers
    pickler.dump(message)
    pickle_bytes, memory_bytes, buffers = data.tell() - HEADER.size, 0, list[memoryview]()
    if pickled:
        sizes = array("Q")
        for each in pickled:
            buffers.append(raw := each.raw())
            sizes.append(raw.nbytes)
            memory_bytes += raw.nbytes + -raw.nbytes % ALIGNMENT
        data.write(sizes)
        if memory_bytes <= MAX_INLINE_BYTES:
            _write(data, buffers)
            buffers, memory_bytes = [], 0
    body_bytes = data.tell() - HEADER.size
    data.seek(0)
    data.write(HEADER.pack(body_bytes, pickle_bytes, memory_bytes, len(pickled)))
    return data.getbuffer(), buffers


def share(buffers: Sequence[memoryview]) -> int:
    """Copy buffers into shared memory; return its descriptor. OSError if no descriptor or no memory is left."""
    memory = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", LARGE_BYTES, closefd=False) as file:  # in few calls: other threads wait at each
            _write(file, buffers)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _write(file: BinaryIO, buffers: Sequence[memoryview]) -> None:
    """Write buffers, each aligned to ``ALIGNMENT``."""
    for each in buffers:
        file.write(each)
        file.write(PADDING[: -each.nbytes % ALIGNMENT])


class RemoteTracebackError(Exception):
    """The traceback of an error in another process, as text."""


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How objects are pickled, by their type: those of which a base class has a function, and as everywhere."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        base = next((base for base in (Tensor, Exception) if issubclass(kind, base)), None)
        return copyreg.dispatch_table[kind] if base is None else self[base]


def _reduce_tensor(value: Tensor) -> tuple[Any, ...]:
    return _make_tensor, (value.dtype, tuple(value.shape), pickle.PickleBuffer(view_bytes(value).numpy().data))


def _reduce_error(error: Exception) -> Any:
    """Of an error's cause only the text is sent."""
    if error.__cause__ is None:
        return error.__reduce_ex__(5)
    lines = "".join(traceback.format_exception(error.__cause__))
    return _make_error, (type(error), error.args, vars(error), lines)


def _reduce_bytes(value: ImageItem | TensorData) -> tuple[Any, ...]:
    shape = (value.shape,) if isinstance(value, TensorData) else ()
    return _make_of_bytes, (type(value), shape, pickle.PickleBuffer(value.data))


_reducers = _Reducers(
    {Tensor: _reduce_tensor, Exception: _reduce_error, ImageItem: _reduce_bytes, TensorData: _reduce_bytes}
)


def _make_tensor(dtype: torch.dtype, shape: tuple[int, ...], data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _make_error(kind: type[Exception], args: tuple[Any, ...], more: dict[str, Any], lines: str) -> Exception:
    error = kind(*args)
    vars(error).update(more)
    error.__cause__ = RemoteTracebackError(f"\n{lines}")
    return error


def _make_of_bytes(kind: Callable[..., object], shape: tuple[Any, ...], data: memoryview) -> object:
    return kind(*shape, bytes(data))


def _check_connected(error: OSError) -> None:
    """EOFError for each error by which the system reports a closed connection."""
    if error.errno in LOST:
        raise EOFError("the other process has ended") from error

"""Messages between two processes of one server: pickled, one packet each; large ones are in shared memory.

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
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from layertap.models.devices.transfer import view_bytes
from layertap.models.plan.requested import TensorData
from layertap.service.inputs.items import EncodedItem

MAX_PACKET_BYTES = 192 * 1024  # Linux lets a socket send 208 KiB at once, unless it is set up otherwise
IN_MEMORY = b"\x00"  # the packet of a message that is in shared memory
ALIGNMENT = 64
LOST = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF})  # the last: closed at this end
CUT = int(socket.MSG_CTRUNC)  # an integer, because operators of flags are slow
Data = Any  # bytes, or a PickleBuffer that arrives as a memoryview
SentArray = tuple[str, tuple[int, ...], Data]  # dtype, shape
ANCILLARY_BYTES = socket.CMSG_SPACE(3 * array("i").itemsize)  # of the descriptors of one message


class Channel:
    """One end of a connection. One thread at a time may use it, and the two ends take turns.

    It blocks as its ``connection`` does. EOFError if the other end is gone, TimeoutError if it does not send in time.
    Any other OSError means that this process is out of descriptors or memory.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = memoryview(bytearray(MAX_PACKET_BYTES))

    def close(self) -> None:
        """Close this end."""
        self.connection.close()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors of files, which stay the caller's."""
        parts, size = pack(message)
        if size <= MAX_PACKET_BYTES:
            self.write(parts, descriptors)
        else:
            self.write_memory(share(parts), descriptors)

    def write(self, parts: Sequence[bytes | memoryview], descriptors: Sequence[int] = ()) -> None:
        """Send a packet of these parts."""
        try:
            if descriptors:
                socket.send_fds(self.connection, parts, list(descriptors))
            else:
                self.connection.sendmsg(parts)
        except OSError as error:
            _check_connected(error)
            raise

    def write_memory(self, memory: int, descriptors: Sequence[int] = ()) -> None:
        """Send the memory of ``share``, and close it."""
        try:
            self.write([IN_MEMORY], (memory, *descriptors))
        finally:
            os.close(memory)

    def wait(self) -> None:
        """Return once a message has arrived, or the other end is gone, on a socket that blocks."""
        with suppress(ConnectionError):
            self.connection.recv(1, socket.MSG_PEEK)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message, waited for; its tensors belong to the caller."""
        if self.connection.gettimeout() != timeout:
            self.connection.settimeout(timeout)
        try:
            return self.read()[0]
        except BlockingIOError as error:
            raise TimeoutError("the other process does not answer") from error

    def read(self) -> tuple[Any, list[int]]:
        """The next message, and the descriptors that came with it, which belong to the caller."""
        try:
            count, ancillary, flags, _ = self.connection.recvmsg_into(
                [self._buffer], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            _check_connected(error)
            raise
        if not count:
            raise EOFError("the other process has ended")
        descriptors = list(array("i", ancillary[0][2])) if ancillary else []
        if flags & CUT:  # the kernel drops descriptors when this process has no free number
            for each in descriptors:
                os.close(each)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if count > len(IN_MEMORY):
            packet = self._buffer[:count]
            if not packet[0]:  # the message's buffers stay in use; a pickle alone is copied as it is read
                packet = memoryview(bytearray(packet))
            return _unpack(packet), descriptors
        memory = descriptors.pop(0)
        try:
            return _unpack(memoryview(mmap.mmap(memory, 0))), descriptors
        finally:
            os.close(memory)


def connect() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end for another process."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (own, other):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_PACKET_BYTES)  # the kernel doubles it
    return Channel(own), other


def pack(message: object, reducers: Reducers | None = None) -> tuple[list[bytes | memoryview], int]:
    """The parts of a message, and their bytes: its pickle, and before that its buffers and their sizes, if it has any.

    They are sent as a packet, or copied by ``share`` if they are more than ``MAX_PACKET_BYTES``.
    """
    data, pickled = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = pickle.Pickler(data, 5, buffer_callback=pickled.append)
    pickler.dispatch_table = _reducers if reducers is None else reducers
    pickler.dump(message)
    if not pickled:
        return [data.getbuffer()], data.tell()
    buffers = list(map(pickle.PickleBuffer.raw, pickled))
    sizes = struct.pack(f"=4xI{len(buffers)}Q", len(buffers), *map(len, buffers))
    parts: list[bytes | memoryview] = []
    for part in (memoryview(sizes), *buffers):
        parts += part, bytes(-len(part) % ALIGNMENT)
    parts.append(data.getbuffer())
    size = sum(map(len, parts))
    return parts if size > MAX_PACKET_BYTES else [b"".join(parts)], size  # a packet may have 1,024 parts


def pack_data(data: bytes) -> Data:
    """Bytes as part of a message's pickle; those too large for a packet are copied into shared memory beside it."""
    return data if len(data) < MAX_PACKET_BYTES else pickle.PickleBuffer(data)


def pack_array(array: npt.NDArray[Any]) -> SentArray:
    """A C-contiguous array as part of a message; as ``pack_data``."""
    data: Data = array.tobytes() if array.nbytes < MAX_PACKET_BYTES else pickle.PickleBuffer(array.data)
    return array.dtype.str, array.shape, data


def unpack_array(sent: SentArray) -> npt.NDArray[Any]:
    """The array of ``pack_array``: read-only, or in the message's shared memory."""
    dtype, shape, data = sent
    return np.frombuffer(data, dtype).reshape(shape)


def share(parts: Sequence[bytes | memoryview]) -> int:
    """Copy a message into shared memory; return its descriptor. OSError if no descriptor or no memory is left."""
    memory = os.memfd_create("layertap", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.writelines(parts)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _unpack(parts: memoryview) -> Any:
    """The message in these joined parts."""
    if parts[0]:  # a pickle; sizes begin with zeros
        return pickle.loads(parts)  # noqa: S301  (of our own processes)
    (count,) = struct.unpack_from("=4xI", parts)
    sizes = struct.unpack_from(f"={count}Q", parts, 8)
    buffers, start = [], 8 + 8 * count
    for size in sizes:
        start += -start % ALIGNMENT
        buffers.append(parts[start : start + size])
        start += size
    return pickle.loads(parts[start + -start % ALIGNMENT :], buffers=buffers)  # noqa: S301  (of our own processes)


class RemoteTracebackError(Exception):
    """The traceback of an error in another process, as text."""


class Reducers(dict[type, Callable[[Any], Any]]):
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


def _reduce_bytes(value: EncodedItem | TensorData) -> tuple[Any, ...]:
    before, after = ((value.shape,), (value.kept,)) if isinstance(value, TensorData) else ((), ())
    return _make_of_bytes, (type(value), before, pickle.PickleBuffer(value.data), *after)


_reducers = Reducers(
    {Tensor: _reduce_tensor, Exception: _reduce_error, EncodedItem: _reduce_bytes, TensorData: _reduce_bytes}
)
_received: list[Any] = []  # tensors that the process at the other end numbers


def make_reducers(find_number: Callable[[TensorData], tuple[int, bool]]) -> Reducers:
    """Reducers by which a tensor that is kept is sent once, and then as its number.

    ``find_number`` also says whether it is new; one with number 0 replaces all earlier ones.
    """

    def reduce_data(value: TensorData) -> tuple[Any, ...]:
        if not value.kept:
            return _reduce_bytes(value)
        number, is_new = find_number(value)
        return _receive, (number, *_reduce_bytes(value)[1]) if is_new else (number,)

    return Reducers({**_reducers, TensorData: reduce_data})


def _receive(number: int, *parts: Any) -> Any:
    if parts and not number:
        _received.clear()
    if parts:
        _received.append(_make_of_bytes(*parts))
    return _received[number]


def _make_tensor(dtype: torch.dtype, shape: tuple[int, ...], data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _make_error(kind: type[Exception], args: tuple[Any, ...], more: dict[str, Any], lines: str) -> Exception:
    error = kind(*args)
    vars(error).update(more)
    error.__cause__ = RemoteTracebackError(f"\n{lines}")
    return error


def _make_of_bytes(kind: Callable[..., object], before: tuple[Any, ...], data: memoryview, *after: Any) -> object:
    return kind(*before, bytes(data), *after)


def _check_connected(error: OSError) -> None:
    """EOFError for each error by which the system reports a closed connection."""
    if error.errno in LOST:
        raise EOFError("the other process has ended") from error

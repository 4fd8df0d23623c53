"""Messages between processes: what is sent arrives, and who is gone is told of."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.errors import Fault, InputError
from layertap.service.engine.execute.processes.channel import MAX_PACKET_BYTES, Channel, connect
from layertap.service.engine.execute.processes.progress import create_progress
from layertap.service.engine.execute.processes.worker_process import ModelLostError, PendingMessage, WorkerProcess
from layertap.service.errors import ForwardError
from layertap.service.inputs.items import EncodedItem

LONG_S = 60.0


def send_and_receive(message: object) -> Any:
    channel, connection = connect()
    other = Channel(connection)
    with ThreadPoolExecutor(1) as pool:  # a socket holds less than a large message has
        sending = pool.submit(channel.send, message)
        try:
            return other.receive()
        finally:
            sending.result()
            channel.close()
            other.close()


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (2, 3, 5), (3, MAX_PACKET_BYTES)], ids=str)
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A tensor arrives bit for bit, small or large, in any memory layout, and may be written to."""
    sent = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    view = torch.stack([sent, sent], -1)[..., 1]
    received, other = send_and_receive([sent, view])
    for each in (received, other):
        assert (each.dtype, each.shape) == (dtype, sent.shape)
        assert torch.equal(each, sent)
    received.zero_()
    assert torch.equal(other, sent)


def test_many_small_buffers() -> None:
    """A packet may have more buffers than the system sends at once."""
    sent = [torch.tensor([number]) for number in range(1500)]
    assert torch.equal(torch.cat(send_and_receive(sent)), torch.cat(sent))


def test_kept_arrays() -> None:
    """What came with a message stays as it is when the next one comes."""
    channel, connection = connect()
    other = Channel(connection)
    received = []
    for number in (1, 2):
        channel.send(np.full(8, number))
        received.append(other.receive())
    channel.close()
    other.close()
    assert [each.tolist() for each in received] == [[1] * 8, [2] * 8]


def test_errors() -> None:
    """An error of the tree keeps what it says; of another's cause only the text is left."""
    refusal = InputError("no", hint="yes", faults=(Fault("no", "yes", "/inputs/0", 0),))
    received = send_and_receive(refusal)
    assert (type(received), received.detail, received.hint, received.faults) == (
        InputError,
        "no",
        "yes",
        refusal.faults,
    )
    raised = ForwardError("the model raised it")
    raised.__cause__ = ZeroDivisionError("in there")
    received = send_and_receive(raised)
    assert type(received) is ForwardError
    assert "ZeroDivisionError: in there" in str(received.__cause__)


@pytest.mark.parametrize("count", [1, MAX_PACKET_BYTES], ids=["packet", "memory"])
def test_descriptors(count: int) -> None:
    """Descriptors of files come along with a message, also beside the memory of a large one."""
    channel, connection = connect()
    other = Channel(connection)
    reader, writer = os.pipe()
    sent = torch.arange(count)
    channel.send(sent, [writer])
    os.close(writer)
    received, (descriptor,) = other.read()
    assert torch.equal(received, sent)
    os.write(descriptor, b"x")
    os.close(descriptor)
    assert os.read(reader, 2) == b"x"
    os.close(reader)
    channel.close()
    other.close()


def test_other_end() -> None:
    """Who says nothing in time is told from who is gone."""
    channel, connection = connect()
    with pytest.raises(TimeoutError):
        channel.receive(0.0)
    connection.close()
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(EOFError):
        channel.send("x")
    channel.close()
    with pytest.raises(EOFError):
        channel.send("x")


def test_one_after_the_other() -> None:
    """Each message that arrives is read alone; a socket that does not block waits for none."""
    large = torch.arange(MAX_PACKET_BYTES)
    channel, connection = connect()
    other = Channel(connection)
    for message in ("a", large, bytes(MAX_PACKET_BYTES), "b"):
        channel.send(message)
    connection.setblocking(False)
    first, second, third, fourth = (other.read()[0] for _ in range(4))
    assert (first, len(third), fourth) == ("a", MAX_PACKET_BYTES, "b")
    assert torch.equal(second, large)
    with pytest.raises(BlockingIOError):
        other.read()
    channel.close()
    with pytest.raises(EOFError):
        other.read()
    other.close()


def test_longest_packet() -> None:
    """A packet of every length is sent by a socket that does not block, as the event loop's, and by one that does."""
    channel, connection = connect()
    other = Channel(connection)
    for blocking in (False, True):
        channel.connection.setblocking(blocking)
        for length in range(MAX_PACKET_BYTES - 300, MAX_PACKET_BYTES + 3):
            channel.send(EncodedItem(bytes(length)))
            assert other.receive() == EncodedItem(bytes(length))
    channel.close()
    other.close()


def test_no_free_descriptor() -> None:
    """Memory of a message that this process has no number for is an error, and not another message's memory."""
    channel, connection = connect()
    other = Channel(connection)
    channel.send(torch.arange(MAX_PACKET_BYTES))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            other.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    channel.close()
    other.close()


def settle(worker: WorkerProcess, ended: str, pending: PendingMessage | None, outcome: Any) -> None:
    """What a pool does with a message that has its outcome."""
    if pending is not None:
        pending.settle(outcome)


def test_message_that_cannot_be_sent() -> None:
    """A worker whose message can't be pickled is free again, and the message has the error."""
    channel, other = connect()
    progress, memory = create_progress()
    os.close(memory)
    freed = []

    async def ask() -> object:
        worker = WorkerProcess(0, channel, progress)
        worker.start(lambda *given: (freed.append(given[:2]), settle(*given))[1])
        exchange = PendingMessage(("call", lambda model: model), math.inf)
        worker.ask(exchange)
        assert freed == [(worker, "")]
        async with asyncio.timeout(LONG_S):
            return await exchange.result

    try:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            asyncio.run(ask())
    finally:
        channel.close()
        other.close()


@pytest.mark.parametrize("size", [10, 2 * MAX_PACKET_BYTES])
def test_asked_when_it_is_closed(size: int) -> None:
    """A worker that has ended says so to whoever asks it, also if the message is so large that a thread copies it."""
    channel, other = connect()
    progress, memory = create_progress()
    os.close(memory)
    ended = subprocess.Popen([sys.executable, "-c", ""])

    async def ask() -> object:
        worker = WorkerProcess(ended.pid, channel, progress)
        worker.start(settle)
        worker.close()
        exchange = PendingMessage(("decode", [EncodedItem(bytes(size))]), math.inf)
        worker.ask(exchange)
        async with asyncio.timeout(LONG_S):
            return await exchange.result

    try:
        with pytest.raises(ModelLostError):
            asyncio.run(ask())
    finally:
        other.close()
        ended.wait()

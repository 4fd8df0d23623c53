"""Messages between processes: what is sent arrives, and who is gone is told of."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from layertap.models.errors import Fault, InputError
from layertap.service.engine.execute.processes.channel import (
    MAX_INLINE_BYTES,
    Channel,
    LoopChannel,
    References,
    connect,
)
from layertap.service.errors import ForwardError


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
@pytest.mark.parametrize("shape", [(), (2, 3, 5), (3, MAX_INLINE_BYTES)], ids=str)
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


def test_descriptors() -> None:
    """Descriptors of files come along with a message, beside the memory of its tensors."""
    channel, connection = connect()
    other = Channel(connection)
    reader, writer = os.pipe()
    large = torch.arange(MAX_INLINE_BYTES)
    channel.send(large, [writer])
    os.close(writer)
    received, (descriptor,) = other.receive_with_descriptors()
    assert torch.equal(received, large)
    os.write(descriptor, b"x")
    os.close(descriptor)
    assert os.read(reader, 2) == b"x"
    os.close(reader)
    channel.close()
    other.close()


def test_other_end() -> None:
    """Who says nothing in time is told from who is gone; a message whose sender dies in the middle is none."""
    channel, connection = connect()
    with pytest.raises(TimeoutError):
        channel.receive(0.0)
    connection.sendall(b"\x01")
    connection.close()
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(EOFError):
        channel.send("x")
    channel.close()
    with pytest.raises(EOFError):
        channel.send("x")


def test_nobody_reads() -> None:
    """A message that a socket does not hold is given up where the other end does not read it in time."""
    channel, connection = connect()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(channel.send, bytes(2**24), timeout=0.0)
        try:
            with pytest.raises(TimeoutError, match="does not answer"):  # which is not that of ``result``
                sending.result(10.0)
        finally:
            connection.close()
            channel.close()


class Numbers(References):
    """References of one end of a connection: to a value that both ends know."""

    def __init__(self) -> None:
        self.value = object()

    def find(self, value: object) -> int | None:
        return 7 if value is self.value else None

    def get(self, reference: int) -> object:
        assert reference == 7
        return self.value


def test_loop() -> None:
    """The event loop reads messages one by one, small and large, with what both ends know, until the other is gone."""
    large = torch.arange(MAX_INLINE_BYTES)

    async def receive() -> list[Any]:
        lost = asyncio.Event()
        other, connection = connect()
        own, others = Numbers(), Numbers()
        other = Channel(other.connection, others)
        channel = LoopChannel(connection, own, lost.set)
        await asyncio.to_thread(other.send, ["a", others.value])
        await asyncio.to_thread(other.send, large)
        found = [await channel.receive(), await channel.receive()]
        sending = asyncio.create_task(channel.send(large))
        found.append(await asyncio.to_thread(other.receive))
        await sending
        other.close()
        await lost.wait()
        with pytest.raises(EOFError):
            await channel.receive()
        with pytest.raises(EOFError):
            await channel.send("x")
        assert found[0][1] is own.value
        channel.close()
        return found

    first, second, third = asyncio.run(receive())
    assert first[0] == "a"
    assert torch.equal(second, large)
    assert torch.equal(third, large)

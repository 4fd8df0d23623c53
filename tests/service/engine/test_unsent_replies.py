"""Room for replies that are being sent: the slowest reader makes place, nobody new is refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from layertap.service.engine.admit.unsent_replies import PATIENCE_S, UnsentReplies

LIMIT = 100


@dataclass
class Peer:
    """A reader that has taken so many bytes."""

    taken: int = 0
    cuts: list[int] = field(default_factory=list)

    def count_taken(self) -> int:
        """Bytes so far."""
        return self.taken

    def cut(self) -> None:
        """Note how many had been taken."""
        self.cuts.append(self.taken)


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def test_slowest_is_cut() -> None:
    """Where there is no room, it is made by the slowest reader for the time that each has had; then by the next."""

    async def run() -> None:
        clock = Clock()
        replies = UnsentReplies(LIMIT, clock)
        old, slow, quick = Peer(), Peer(taken=500), Peer()
        await replies.add(30, old)
        clock.now = 90.0
        await replies.add(30, slow)
        await replies.add(30, quick)
        clock.now = 100.0
        old.taken, slow.taken, quick.taken = 100, 505, 50  # 1, 0.5 and 5 a second
        added = await replies.add(40, Peer())
        assert [len(each.cuts) for each in (old, slow, quick)] == [0, 1, 0]
        assert replies.used_bytes == LIMIT
        replies.remove(added)
        await replies.add(70, Peer())
        assert [len(each.cuts) for each in (old, slow, quick)] == [1, 1, 0]

    asyncio.run(run())


def test_young_replies_are_waited_for() -> None:
    """A reply that has just begun is not cut: the next one waits until it is sent; nobody overtakes."""

    async def run() -> None:
        replies = UnsentReplies(LIMIT, Clock())
        first = Peer()
        sent = await replies.add(80, first)
        order: list[str] = []

        async def add(name: str, size: int) -> None:
            await replies.add(size, Peer())
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(add("large", 90))
            tasks.create_task(add("small", 10))
            await asyncio.sleep(0)
            assert order == []
            replies.remove(sent)
        assert order == ["large", "small"]
        assert first.cuts == []
        replies.remove(sent)  # once is enough
        assert replies.used_bytes == LIMIT

    asyncio.run(run())


def test_one_larger_than_all() -> None:
    """A reply that is larger than the limit has the room alone."""

    async def run() -> None:
        clock = Clock()
        replies = UnsentReplies(LIMIT, clock)
        other = Peer()
        await replies.add(1, other)
        clock.now = PATIENCE_S
        large = await replies.add(2 * LIMIT, Peer())
        assert len(other.cuts) == 1
        replies.remove(large)
        assert replies.used_bytes == 0

    asyncio.run(run())

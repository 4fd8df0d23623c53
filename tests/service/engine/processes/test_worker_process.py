"""The event loop's end of a worker, beside a worker that does what it should not."""

from __future__ import annotations

import asyncio

from layertap.service.engine.execute.processes.channel import Channel, connect
from layertap.service.engine.execute.processes.progress import Progress
from layertap.service.engine.execute.processes.worker_process import WorkerProcess


def test_answer_without_a_question() -> None:
    """A worker that answers what nobody has asked is replaced: it does not become idle once more."""

    async def answer() -> str:
        channel, connection = connect()
        worker, reason = WorkerProcess(0, channel, Progress()), asyncio.get_running_loop().create_future()
        worker.start(lambda worker, ended, pending, outcome: reason.set_result(ended))
        other = Channel(connection)
        other.send(("answer", None))
        found: str = await reason
        worker.close()
        other.close()
        return found

    assert asyncio.run(answer()) == "failure"

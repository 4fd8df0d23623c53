"""Very many requests at once, of all kinds: nobody sees another's data, and nothing is left behind.

The server is a process of its own. What a reply must hold is computed here, by hooks that copy at once on modules
that the service has never touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import torch

from tests.service.gated_server import encode_request, wait_until
from tests.service.load_nets import SERVED
from tests.service.load_requests import Asked, Leave, asked
from tests.service.load_server import Process, Usage, process
from tests.service.support import problem

CONCURRENCY = 64
AT_ONCE = 500  # requests whose replies are held until they are compared
WARM_UP = 250
MAX_GROWTH = 50 * 2**20  # bytes of one process
LATE_THREADS = 32  # a pool starts them when it first has so much to do at once, which the warm-up need not bring
TIMEOUT_S = 120
IDLE_S = 2  # a connection idle for longer is not used again: the server may be closing it
SHOWN = 5

Answer = httpx.Response | httpx.HTTPError | None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at the server's process in /proc")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "workers"), [(150, "0"), pytest.param(10_000, "2", marks=pytest.mark.hard)])
def test_load(tmp_path: Path, count: int, workers: str) -> None:
    """Each of the requests is answered with its own rows or its own error, whoever shares a forward with it."""
    with process([served.spec(tmp_path) for served in SERVED], tmp_path, LAYERTAP_WORKERS=workers) as server:
        idle = server.usage()
        _check(server, 1, min(count, WARM_UP))
        _settle(server, idle.descriptors, None)
        warm = server.usage()
        _check(server, 2, count)
        _settle(server, idle.descriptors, warm.threads + LATE_THREADS)
        grown = max(held - warm.memory[pid] for pid, held in server.usage().memory.items())
        assert grown <= MAX_GROWTH, f"{grown / 2**20:.0f} MiB more in one process than after the warm-up"
        assert [line for line in server.logged() if line["level"] in ("error", "critical")] == []
        assert server.end() == 0


def _check(server: Process, seed: int, count: int) -> None:
    """Send the requests of a seed and compare every answer."""
    faults: list[str] = []
    for start in range(0, count, AT_ONCE):
        requests = [asked(seed, number) for number in range(start, min(start + AT_ONCE, count))]
        received = asyncio.run(answers(server.url, requests))
        with one_thread():
            found = [wrong(request, answer) for request, answer in zip(requests, received, strict=True)]
        for request, fault in zip(requests, found, strict=True):
            if fault:
                faults.append(f"{request}\n  {fault}")
    shown = "\n".join(faults[:SHOWN])
    assert not faults, f"{len(faults)} of {count} answers are wrong, such as\n{shown}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Small forwards take longest where threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


async def answers(url: str, requests: Sequence[Asked]) -> list[Answer]:
    """What comes back for each request, so many of them at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY, keepalive_expiry=IDLE_S)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(request: Asked) -> Answer:
            sent = {**request.arguments}
            sent["headers"] = {**sent.get("headers", {}), "x-request-id": request.name}
            built = client.build_request("POST", "/extract", **sent)
            async with gate:
                if request.leave:
                    return await _left(built, request.leave)
                try:
                    return await client.send(built)
                except httpx.HTTPError as error:
                    return error

        return await asyncio.gather(*map(one, requests))


async def _left(request: httpx.Request, leave: Leave) -> None:
    """Send a request, or a part of it, and close the connection without waiting for the answer."""
    data = encode_request(request)
    _, writer = await asyncio.open_connection(request.url.host, request.url.port)
    writer.write(data[: int(len(data) * leave.sent)])
    await asyncio.sleep(leave.stays_s)
    if leave.abrupt:
        writer.transport.abort()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def wrong(request: Asked, answer: Answer) -> str:
    """What is wrong with an answer; nothing where all is well."""
    if answer is None:
        return ""
    if isinstance(answer, httpx.HTTPError):
        return f"no answer: {answer!r}"
    if answer.status_code != request.status:
        return f"status {answer.status_code}, not {request.status}: {answer.text[:500]}"
    if answer.headers["x-request-id"] != request.name:
        return f"this is the answer to request {answer.headers['x-request-id']}"
    if request.status != 200:
        problem(answer, request.status)
        return ""
    return request.find_fault(answer)


def _settle(server: Process, descriptors: int, threads: int | None) -> None:
    """Wait until nothing is left of what was sent: no hook, no connection, no thread more than allowed."""

    def quiet(usage: Usage) -> bool:
        return usage.descriptors <= descriptors and (threads is None or usage.threads <= threads)

    try:
        wait_until(lambda: not any(server.hooks().values()) and quiet(server.usage()))
    except AssertionError:
        left = f"{server.hooks()}, {server.usage()}"
        raise AssertionError(f"not back to {descriptors} descriptors, {threads} threads: {left}") from None

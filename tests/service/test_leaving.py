"""Very many clients that do not wait for their answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.gated_server import encode_request, wait_until
from tests.service.load_server import Process, process
from tests.service.server_process import build_row_request, fatal_model_spec, send_when_accepted

STAYS_S = 0.01
CLIENTS = 1000
MOST = 0.05  # of the rows
REACHED = 500  # the others left before the server looked


def total(server: Process, name: str) -> float:
    """The sum of a figure over all its labels."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return sum(each.value for family in families for each in family.samples if each.name == f"layertap_{name}")


def left_behind(server: Process) -> int:
    """Requests whose clients were gone when there was an answer."""
    return sum(line.get("status") == 499 for line in server.logged())


async def left(request: httpx.Request) -> None:
    """Send a request, stay for a moment, and go."""
    with suppress(ConnectionError):
        _, writer = await asyncio.open_connection(request.url.host, request.url.port)
        writer.write(encode_request(request))
        await asyncio.sleep(STAYS_S)
        writer.transport.abort()


async def crowd(request: httpx.Request, count: int) -> None:
    """So many clients at once."""
    await asyncio.gather(*(left(request) for _ in range(count)))


@pytest.mark.hard
def test_clients_that_leave(tmp_path: Path) -> None:
    """Of a thousand clients that leave at once, next to nothing is computed; whoever stays is served as before."""
    with process([fatal_model_spec("Unhurried")], tmp_path, LAYERTAP_REPLICAS="1") as server:
        request = build_row_request(server.url, "unhurried")
        good = send_when_accepted(request)
        assert good is not None
        before = total(server, "batch_rows_sum")
        asyncio.run(crowd(request, CLIENTS))
        reply = send_when_accepted(request)
        assert reply is not None
        assert reply.content == good.content
        assert left_behind(server) >= REACHED
        assert total(server, "batch_rows_sum") - before - 1 <= MOST * CLIENTS
        wait_until(lambda: not any(server.hooks().values()))
        assert server.end() == 0

"""What becomes of the server where code of ours fails, and of a request's memory while its other rows run."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from layertap.models.selection.hook_points import Reduction, Selector
from layertap.service.engine.execute.forward_batch import Results
from layertap.service.engine.request import ExtractRequest
from layertap.service.errors import UnavailableError
from layertap.service.inputs.items import ArraysItem
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.queue_harness import hold_queue, queued_rows, random_rows, serving_nets
from tests.service.support import problem

WAIT_S = 60.0


def test_failure_while_decoding(serve: Serve) -> None:
    """A fault of ours in a thread that decodes costs its slot for good: who waits is told, and so are balancers."""
    with serving_nets(serve, "uphill") as live:
        scheduler, worker = live.engine.manager.scheduler, live.engine.manager.handles["uphill"]

        def decode() -> Any:
            return cast("Any", None)  # which is no rows

        with pytest.raises(UnavailableError, match="decodes failed"):
            asyncio.run(scheduler.decode(worker, decode, "interactive", time.monotonic() + WAIT_S))
        wait_until(lambda: live.client.get("/livez").status_code == 503)
        problem(live.client.get("/readyz"), 503, seconds=True)


def test_part_of_a_request(serve: Serve) -> None:
    """What waits for a request's other rows holds its own values and scales, not those of the forward's other rows."""
    with (
        serving_nets(serve, "tower", max_batch_rows=4) as live,
        hold_queue(live, "tower") as pile,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(asyncio.run, run_together(live, 3, 5))
        wait_until(lambda: queued_rows(live) == 8)
        pile.module.gate.set()
        requests = running.result()
    assert pile.module.forwards == [4, 4]
    for tensor in [tensor for each in requests[1].values() for tensor in (each.values, each.scale)]:
        assert tensor is not None
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


async def run_together(live: Live, *counts: int) -> list[Results]:
    """The results of requests of so many rows for int8, all of which wait at the same time."""

    async def run(count: int) -> Results:
        request = ExtractRequest(
            model="tower",
            items=((0, ArraysItem({None: random_rows(count)}, may_batch=True)),),
            selectors=(Selector("conv", "conv", reduction=Reduction(dtype="int8")),),
        )
        with live.engine.admission.admit(time.monotonic() + WAIT_S) as ticket:
            (results,) = await live.engine.manager.scheduler.run(await live.engine.dry_run(request, ticket, list))
            return results

    return await asyncio.gather(*map(run, counts))

"""What becomes of a request where code of ours fails, and of a request's memory while its other rows run."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest

from layertap.models.selection.hook_points import Reduction, Selector
from layertap.service.engine.batch import Results
from layertap.service.engine.request import ExtractRequest
from layertap.service.inputs.items import ArraysItem
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import wait_until
from tests.service.queue_harness import extract_request, hold_queue, post, queued_rows, random_rows, serving_nets

WAIT_S = 60.0


def test_failure_while_decoding(serve: Serve) -> None:
    """A bug of ours in a decode is that request's alone: its slot is free again, and the server lives."""
    with serving_nets(serve, "uphill", cpu_threads=1) as live:
        handle = live.engine.manager.handles["uphill"]
        decode = partial(live.engine.manager.scheduler.decode, handle.key)
        for _ in range(3):
            with pytest.raises(TypeError):
                live.run(decode(cast("Any", None), handle.model.model_inputs, "interactive", time.monotonic() + WAIT_S))
        assert live.client.get("/livez").status_code == 200
        assert post(live, extract_request(random_rows(1), "uphill", "linear")).status_code == 200


def test_part_of_a_request(serve: Serve) -> None:
    """What waits for a request's other rows holds its own values and scales, not those of the forward's other rows."""
    with (
        serving_nets(serve, "tower", max_batch_rows=4) as live,
        hold_queue(live, "tower") as pile,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(live.run, run_together(live, 3, 5))
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

"""Requests that pile up behind a forward that is held up, what hooks say offline, and what the figures say after."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from layertap.models.catalog.catalog import Costs
from tests.oracle import Key, record
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import TRIES, TRY_S, gated_module, wait_until
from tests.service.nets_http import Gated
from tests.service.support import Array, Json, arrays_of, configured, net, npy, raw

ONE_FORWARD = Costs(base=1.0, per_row=1e-3)  # so that all rows that wait are worth one forward, and captures nothing
LONG_S = 300.0  # no deadline decides anything
Counts = dict[str, float]
MAX_REQUESTS = 32  # requests of a pile
METRICS_TRIES = 200  # looks at the figures
COUNTED = re.compile(
    r"layertap_(batches|batch_rows|batch_requests|rows|split|out_of_memory|expired|cancelled|refused)_(total|sum)"
)
GAUGES = ("queue_rows", "queue_bytes", "unsent_bytes", "running_rows")
HELD_ROWS = 2  # rows of the request that is held up
HELD_COUNTS: Counts = {
    "batches:isolated": 1.0,
    "batch_rows": HELD_ROWS,
    "batch_requests": 1.0,
    "rows": HELD_ROWS,
}  # its figures


@contextmanager
def serving_nets(serve: Serve, *names: str, **settings: Any) -> Iterator[Live]:
    """A server of models of ``nets_batch`` whose costs are given: measured ones hang on what else a machine does."""
    chosen: Json = {"cpu_threads": 2, "deadline_s": LONG_S, **settings}
    specs = (net(name, name.capitalize(), module="tests.service.nets_batch") for name in names)
    with serve(configured(*specs), **chosen) as live:
        for name in names:
            model = live.engine.manager.registry.get_entry(name).model
            assert model is not None
            costs = replace(ONE_FORWARD, row_bytes=model.catalog.costs.row_bytes)
            model.catalogs.configured = replace(model.catalog, costs=costs)
        yield live


def queue_server_of(*names: str, **settings: Any) -> Any:
    """A fixture of a module: such a server."""

    @pytest.fixture(scope="module")
    def started(serve: Serve) -> Iterator[Live]:
        with serving_nets(serve, *names, **settings) as live:
            yield live

    return started


def random_rows(count: int, seed: int = 0) -> Array:
    """Random rows of four numbers."""
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


def extract_request(batch: Array, model: str, layers: str, **query: Any) -> Json:
    """A request for layers of a model, by query parameters."""
    return raw(npy(batch), "application/x-npy", model=model, layers=layers, **query)


def post(live: Live, request: Json) -> httpx.Response:
    """The reply to a request."""
    return live.client.post("/extract", **request)


def queued_rows(live: Live) -> int:
    """Rows that wait for their forward, decoded, of all models."""
    return live.engine.take_snapshot()["queue_rows"]


@dataclass(frozen=True)
class QueueHarness:
    """What waits for a model that is held up, in the order in which it was put there."""

    live: Live
    name: str
    module: Gated
    pool: ThreadPoolExecutor

    def enqueue(self, request: Json, count: int) -> Future[httpx.Response]:
        """Send a request of so many rows; it waits for its forward when this returns."""
        before = queued_rows(self.live)
        reply = self.pool.submit(post, self.live, request)
        wait_until(lambda: queued_rows(self.live) == before + count or reply.done())
        assert not reply.done(), reply.result().text
        return reply


@contextmanager
def hold_queue(live: Live, name: str) -> Iterator[QueueHarness]:
    """Hold a model up inside a request; all that is put there runs after the block."""
    module = gated_module(live, name)
    module.gate.clear()
    module.entered.clear()
    with ThreadPoolExecutor(MAX_REQUESTS) as pool:
        held = pool.submit(post, live, extract_request(random_rows(HELD_ROWS), name, "linear", isolated="true"))
        try:
            assert module.entered.wait(TRIES * TRY_S)
            module.forwards.clear()
            yield QueueHarness(live, name, module, pool)
        finally:
            module.gate.set()
        assert held.result().status_code == 200


def hook_outputs(live: Live, name: str, batch: Array) -> dict[Key, Array]:
    """What hooks see where a twin of a model runs a batch."""
    module = gated_module(live, name)
    twin = type(module)()
    twin.load_state_dict(module.state_dict())
    seen = record(twin.eval(), torch.from_numpy(batch))
    return {key: value.numpy() for key, value in seen.items()}


def right(
    live: Live, reply: Future[httpx.Response] | httpx.Response, batch: Array, *layers: str, name: str = "tower"
) -> None:
    """A reply has what hooks offline see in a forward of its own rows."""
    found = arrays_of(reply.result() if isinstance(reply, Future) else reply)
    seen = hook_outputs(live, name, batch)
    assert found.keys() == set(layers)
    for layer in layers:
        np.testing.assert_allclose(found[layer], seen[layer, 0, (), "output"], rtol=1e-5, atol=1e-5)


class MetricsDelta:
    """What one model's figures, and those of refusals, grew by since it was opened."""

    def __init__(self, live: Live, name: str) -> None:
        self._live = live
        self._name = name
        self._before = self._counts()

    def check(self, *wanted: Counts) -> None:
        """They grow by exactly the sum of these, soon: a batch is counted after its replies are sent."""
        total: Counts = {}
        for each in wanted:
            for key, value in each.items():
                total[key] = total.get(key, 0) + value
        pause = Event()
        assert any(self._grown() == total or pause.wait(TRY_S) for _ in range(METRICS_TRIES)), (
            f"{self._grown()}, not {total}"
        )

    def _grown(self) -> Counts:
        now = self._counts()
        return {key: now[key] - self._before.get(key, 0) for key in now if now[key] != self._before.get(key, 0)}

    def _counts(self) -> Counts:
        found: Counts = {}
        for sample in read_samples(self._live):
            name, labels = COUNTED.fullmatch(sample.name), dict(sample.labels)
            if name and labels.pop("model", self._name) == self._name:
                found[":".join((name[1], *labels.values()))] = sample.value
        return found


def read_samples(live: Live) -> list[Any]:
    """The server's figures."""
    families = text_string_to_metric_families(live.client.get("/metrics").text)
    return [sample for family in families for sample in family.samples]


def gauges(live: Live) -> Counts:
    """What is so now: rows and bytes that wait, rows that run."""
    found = {sample.name.removeprefix("layertap_"): sample.value for sample in read_samples(live)}
    return {name: found[name] for name in GAUGES}


def read_figure(live: Live, name: str, **labels: str) -> float:
    """One of the server's figures; 0 while there is none."""
    return next((each.value for each in read_samples(live) if (each.name, each.labels) == (name, labels)), 0.0)


def batch_counts(why: str, rows: int, requests: int, times: int = 1) -> Counts:
    """The figures of batches of so many rows and requests together."""
    return {f"batches:{why}": times, "batch_rows": rows, "batch_requests": requests}


def row_counts(rows: int) -> Counts:
    """The figure of rows whose features went out."""
    return {"rows": rows}


def wait_idle(live: Live) -> None:
    """Nothing waits, nothing runs, nothing is held in memory, soon."""
    wait_until(lambda: gauges(live) == dict.fromkeys(GAUGES, 0.0))
    assert live.engine.admission.used_bytes == 0

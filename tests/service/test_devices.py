"""A model on several devices: ``cpu:0`` and its like stand in for GPUs, each with a copy of the model of its own.

What is tested here depends on no kind of device: one queue, idle replicas, equal answers.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from layertap.models.spec import ModelSpec
from tests.oracle import seeded
from tests.server import Live
from tests.service.conftest import server_of
from tests.service.nets_http import peek
from tests.service.support import ROW, Array, arrays_of, npy, problem, raw

DEVICES = ("cpu:0", "cpu:1", "cpu:2")
MEET = 77.0  # a row that begins with it waits for as many others as there are devices


class Meeting(nn.Module):
    """Rows with a mark wait here until one is here on each device."""

    barrier = threading.Barrier(len(DEVICES))

    def forward(self, x: Tensor) -> Tensor:
        if MEET in peek(x):
            self.barrier.wait(60)
        return x


class Net(nn.Module):
    """Marks count before the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first, self.head = Meeting(), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(self.before(x)).relu())


def make_net() -> Net:
    return seeded(Net(), 3)


SPEC = ModelSpec("net", f"python:{__name__}:make_net", "DEFAULT", inputs=(ROW,), devices=DEVICES)
live = server_of(SPEC, max_batch_rows=4)


def ask(live: Live, rows: Array, layers: str = "first,head", **query: object) -> dict[str, Array]:
    given = {"model": "net", "layers": layers, "format": "npz", **query}
    return arrays_of(live.client.post("/extract", **raw(npy(rows), "application/x-npy", **given)))


def expect(rows: Array) -> dict[str, Array]:
    """What plain hooks would give."""
    module = make_net()
    with torch.no_grad():
        first = module.first(torch.from_numpy(rows))
        return {"first": first.numpy(), "head": module.head(first.relu()).numpy()}


def test_one_forward_on_each_device(live: Live) -> None:
    """Requests that wait for each other in their forwards are answered: one runs on each device at a time."""
    rows = np.full((len(DEVICES), 1, 4), MEET, np.float32)
    with ThreadPoolExecutor(len(DEVICES)) as pool:
        answers = list(pool.map(lambda row: ask(live, row, isolated=True), rows))
    for answer, row in zip(answers, rows, strict=True):
        np.testing.assert_allclose(answer["head"], expect(row)["head"], rtol=1e-5, atol=1e-6)


def test_answers_do_not_depend_on_the_device(live: Live) -> None:
    """Many requests at once have what an offline forward of their rows gives, wherever each of them ran."""
    random = np.random.default_rng(0)
    sent = [random.normal(size=(int(random.integers(1, 9)), 4)).astype(np.float32) for _ in range(40)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda rows: ask(live, rows), sent))
    for rows, answer in zip(sent, answers, strict=True):
        for name, expected in expect(rows).items():
            np.testing.assert_allclose(answer[name], expected, rtol=1e-5, atol=1e-6)


def test_unloaded_and_loaded_again(live: Live) -> None:
    """All devices let go of the model; what an administrator has unloaded, and is not lazy, no request loads again."""
    rows = np.ones((2, 4), np.float32)
    told = live.client.get("/models/net").json()
    assert (told["state"], told["device"], told["hooks"]) == ("ready", "cpu:0, cpu:1, cpu:2", 0)
    assert told["memory_bytes"] == len(DEVICES) * 4 * (4 * 8 + 8 + 8 * 3 + 3)
    assert live.client.post("/models/net/unload").json()["state"] == "available"
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("-net")]
    refused = live.client.post("/extract", **raw(npy(rows), "application/x-npy", layers="head", model="net"))
    assert "POST /models/net/load" in problem(refused, 503)["hint"]
    assert "retry-after" not in refused.headers  # it does not come back by itself
    assert live.client.post("/models/net/load").json()["state"] == "ready"
    np.testing.assert_allclose(ask(live, rows)["head"], expect(rows)["head"], rtol=1e-5)

"""Models whose rows affect each other: a row a forward, or one batch where `isolated` asks for it; replies tell."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.spec import ModelSpec
from tests.loading import load_model
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import ROW, Array, arrays_of, configured, problem, tensor

ROWS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
LIMIT = 6


@dataclass(frozen=True)
class Server:
    """A server of such models, and one of them offline."""

    live: Live
    module: Any

    def offline(self, rows: Array) -> Array:
        with torch.no_grad():
            found: Array = self.module(torch.from_numpy(rows)).numpy()
        return found

    def post(self, rows: Array, layers: list[Any], **fields: Any) -> Any:
        body = {"model": "centred", "inputs": [tensor(row) for row in rows], "layers": layers, "encoding": "base64"}
        return self.live.client.post("/extract", json=body | fields)

    def of(self, rows: Array, *layers: Any, **fields: Any) -> Array:
        """The only result of a good request."""
        (found,) = arrays_of(self.post(rows, list(layers), **fields)).values()
        return found


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    spec = ModelSpec("centred", "python:tests.nets:BatchCentred", weights="random:0", device="cpu", inputs=(ROW,))
    with serve(configured(spec), max_batch_rows=LIMIT) as live:
        yield Server(live, load_model(spec).module)


def test_row_by_row(server: Server) -> None:
    """Without ``isolated`` each row is what it is alone, and the receipt says that it was."""
    reply = server.post(ROWS, ["linear", "."])
    expected = np.concatenate([server.offline(row[None]) for row in ROWS])
    np.testing.assert_allclose(arrays_of(reply)["."], expected, rtol=1e-5, atol=1e-6)
    assert [each["rows_per_forward"] for each in reply.json()["receipts"].values()] == [1, 1]


def test_one_batch(server: Server) -> None:
    """With it they are what they are together, whoever asks at the same time."""
    expected = server.offline(ROWS)
    assert not np.allclose(expected, np.concatenate([server.offline(row[None]) for row in ROWS]), atol=1e-3)

    def work(number: int) -> Array:
        return server.of(ROWS, ".", isolated=True) if number % 2 else server.of(ROWS[::-1], ".", isolated=True)[::-1]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(8)):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    reply = server.post(ROWS, ["."], isolated=True)
    assert reply.json()["receipts"]["."]["rows_per_forward"] == len(ROWS)


def test_too_many(server: Server) -> None:
    """A batch that one forward does not hold is refused, before it runs and in a dry run; alone its rows run."""
    many = np.resize(ROWS, (LIMIT + 1, 4))
    for params in ({}, {"dry_run": "true"}):
        body = {"model": "centred", "inputs": [tensor(row) for row in many], "layers": ["."], "isolated": True}
        found = problem(server.live.client.post("/extract", json=body, params=params), 413)
        assert f"these are {LIMIT + 1}, the limit is {LIMIT}" in found["detail"]
    assert server.post(many, ["."]).status_code == 200
    assert server.post(many[:LIMIT], ["."], isolated=True).status_code == 200

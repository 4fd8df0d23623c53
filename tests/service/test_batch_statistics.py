"""Models whose rows affect each other: a row a forward, or one batch where `isolated` asks for it; replies tell."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.spec import InputSpec, ModelSpec
from tests.loading import load_model
from tests.nets import BatchCentred
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, npy, problem, raw, tensor

ROWS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
ROW = (InputSpec("x", (4,)),)
LIMIT = 6


def spec(name: str, factory: str) -> ModelSpec:
    return ModelSpec(name, f"python:{factory}", weights="random:0", device="cpu", inputs=ROW)


@dataclass(frozen=True)
class Server:
    """A server of such models, and one of them offline."""

    live: Live
    module: Any

    def post(self, rows: Array, layers: list[Any], **fields: Any) -> Any:
        body = {"model": "centred", "inputs": [tensor(row) for row in rows], "layers": layers, "encoding": "base64"}
        return self.live.client.post("/extract", json=body | fields)

    def of(self, rows: Array, *layers: Any, **fields: Any) -> Array:
        """The only result of a good request."""
        (found,) = arrays_of(self.post(rows, list(layers), **fields)).values()
        return found


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    specs = (spec("centred", "tests.nets:BatchCentred"), spec("alone", "tests.nets:OneRow"))
    module = load_model(specs[0]).module
    assert isinstance(module, BatchCentred)
    with serve(configured(*specs), max_batch_rows=LIMIT) as live:
        yield Server(live, module)


def offline(server: Server, rows: Array) -> Array:
    with torch.no_grad():
        found: Array = server.module(torch.from_numpy(rows)).numpy()
    return found


def receipt(reply: Any) -> Json:
    (found,) = reply.json()["receipts"].values()
    return dict(found)


def test_row_by_row(server: Server) -> None:
    """Without ``isolated`` each row is what it is alone, and the receipt says that it was."""
    reply = server.post(ROWS, ["linear", "."])
    expected = np.concatenate([offline(server, row[None]) for row in ROWS])
    np.testing.assert_allclose(arrays_of(reply)["."], expected, rtol=1e-5, atol=1e-6)
    assert [each["rows_per_forward"] for each in reply.json()["receipts"].values()] == [1, 1]


def test_one_batch(server: Server) -> None:
    """With it they are what they are together, whoever asks at the same time."""
    expected = offline(server, ROWS)
    assert not np.allclose(expected, np.concatenate([offline(server, row[None]) for row in ROWS]), atol=1e-3)

    def work(number: int) -> Array:
        return server.of(ROWS, ".", isolated=True) if number % 2 else server.of(ROWS[::-1], ".", isolated=True)[::-1]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(8)):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    reply = server.post(ROWS, ["."], isolated=True)
    assert receipt(reply)["rows_per_forward"] == len(ROWS)
    query = {"model": "centred", "layers": ".", "isolated": "true", "encoding": "base64"}
    sent = server.live.client.post("/extract", **raw(npy(ROWS), "application/x-npy", **query))
    np.testing.assert_allclose(arrays_of(sent)["."], expected, rtol=1e-5, atol=1e-6)


def test_statistics_of_the_batch(server: Server) -> None:
    """What belongs to all rows can be had of all of them, where they are one batch."""
    with torch.no_grad():
        expected = server.module.linear(torch.from_numpy(ROWS)).mean(0).numpy()
    np.testing.assert_allclose(server.of(ROWS, "mean", isolated=True), expected, rtol=1e-5, atol=1e-6)
    found = problem(server.post(ROWS, ["mean"]), 422)
    assert "must share one forward" in found["detail"]


def test_too_many(server: Server) -> None:
    """A batch that one forward does not hold is refused, before it runs and in a dry run; alone its rows run."""
    many = np.resize(ROWS, (LIMIT + 1, 4))
    for params in ({}, {"dry_run": "true"}):
        body = {"model": "centred", "inputs": [tensor(row) for row in many], "layers": ["."], "isolated": True}
        found = problem(server.live.client.post("/extract", json=body, params=params), 413)
        assert f"these are {LIMIT + 1}, the limit is {LIMIT}" in found["detail"]
    assert server.post(many, ["."]).status_code == 200
    assert server.post(many[:LIMIT], ["."], isolated=True).status_code == 200


def test_gradients_and_changes(server: Server) -> None:
    """Both are of the batch: the gradient is that of the sum over its rows."""
    start = torch.from_numpy(ROWS).requires_grad_()
    weights = torch.tensor([0.0, 0.0, 1.0, 0.0])
    (wanted,) = torch.autograd.grad((server.module(start) * weights).sum(), start)
    objective = {"kind": "logit", "class": 2}
    found = server.of(ROWS, ".:grad_input", isolated=True, objective=objective)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        value = server.module.linear(torch.from_numpy(ROWS)).clamp(min=0.1)
        expected = (value - value.mean(0)).numpy()
    edit = {"layer": "linear", "op": "clamp", "min": 0.1}
    found = server.of(ROWS, ".", isolated=True, interventions=[edit])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

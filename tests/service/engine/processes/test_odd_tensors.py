"""Tensors in whatever memory, of whatever class: they come out of a server as they are in the model, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.nets_tensors import DENSE, REFUSED
from tests.service.support import ROW, Array, arrays_of, configured, problem, tensor

ODD = ModelSpec("odd", "python:tests.service.nets_tensors:Odd", weights="random:0", device="cpu", inputs=(ROW,))
ROWS = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


@pytest.fixture(scope="module", params=[0, 2], ids=["in this process", "workers"])
def odd(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Live]:
    """A server of odd models, with workers and without."""
    with serve(configured(ODD), workers=request.param) as live:
        yield live


def post(live: Live, model: str, rows: Array, accept: str = "application/x-safetensors", **body: Any) -> httpx.Response:
    inputs = [tensor(row) for row in rows]
    return live.client.post("/extract", json={"model": model, "inputs": inputs, **body}, headers={"accept": accept})


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", DENSE)
def test_dense(odd: Live, name: str, rows: int) -> None:
    """What a layer returns is what comes, whatever memory it is in."""
    body = {"layers": [{"layer": f"layers.{name}", "as": "x"}]}
    found = arrays_of(post(odd, "odd", ROWS[:rows], **body))["x"]
    wanted = DENSE[name](torch.from_numpy(ROWS[:rows])).detach().float().resolve_neg().numpy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(odd: Live, name: str) -> None:
    """What has no plain numbers is refused, in words."""
    reply = post(odd, "odd", ROWS, layers=[f"layers.{name}"])
    assert REFUSED[name][0] in problem(reply, 422)["errors"][0]["detail"]


def test_within_vmap(odd: Live) -> None:
    """Rows of a layer that runs within ``vmap`` are refused in words; what comes out of it can be had."""
    assert "is wrapped" in problem(post(odd, "odd", ROWS, layers=["vmapped.inner"]), 422)["errors"][0]["detail"]
    found = arrays_of(post(odd, "odd", ROWS, layers=["vmapped"]))["vmapped"]
    np.testing.assert_array_equal(found, ROWS * 2)

"""Models whose rows affect each other: a row a forward, or one batch where `isolated` asks for it; replies tell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tests.server import Live
from tests.service.conftest import server_of
from tests.service.support import Array, arrays_of, copy_module, net, problem, tensor

ROWS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
LIMIT = 6
server = server_of(net("centred", "BatchCentred", module="tests.nets"), max_batch_rows=LIMIT)


def offline(live: Live, rows: Array) -> Array:
    with torch.no_grad():
        found: Array = copy_module(live, "centred")(torch.from_numpy(rows)).numpy()
    return found


def post(live: Live, rows: Array, path: str = "/extract", **fields: Any) -> Any:
    body = {"model": "centred", "inputs": [tensor(row) for row in rows], "layers": ["."], "encoding": "base64"}
    return live.client.post(path, json=body | fields)


def test_row_by_row(server: Live) -> None:
    """Without ``isolated`` each row is what it is alone, and the receipt says that it was."""
    reply = post(server, ROWS, layers=["linear", "."])
    expected = np.concatenate([offline(server, row[None]) for row in ROWS])
    np.testing.assert_allclose(arrays_of(reply)["."], expected, rtol=1e-5, atol=1e-6)
    assert [each["rows_per_forward"] for each in reply.json()["receipts"].values()] == [1, 1]


def test_one_batch(server: Live) -> None:
    """With it they are what they are together, whoever asks at the same time."""
    expected = offline(server, ROWS)
    assert not np.allclose(expected, np.concatenate([offline(server, row[None]) for row in ROWS]), atol=1e-3)
    orders = [ROWS, ROWS[::-1]] * 4
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda rows: post(server, rows, isolated=True), orders))
    for number, reply in enumerate(replies):
        found = arrays_of(reply)["."][:: -1 if number % 2 else 1]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert reply.json()["receipts"]["."]["rows_per_forward"] == len(ROWS)


def test_too_many(server: Live) -> None:
    """A batch that one forward does not hold is refused, before it runs and in a dry run; alone its rows run."""
    many = np.resize(ROWS, (LIMIT + 1, 4))
    for path in ("/extract", "/extract?dry_run=true"):
        found = problem(post(server, many, path, isolated=True), 413)
        assert f"these are {LIMIT + 1}, the limit is {LIMIT}" in found["detail"]
    assert post(server, many).status_code == 200
    assert post(server, many[:LIMIT], isolated=True).status_code == 200

"""Warm plans over HTTP, in the server's process and in workers: a graph answers for their layers, hooks for others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.service.config.configuration import Configuration
from tests.conftest import WARM, net_spec
from tests.loading import load_model
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, npy, raw, same, tensor

ROWS = np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32)
PLAIN, COMPILED = "plain", "compiled"
PLAIN_SPEC = replace(net_spec("Chain"), name=PLAIN)
WARM_SPEC = replace(PLAIN_SPEC, name=COMPILED, warm=(WARM,))
CONFIGURATION = Configuration((PLAIN_SPEC, WARM_SPEC), PLAIN)
THREADS = 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def warm_cache(plans: Path) -> Path:
    """The cache folder with graphs on disk, as on every start but the first."""
    (graphs,) = prepare_warm_plans(load_model(WARM_SPEC, 1, THREADS), plans).graphs
    assert graphs is not None
    return plans.parent


@pytest.fixture(scope="module", params=[0, pytest.param(2, marks=pytest.mark.hard)], ids=["threads", "workers"])
def live_warm(serve: Serve, warm_cache: Path, request: pytest.FixtureRequest) -> Iterator[Live]:
    """One model twice, with warm plans and without."""
    with serve(CONFIGURATION, cache_dir=warm_cache, cpu_threads=THREADS, workers=request.param) as live:
        yield live


def extract(live: Live, model: str, *layers: str, rows: int = 3, **body: Any) -> Any:
    inputs = [tensor(row) for row in ROWS[:rows]]
    return live.client.post("/extract", json={"model": model, "layers": list(layers), "inputs": inputs, **body})


def forwards(reply: Any) -> set[str]:
    return {receipt.get("forward", "hooks") for receipt in reply.json()["receipts"].values()}


def close(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5)


def test_answers(live_warm: Live) -> None:
    """The numbers and fingerprints of the same model without warm plans; the receipt tells which path it was."""
    for layers in (["conv", "relu#0", "head"], ["relu"]):
        for rows in (1, 3):
            ours, plain = (extract(live_warm, model, *layers, rows=rows) for model in (COMPILED, PLAIN))
            assert (forwards(ours), forwards(plain)) == ({"compiled"}, {"hooks"})
            close(arrays_of(ours), arrays_of(plain))
            assert ours.json()["fingerprint"] == plain.json()["fingerprint"]


@pytest.mark.parametrize(
    "body",
    [
        {"layers": ["."]},
        {"pool": "mean"},
        {"verify": True},
        {"interventions": [{"layer": "conv", "op": "scale", "by": 2.0}]},
        {"layers": ["head:grad_output"], "objective": {"kind": "logit", "class": 1}},
    ],
    ids=str,
)
def test_everything_else_runs_with_hooks(live_warm: Live, body: Json) -> None:
    """What the graph does not give is answered as by the model without one."""
    asked: Json = {"layers": ["conv"], **body}
    ours, plain = (
        extract(live_warm, model, *asked["layers"], **{**body, "isolated": True}) for model in (COMPILED, PLAIN)
    )
    assert forwards(ours) == {"hooks"}
    assert same(arrays_of(ours), arrays_of(plain))


def test_in_company(live_warm: Live) -> None:
    """Rows of many requests share graphs and forwards; each gets its own."""
    bodies = [
        (ROWS[seed], {"layers": layers, "format": "npz"})
        for seed in range(8)
        for layers in ("conv", "relu", "conv,relu", "conv,.")
    ]

    def ask(model: str, row: Array, query: Json) -> Any:
        return live_warm.client.post("/extract", **raw(npy(row), "application/x-npy", model=model, **query))

    wanted = [arrays_of(ask(PLAIN, *body)) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda body: ask(COMPILED, *body), bodies))
    for reply, expected in zip(replies, wanted, strict=True):
        close(arrays_of(reply), expected)
    assert live_warm.client.get(f"/models/{COMPILED}").json()["hooks"] == 0


def test_without_graphs(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """A server whose plan was not compiled answers with hooks; one line says what to type."""
    with serve(CONFIGURATION, workers=0) as live:
        assert forwards(extract(live, COMPILED, "conv")) == {"hooks"}
    (record,) = [record for record in caplog.records if record.message == "a warm plan runs with hooks"]
    assert vars(record)["fields"]["reason"] == "it is not compiled: run 'layertap plan'"

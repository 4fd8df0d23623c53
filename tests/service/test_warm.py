"""Warm plans over HTTP: who asks for their layers is answered by a graph, everybody else by hooks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.spec import WarmSpec
from layertap.service.config.configuration import Configuration
from tests.conftest import WARM, net_spec
from tests.loading import load_model
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, npy, raw, same, tensor

ROWS = np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32)
PLAIN, COMPILED = "plain", "compiled"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live_warm(serve: Serve, plans: Path) -> Iterator[Live]:
    """One model twice, with warm plans and without; graphs are on disk, as on every start but the first."""
    plain = replace(net_spec("Chain"), name=PLAIN)
    warm = replace(plain, name=COMPILED, warm=(WARM, WarmSpec(("head",), pool="flatten")))
    prepare_warm_plans(load_model(warm, 1, 1), plans)
    with serve(Configuration((plain, warm), PLAIN), cache_dir=plans.parent) as live:
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
        {"dtype": "float16"},
        {"verify": True},
        {"interventions": [{"layer": "conv", "op": "scale", "by": 2.0}]},
        {"layers": ["head:grad_output"], "objective": {"kind": "logit", "class": 1}},
        {"layers": ["head"], "pool": "flatten"},
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


def test_same_bits(live_warm: Live) -> None:
    """A request has the same bits each time, alone or beside others that want other layers."""
    wanted = arrays_of(extract(live_warm, COMPILED, "conv", isolated=True))["conv"]
    asked = [("conv",), ("relu",), ("conv", "head"), (".",)] * 10
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda layers: extract(live_warm, COMPILED, *layers, isolated=True), asked))
    found = [arrays_of(reply)["conv"] for layers, reply in zip(asked, replies, strict=True) if "conv" in layers]
    assert len(found) == 20
    assert all(np.array_equal(each, wanted) for each in found)


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


def test_dry_run(live_warm: Live) -> None:
    """Says what is to come as ever."""
    told = live_warm.client.post("/extract?dry_run=true", json={"model": COMPILED, "layers": ["conv"]}).json()
    assert told["features"]["conv"]["shape"] == [1, 8, 8, 8]

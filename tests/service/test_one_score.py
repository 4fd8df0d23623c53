"""Models with one score a row, (rows, 1) or (rows,): what softmax says of it is no objective, the rest works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, problem, tensor

MODELS = {"one": "OneNumber", "squeezed": "Squeezed"}
PIXELS = InputSpec("x", (1, 2, 2))
X = np.random.default_rng(1).normal(size=(3, 1, 2, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def scoring(serve: Serve) -> Iterator[Live]:
    specs = [
        ModelSpec(name, f"python:tests.service.nets_tensors:{kind}", weights="random:0", device="cpu", inputs=(PIXELS,))
        for name, kind in MODELS.items()
    ]
    with serve(configured(*specs)) as live:
        yield live


def post(live: Live, path: str, model: str, **body: Any) -> httpx.Response:
    return live.client.post(path, json={"model": model, "inputs": [tensor(row) for row in X], **body})


def compute(live: Live, model: str, squash: bool) -> tuple[Tensor, Tensor]:
    """Scores and what their sum, or that of their sigmoids, is by the input: by torch alone."""
    loaded: Any = live.engine.manager.handles[model].model
    rows = torch.from_numpy(X).requires_grad_()
    scores = loaded.replicas[0].module(rows)
    (slopes,) = torch.autograd.grad((scores.sigmoid() if squash else scores).sum(), rows)
    return scores.detach().reshape(-1), slopes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("objective", [{"kind": "logit"}, {"kind": "binary"}, {"kind": "binary", "class": 0}, {}])
def test_gradients(scoring: Live, model: str, objective: Json) -> None:
    """The score and its sigmoid have gradients."""
    reply = post(scoring, "/extract", model, layers=[".:grad_input"], objective=objective)
    wanted = compute(scoring, model, objective.get("kind") == "binary")[1]
    np.testing.assert_allclose(arrays_of(reply)[".:grad_input"], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["probability", "cross_entropy", "kl_div"])
@pytest.mark.parametrize("path", ["/extract", "/explain"])
def test_constant(scoring: Live, model: str, kind: str, path: str) -> None:
    """What is by softmax is the same for all inputs, and refused with what to use instead."""
    what = {"layers": [".:grad_input"]} if path == "/extract" else {"method": "saliency"}
    found = problem(post(scoring, path, model, objective={"kind": kind}, **what), 422)["errors"][0]
    assert found["pointer"] == "/objective"
    assert '"logit"' in found["hint"]
    assert '"binary"' in found["hint"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["saliency", "integrated_gradients", "occlusion"])
def test_explanations(scoring: Live, model: str, method: str) -> None:
    """They need no objective; the score is told without a probability, which would be 1."""
    options = {"window": 1, "stride": 1} if method == "occlusion" else {}
    reply = post(scoring, "/explain", model, method=method, **options)
    scores, slopes = compute(scoring, model, squash=False)
    best = reply.json()["top_classes"]
    assert [[each.keys() for each in row] for row in best] == [[{"class", "score"}]] * len(X)
    np.testing.assert_allclose([row[0]["score"] for row in best], scores, rtol=1e-5, atol=1e-7)
    found = arrays_of(reply)[method].reshape(X.shape)
    wanted = slopes.abs().numpy() if method == "saliency" else slopes.numpy() * X  # the model is linear
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)

"""Attention over HTTP: weights in every format, beside requests that want none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributions import Categorical

from tests.server import Live
from tests.service.support import Json, arrays_of, npy, problem, raw, tensor

ROWS = np.random.default_rng(3).normal(size=(3, 5, 8)).astype(np.float32)
LAYER = "layers.layers.0.self_attn:attention"


def asked(layers: str, **query: str) -> Json:
    """A raw request to the encoder."""
    return raw(npy(ROWS), "application/x-npy", model="encoder", layers=layers, **query)


def test_weights(live: Live) -> None:
    """For each row and head a distribution over keys for each query; nothing else of the reply changes."""
    listed = live.client.get("/models/encoder/layers").json()["layers"]
    names = [layer["name"] for layer in listed if layer.get("attention")]
    assert names
    plain = arrays_of(live.client.post("/extract", **asked(".,*", format="npz")))
    reply = live.client.post("/extract", **asked(".,*,*:attention", format="npz"))
    found = arrays_of(reply)
    weights = {key: value for key, value in found.items() if key.endswith(":attention")}
    assert {key.removesuffix(":attention") for key in weights} == set(names)
    for value in weights.values():
        assert (value.shape[0], value.shape[2:]) == (3, (5, 5))
        np.testing.assert_allclose(value.sum(-1), 1.0, rtol=1e-5)
        assert value.std() > 0.01
    assert all(np.array_equal(found[key], value) for key, value in plain.items())


def test_entropy(live: Live) -> None:
    """Of each head, the mean entropy of queries over keys, however their weights add up, and of nothing else."""
    ((name, weights),) = arrays_of(live.client.post("/extract", **asked(LAYER, format="npz"))).items()
    expected = -(weights.astype(np.float64) * np.log(weights)).sum(-1).mean(-1)

    def ask(changes: list[Json] | None = None, **entry: object) -> Any:
        body = {"model": "encoder", "inputs": [tensor(row) for row in ROWS], "encoding": "base64"}
        body |= {"interventions": changes or [], "layers": [{"layer": LAYER, "stats": ["entropy"], **entry}]}
        return live.client.post("/extract", json=body)

    found = arrays_of(ask(by="head"))[name]
    assert found.shape == (*expected.shape, 1)
    np.testing.assert_allclose(found[..., 0], expected, rtol=1e-5)
    np.testing.assert_allclose(arrays_of(ask())[name][:, 0], expected.mean(1), rtol=1e-5)
    np.testing.assert_allclose(arrays_of(ask(heads=[1], by="head"))[name][:, 0, 0], expected[:, 1], rtol=1e-5)
    some = Categorical(probs=torch.from_numpy(weights[..., [0, 3]])).entropy().mean(-1)
    np.testing.assert_allclose(arrays_of(ask(keys=[0, 3], by="head"))[name][..., 0], some, rtol=1e-5)
    halved = {"layer": LAYER, "op": "scale", "by": 0.5, "heads": [0]}
    changed = arrays_of(ask([halved, {"layer": LAYER, "op": "zero", "heads": [1]}], by="head"))[name]
    np.testing.assert_allclose(changed[:, 0, 0], expected[:, 0], rtol=1e-5)
    assert np.isnan(changed[:, 1]).all()
    merged = ask(by="head", over="inputs")
    np.testing.assert_allclose(arrays_of(merged)[name][:, 0], expected.mean(0), rtol=1e-5)
    assert "no attention" in problem(ask(layer=LAYER.partition(":")[0]), 422)["detail"]
    assert "no channels" in problem(ask(by="channel"), 422)["detail"]

"""nnsight: values, edits and gradients inside one trace of a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.peers.conftest import PICTURES, Served, pictures

nnsight = pytest.importorskip("nnsight", reason="tests/peers/requirements.txt has it")
pytestmark = [pytest.mark.hard, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def traced(served: Served) -> Any:
    """The same weights in nnsight."""
    return nnsight.NNsight(served.module("resnet"))


def test_values(served: Served, traced: Any) -> None:
    """What layers take and return; nnsight's own proxies see values at once, as a request does."""
    with traced.trace(PICTURES):
        stem = traced.conv1.output.clone().save()
        block = traced.layer2.input.clone().save()
        pooled = traced.avgpool.output.clone().save()
    found = served.extract("resnet", pictures(), ["conv1", "layer2:input", "avgpool"])
    for name, wanted in {"conv1": stem, "layer2:input": block, "avgpool": pooled}.items():
        np.testing.assert_allclose(found[name], wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_edit(served: Served, traced: Any) -> None:
    """Channels off, and a layer scaled, in one forward."""
    with traced.trace(PICTURES):
        traced.layer1.output[:, [3, 5]] = 0
        traced.layer3.output[:] = traced.layer3.output * 0.5
        scores = traced.output.clone().save()
    changes = [
        {"layer": "layer1", "op": "zero", "channels": [3, 5]},
        {"layer": "layer3", "op": "scale", "by": 0.5},
    ]
    found = served.extract("resnet", pictures(), ["fc"], interventions=changes)["fc"]
    np.testing.assert_allclose(found, scores.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_gradient(served: Served, traced: Any) -> None:
    """Of a class by a layer's output."""
    with traced.trace(PICTURES.clone().requires_grad_()):
        block = traced.layer3.output
        score = traced.output[:, 7].sum()
        with score.backward():
            gradient = block.grad.clone().save()
    objective = {"kind": "logit", "class": 7}
    found = served.extract("resnet", pictures(), ["layer3:grad_output"], objective=objective)["layer3:grad_output"]
    assert gradient.abs().max() > 0
    np.testing.assert_allclose(found, gradient.numpy(), rtol=1e-3, atol=1e-6)

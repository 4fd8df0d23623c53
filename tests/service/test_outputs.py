"""Models that end in softmax, its logarithm or a sigmoid: no further one is taken of what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Occlusion
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.spec import InputSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, copy_module, net, problem, tensor

X = np.random.default_rng(1).normal(size=(3, 1, 4, 4)).astype(np.float32)
KIND, CLASS = torch.tensor([0.1, 0.2, 0.7]), 2
Convert = Callable[[Tensor], Tensor]
# What a model makes of its scores, what its description says of that, and how probabilities are had of it.
ENDS: dict[str, tuple[Convert, str, Convert]] = {
    "head": (lambda x: x, "logits", lambda out: out.softmax(1)),
    "module": (nn.Softmax(1), "probabilities", lambda out: out),
    "function": (lambda x: functional.softmax(x, -1).clone(), "probabilities", lambda out: out),
    "logarithm": (lambda x: functional.log_softmax(x, 1), "log_probabilities", torch.exp),
    "labels": (torch.sigmoid, "probabilities", lambda out: out),
    "shares": (lambda x: x.clamp(0.1, 0.9), "logits", lambda out: out.softmax(1)),  # no probabilities
    "label": (lambda x: x[:, 0].sigmoid(), "probabilities", lambda out: out),  # a lone score without an axis
    "score": (lambda x: x[:, 0], "logits", torch.sigmoid),
    "column": (lambda x: x[:, :1], "logits", torch.sigmoid),
}
OBJECTIVES: dict[str, tuple[Json, Convert]] = {
    "probability": ({"terms": [[1, 0], [-2, CLASS]]}, lambda p: p[:, 0] - 2 * p[:, CLASS]),
    "cross_entropy": ({"target": KIND.tolist()}, lambda p: -(KIND * p.log()).sum(1)),
    "kl_div": ({"target": KIND.tolist(), "reduction": "mean"}, lambda p: (KIND * (KIND / p).log()).mean(1)),
}


class Head(nn.Module):
    """Three logits, and what a name of ``ENDS`` makes of them."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.score = nn.Linear(16, 3)
        self.last = nn.Softmax(1) if end == "module" else ENDS[end][0]

    def forward(self, x: Tensor) -> Tensor:
        """Scores of pictures (N, 1, 4, 4)."""
        scores: Tensor = self.last(self.score(x.flatten(1)))
        return scores


@pytest.fixture(scope="module")
def ending(serve: Serve) -> Iterator[Live]:
    pictures = InputSpec("x", (1, 4, 4))
    specs = [net(end, "Head", pictures, module=__name__, weights="random:3", args={"end": end}) for end in ENDS]
    with serve(configured(*specs, replace(specs[1], name="said", outputs="logits"))) as live:
        yield live


def ask(live: Live, path: str, model: str, **body: Any) -> Any:
    return live.client.post(path, json={"model": model, "inputs": [tensor(row) for row in X], **body})


def check_gradient(live: Live, name: str, objective: Json, compute: Convert) -> None:
    """The gradient of each row's objective at the input is that by torch alone."""
    rows = torch.from_numpy(X).requires_grad_()
    (wanted,) = torch.autograd.grad(compute(copy_module(live, name)(rows)).sum(), rows)
    reply = ask(live, "/extract", name, layers=[".:grad_input"], objective=objective)
    np.testing.assert_allclose(arrays_of(reply)[".:grad_input"], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in ENDS if name not in ("label", "score", "column")])
def test_gradients(ending: Live, name: str) -> None:
    """What a model returns is recognized, and each objective is of its probabilities."""
    _, outputs, convert = ENDS[name]
    assert ending.client.get(f"/models/{name}").json().get("outputs", "logits") == outputs
    for kind, (objective, compute) in OBJECTIVES.items():
        check_gradient(ending, name, {"kind": kind, **objective}, lambda out, compute=compute: compute(convert(out)))


@pytest.mark.parametrize("name", ["module", "logarithm", "labels"])
def test_explanations(ending: Live, name: str) -> None:
    """Top classes and drops of a probability are of the model's own; the latter by captum."""
    module, convert = copy_module(ending, name), ENDS[name][2]
    options = {"method": "occlusion", "window": 2, "stride": 2}
    reply = ask(ending, "/explain", name, **options, objective={"kind": "probability", "class": CLASS})
    probabilities = convert(module(torch.from_numpy(X))).detach()
    for row, best in zip(probabilities, reply.json()["top_classes"], strict=True):
        np.testing.assert_allclose([each["probability"] for each in best], row.sort(descending=True)[0], rtol=1e-5)
    occlusion = Occlusion(lambda x: convert(module(x)))
    wanted = occlusion.attribute(torch.from_numpy(X), (1, 2, 2), (1, 2, 2), target=CLASS)
    np.testing.assert_allclose(arrays_of(reply)["occlusion"], wanted[:, 0].detach(), rtol=1e-4, atol=1e-6)


def test_a_lone_sigmoid(ending: Live) -> None:
    """It is a probability that changes with the input, and is taken as it is."""
    for kind in ("probability", "binary"):
        check_gradient(ending, "label", {"kind": kind}, lambda out: out)


@pytest.mark.parametrize("name", ["score", "column"])
def test_a_lone_score(ending: Live, name: str) -> None:
    """It has a gradient, and so has its sigmoid; what is by softmax is the same for all inputs, and refused."""
    check_gradient(ending, name, {}, lambda out: out)
    check_gradient(ending, name, {"kind": "binary"}, torch.sigmoid)
    for path, what in (("/extract", {"layers": [".:grad_input"]}), ("/explain", {"method": "saliency"})):
        for kind in ("probability", "kl_div"):
            found = problem(ask(ending, path, name, objective={"kind": kind}, **what), 422)["errors"][0]
            assert found["pointer"] == "/objective"
            assert '"logit"' in found["hint"]
            assert '"binary"' in found["hint"]


@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")
def test_what_is_said_counts(ending: Live) -> None:
    """The configuration's word, then the request's: ``nn.KLDivLoss()`` of a raw head takes logits as they are."""
    objective: Json = {"kind": "kl_div", "class": CLASS, "reduction": "mean", "outputs": "log_probabilities"}
    one_hot = functional.one_hot(torch.tensor([CLASS] * len(X)), 3).float()
    for name in ("head", "said", "module"):
        check_gradient(ending, name, objective, lambda out: nn.KLDivLoss()(out, one_hot) * len(X))
    check_gradient(ending, "said", {"kind": "probability", "class": CLASS}, lambda out: out.softmax(1)[:, CLASS])
    told = problem(ask(ending, "/extract", "head", layers=[".:grad_input"], objective={"outputs": "logits"}), 422)
    assert "no probabilities" in told["errors"][0]["detail"]

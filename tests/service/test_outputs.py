"""Models that end in softmax, its logarithm or a sigmoid: no further one is taken of what they return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Occlusion
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, problem, tensor

PICTURE = InputSpec("x", (1, 4, 4))
X = np.random.default_rng(1).normal(size=(3, 1, 4, 4)).astype(np.float32)
KIND, CLASS = torch.tensor([0.1, 0.2, 0.7]), 2


class Head(nn.Module):
    """Three logits, and what a class makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(16, 3)
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Scores of pictures (N, 1, 4, 4)."""
        scores: Tensor = self.last(self.score(x.flatten(1)))
        return scores


class Module(Head):
    """Softmax as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Softmax(1)


class Function(Head):
    """Softmax as a function, and a copy of it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.softmax(super().forward(x), -1).clone()


class Logarithm(Head):
    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(super().forward(x), 1)


class Labels(Head):
    """A sigmoid, of several labels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class Label(Head):
    """A sigmoid, of a lone score without an axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0].sigmoid()


class Shares(Head):
    """Between 0 and 1, and no probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(0.1, 0.9)


# How probabilities are had of what each returns.
PROBABILITIES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "Head": ("logits", lambda out: out.softmax(1)),
    "Module": ("probabilities", lambda out: out),
    "Function": ("probabilities", lambda out: out),
    "Logarithm": ("log_probabilities", torch.exp),
    "Labels": ("probabilities", lambda out: out),
    "Shares": ("logits", lambda out: out.softmax(1)),
}
OBJECTIVES: list[tuple[Json, Callable[[Tensor], Tensor]]] = [
    ({"kind": "probability", "terms": [[1, 0], [-2, CLASS]]}, lambda p: p[:, 0] - 2 * p[:, CLASS]),
    ({"kind": "cross_entropy", "target": KIND.tolist()}, lambda p: -(KIND * p.log()).sum(1)),
    ({"kind": "kl_div", "target": KIND.tolist(), "reduction": "mean"}, lambda p: (KIND * (KIND / p).log()).mean(1)),
]


@pytest.fixture(scope="module")
def ending(serve: Serve) -> Iterator[Live]:
    specs = [
        ModelSpec(name.lower(), f"python:{__name__}:{name}", weights="random:3", device="cpu", inputs=(PICTURE,))
        for name in (*PROBABILITIES, "Label")
    ]
    said = replace(specs[1], name="said", outputs="logits")
    with serve(configured(*specs, said)) as live:
        yield live


def module_of(live: Live, name: str) -> Any:
    entry: Any = live.engine.manager.registry.get_entry(name)
    return copy.deepcopy(entry.model.module)


def ask(live: Live, path: str, model: str, **body: Any) -> Any:
    return live.client.post(path, json={"model": model, "inputs": [tensor(row) for row in X], **body})


def differentiate(live: Live, name: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of each row's objective at the input, by torch alone."""
    rows = torch.from_numpy(X).requires_grad_()
    (slopes,) = torch.autograd.grad(compute(module_of(live, name)(rows)).sum(), rows)
    return slopes


@pytest.mark.parametrize("name", PROBABILITIES)
@pytest.mark.parametrize(("objective", "compute"), OBJECTIVES, ids=[str(each) for each, _ in OBJECTIVES])
def test_gradients(ending: Live, name: str, objective: Json, compute: Callable[[Tensor], Tensor]) -> None:
    outputs, convert = PROBABILITIES[name]
    shown = ending.client.get(f"/models/{name.lower()}").json()
    assert shown.get("outputs", "logits") == outputs
    reply = ask(ending, "/extract", name.lower(), layers=[".:grad_input"], objective=objective)
    wanted = differentiate(ending, name.lower(), lambda out: compute(convert(out)))
    np.testing.assert_allclose(arrays_of(reply)[".:grad_input"], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["Module", "Logarithm", "Labels"])
def test_explanations(ending: Live, name: str) -> None:
    """Top classes and drops of a probability are of the model's own; the latter by captum."""
    module, convert = module_of(ending, name.lower()), PROBABILITIES[name][1]
    options = {"method": "occlusion", "window": 2, "stride": 2}
    reply = ask(ending, "/explain", name.lower(), **options, objective={"kind": "probability", "class": CLASS})
    probabilities = convert(module(torch.from_numpy(X))).detach()
    for row, best in zip(probabilities, reply.json()["top_classes"], strict=True):
        np.testing.assert_allclose([each["probability"] for each in best], row.sort(descending=True)[0], rtol=1e-5)
    occlusion = Occlusion(lambda x: convert(module(x)))
    wanted = occlusion.attribute(torch.from_numpy(X), (1, 2, 2), (1, 2, 2), target=CLASS)
    np.testing.assert_allclose(arrays_of(reply)["occlusion"], wanted[:, 0].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["probability", "binary"])
def test_a_lone_sigmoid(ending: Live, kind: str) -> None:
    """It is a probability that changes with the input, and is taken as it is."""
    reply = ask(ending, "/extract", "label", layers=[".:grad_input"], objective={"kind": kind})
    wanted = differentiate(ending, "label", lambda out: out)
    np.testing.assert_allclose(arrays_of(reply)[".:grad_input"], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")
def test_what_is_said_counts(ending: Live) -> None:
    """The configuration's word, then the request's: ``nn.KLDivLoss()`` of a raw head takes logits as they are."""
    objective: Json = {"kind": "kl_div", "class": CLASS, "reduction": "mean", "outputs": "log_probabilities"}
    one_hot = functional.one_hot(torch.tensor([CLASS] * len(X)), 3).float()
    for name in ("head", "said", "module"):
        reply = ask(ending, "/extract", name, layers=[".:grad_input"], objective=objective)
        wanted = differentiate(ending, name, lambda out: nn.KLDivLoss()(out, one_hot) * len(X))
        np.testing.assert_allclose(arrays_of(reply)[".:grad_input"], wanted, rtol=1e-4, atol=1e-7)
    reply = ask(ending, "/extract", "said", layers=[".:grad_input"], objective={"kind": "probability", "class": CLASS})
    wanted = differentiate(ending, "said", lambda out: out.softmax(1)[:, CLASS])
    np.testing.assert_allclose(arrays_of(reply)[".:grad_input"], wanted, rtol=1e-4, atol=1e-7)
    told = problem(ask(ending, "/extract", "head", layers=[".:grad_input"], objective={"outputs": "logits"}), 422)
    assert "no probabilities" in told["errors"][0]["detail"]

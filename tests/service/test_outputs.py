"""Models whose outputs are special: probabilities, of which no softmax is taken; rows without an axis; nothing."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.service.conftest import server_of
from tests.service.support import Json, arrays_of, copy_module, net, problem, tensor

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
        return self.last(self.score(x.flatten(1)))


HEADS = [
    net(end, "Head", InputSpec("x", (1, 4, 4)), module=__name__, weights="random:3", args={"end": end}) for end in ENDS
]
ending = server_of(*HEADS, replace(HEADS[1], name="said", outputs="logits"))


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


@pytest.mark.parametrize("name", ["label", "score", "column"])
def test_a_lone_score(ending: Live, name: str) -> None:
    """It has a gradient; what is by softmax is the same for all inputs, and refused. A sigmoid is a probability."""
    check_gradient(ending, name, {"kind": "binary"}, ENDS[name][2])
    if name == "label":
        check_gradient(ending, name, {"kind": "probability"}, lambda out: out)
        return
    check_gradient(ending, name, {}, lambda out: out)
    for path, what in (
        ("/extract", {"layers": [".:grad_input"]}),
        ("/explain", {"method": "saliency"}),
    ):
        found = problem(ask(ending, path, name, objective={"kind": "probability"}, **what), 422)["errors"][0]
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
    assert "takes no 'outputs'" in told["errors"][0]["detail"]


ROWS = np.random.default_rng(1).normal(size=(3, 10)).astype(np.float32)


class Squeezed(nn.Module):
    """(10,) for one row, (N, 10) for several; what follows the squeeze is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.head = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor | None:
        """Scores of rows (N, 10)."""
        return self.head(self.inner(x).relu().squeeze())


class Flat(Squeezed):
    """(10,) for one row, (10 N,) for several."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).relu()).view(-1)


class Silent(Squeezed):
    """It computes, and returns nothing."""

    def forward(self, x: Tensor) -> None:
        self.head(self.inner(x))


KINDS = ("Squeezed", "Flat", "Silent")
squeezing = server_of(*(net(kind, kind, InputSpec("x", (10,)), module=__name__) for kind in KINDS))


def extract(live: Live, kind: str, rows: int, **body: Any) -> Any:
    inputs = [tensor(row) for row in ROWS[:rows]]
    return live.client.post("/extract", json={"model": kind, "inputs": inputs, "encoding": "base64", **body})


def run_rows(compute: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """What a script gives for each row alone."""
    alone = torch.from_numpy(ROWS[:rows]).requires_grad_().split(1)
    return torch.stack([compute(row) for row in alone]).detach()


OF_ROWS: dict[str, tuple[Json, Callable[[Tensor], Tensor]]] = {
    "logit": ({"class": 3}, lambda out: out[3]),
    "mean": ({"kind": "mean"}, torch.mean),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["Squeezed", "Flat"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_gradients_without_an_axis(squeezing: Live, kind: str, name: str, rows: int) -> None:
    objective, compute = OF_ROWS[name]
    module = copy_module(squeezing, kind)
    found = arrays_of(extract(squeezing, kind, rows, layers=[".:grad_input", "inner:grad_output"], objective=objective))
    wanted = run_rows(lambda x: torch.autograd.grad(compute(module(x)), x)[0][0], rows)
    np.testing.assert_allclose(found[".:grad_input"], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_statistics_and_edits(squeezing: Live, rows: int) -> None:
    module = copy_module(squeezing, "Squeezed")
    layers = [".", {"layer": ".", "stats": ["mean", "l2", "std"], "as": "stats"}]
    plain = arrays_of(extract(squeezing, "Squeezed", rows, layers=layers))
    wanted = run_rows(module, rows)
    np.testing.assert_allclose(plain["."], wanted, rtol=1e-4, atol=1e-6)
    columns = [wanted.mean(1), wanted.norm(dim=1), wanted.std(1, unbiased=False)]
    np.testing.assert_allclose(plain["stats"], torch.stack(columns, 1), rtol=1e-4, atol=1e-6)
    changes = [{"layer": "head:input", "op": "zero", "channels": [1, 4]}]
    changed = arrays_of(extract(squeezing, "Squeezed", rows, layers=["."], interventions=changes))["."]
    kept = torch.tensor([channel not in (1, 4) for channel in range(10)])
    module.head.register_forward_pre_hook(lambda layer, args: (args[0] * kept,))
    np.testing.assert_allclose(changed, run_rows(module, rows), rtol=1e-4, atol=1e-6)


def test_a_model_that_returns_nothing(squeezing: Live) -> None:
    """Its layers can be had all the same."""
    module, found = copy_module(squeezing, "Silent"), arrays_of(extract(squeezing, "Silent", 3, layers=["*"]))
    inner = module.inner(torch.from_numpy(ROWS))
    assert found.keys() == {"inner", "head"}
    for name, value in (("inner", inner), ("head", module.head(inner))):
        np.testing.assert_allclose(found[name], value.detach(), rtol=1e-5, atol=1e-6)

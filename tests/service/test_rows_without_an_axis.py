"""Models that return a lone row without an axis for rows, or nothing: all works as in the plain script of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layertap.models.spec import InputSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, copy_module, net, problem, tensor

X = np.random.default_rng(1).normal(size=(3, 10)).astype(np.float32)


class Squeezed(nn.Module):
    """(10,) for one row, (N, 10) for several; what follows the squeeze is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.head = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor | None:
        """Scores of rows (N, 10)."""
        scores: Tensor = self.head(self.inner(x).relu().squeeze())
        return scores


class Flat(Squeezed):
    """(10,) for one row, (10 N,) for several."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).relu()).view(-1)


class Mixed(Squeezed):
    """(1,), whatever there is."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)).mean(0)[:1]


class Silent(Squeezed):
    """It computes, and returns nothing."""

    def forward(self, x: Tensor) -> None:
        self.head(self.inner(x))


@pytest.fixture(scope="module")
def squeezing(serve: Serve) -> Iterator[Live]:
    kinds = ("Squeezed", "Flat", "Mixed", "Silent")
    with serve(configured(*(net(kind, kind, InputSpec("x", (10,)), module=__name__) for kind in kinds))) as live:
        yield live


def ask(live: Live, kind: str, rows: int, **body: Any) -> Any:
    inputs = [tensor(row) for row in X[:rows]]
    return live.client.post("/extract", json={"model": kind, "inputs": inputs, "encoding": "base64", **body})


def run_rows(compute: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """What a script gives for each row alone."""
    return torch.stack([compute(torch.from_numpy(X[row : row + 1]).requires_grad_()) for row in range(rows)]).detach()


OBJECTIVES: dict[str, tuple[Json, Callable[[Tensor], Tensor]]] = {
    "logit": ({"class": 3}, lambda out: out[3]),
    "mean": ({"kind": "mean"}, torch.mean),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["Squeezed", "Flat"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients(squeezing: Live, kind: str, name: str, rows: int) -> None:
    objective, compute = OBJECTIVES[name]
    module = copy_module(squeezing, kind)
    found = arrays_of(ask(squeezing, kind, rows, layers=[".:grad_input", "inner:grad_output"], objective=objective))
    wanted = run_rows(lambda x: torch.autograd.grad(compute(module(x)), x)[0][0], rows)
    np.testing.assert_allclose(found[".:grad_input"], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_statistics_and_edits(squeezing: Live, rows: int) -> None:
    module = copy_module(squeezing, "Squeezed")
    layers = [".", {"layer": ".", "stats": ["mean", "l2", "std"], "as": "stats"}]
    plain = arrays_of(ask(squeezing, "Squeezed", rows, layers=layers))
    wanted = run_rows(module, rows)
    np.testing.assert_allclose(plain["."], wanted, rtol=1e-4, atol=1e-6)
    columns = [wanted.mean(1), wanted.norm(dim=1), wanted.std(1, unbiased=False)]
    np.testing.assert_allclose(plain["stats"], torch.stack(columns, 1), rtol=1e-4, atol=1e-6)
    changes = [{"layer": "head:input", "op": "zero", "channels": [1, 4]}]
    changed = arrays_of(ask(squeezing, "Squeezed", rows, layers=["."], interventions=changes))["."]
    kept = torch.tensor([channel not in (1, 4) for channel in range(10)])
    module.head.register_forward_pre_hook(lambda layer, args: (args[0] * kept,))
    np.testing.assert_allclose(changed, run_rows(module, rows), rtol=1e-4, atol=1e-6)


def test_what_is_of_all_rows(squeezing: Live) -> None:
    """It is no row's, and the refusal says why."""
    told = problem(ask(squeezing, "Mixed", 2, layers=[".:grad_input"], objective={"kind": "sum"}), 422)
    assert "of all rows of a forward together" in told["errors"][0]["detail"]


def test_a_model_that_returns_nothing(squeezing: Live) -> None:
    """Its layers can be had all the same."""
    module, saved = copy_module(squeezing, "Silent"), dict[str, Tensor]()

    def save(name: str, part: nn.Module, args: Any, output: Tensor) -> None:
        saved[name] = output.detach().clone()

    for name, part in module.named_children():
        part.register_forward_hook(partial(save, name))
    module(torch.from_numpy(X))
    found = arrays_of(ask(squeezing, "Silent", 3, layers=["*"]))
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)

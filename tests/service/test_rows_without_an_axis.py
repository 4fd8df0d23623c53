"""Models that return a lone row without an axis for rows: all works as in the plain script that runs one row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, problem, tensor

ROW = InputSpec("x", (10,))
X = np.random.default_rng(1).normal(size=(3, 10)).astype(np.float32)


class Squeezed(nn.Module):
    """(10,) for one row, (N, 10) for several; what follows the squeeze is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 10)
        self.head = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
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


@pytest.fixture(scope="module")
def squeezing(serve: Serve) -> Iterator[Live]:
    specs = [
        ModelSpec(kind.__name__, f"python:{__name__}:{kind.__name__}", weights="random:3", device="cpu", inputs=(ROW,))
        for kind in (Squeezed, Flat, Mixed)
    ]
    with serve(configured(*specs)) as live:
        yield live


def build(kind: type[Squeezed]) -> Squeezed:
    torch.manual_seed(3)
    return kind().eval()


def ask(live: Live, kind: type[Squeezed], rows: int, **body: Any) -> Any:
    inputs = [tensor(row) for row in X[:rows]]
    return live.client.post("/extract", json={"model": kind.__name__, "inputs": inputs, "encoding": "base64", **body})


def run_rows(compute: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """What a script gives for each row alone."""
    return torch.stack([compute(torch.from_numpy(X[row : row + 1]).requires_grad_()) for row in range(rows)]).detach()


OBJECTIVES: list[tuple[Json, Callable[[Tensor], Tensor]]] = [
    ({"class": 3}, lambda out: out[3]),
    ({"kind": "mean"}, torch.mean),
]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", [Squeezed, Flat])
@pytest.mark.parametrize(("objective", "compute"), OBJECTIVES, ids=[str(each) for each, _ in OBJECTIVES])
def test_gradients(
    squeezing: Live, kind: type[Squeezed], objective: Json, compute: Callable[[Tensor], Tensor], rows: int
) -> None:
    module = build(kind)
    reply = ask(squeezing, kind, rows, layers=[".:grad_input", "inner:grad_output"], objective=objective)
    found = arrays_of(reply)
    wanted = run_rows(lambda x: torch.autograd.grad(compute(module(x)), x)[0][0], rows)
    np.testing.assert_allclose(found[".:grad_input"], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_statistics_and_edits(squeezing: Live, rows: int) -> None:
    module = build(Squeezed)

    def edit(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = copy.copy(output).detach().clone()
        output[..., [1, 4]] = 0
        return output

    layers = [".", {"layer": ".", "stats": ["mean", "l2", "std"], "as": "stats"}]
    plain = arrays_of(ask(squeezing, Squeezed, rows, layers=layers))
    wanted = run_rows(module, rows)
    np.testing.assert_allclose(plain["."], wanted, rtol=1e-4, atol=1e-6)
    columns = [wanted.mean(1), wanted.norm(dim=1), wanted.std(1, unbiased=False)]
    np.testing.assert_allclose(plain["stats"], torch.stack(columns, 1), rtol=1e-4, atol=1e-6)
    changes = [{"layer": "head:input", "op": "zero", "channels": [1, 4]}]
    changed = arrays_of(ask(squeezing, Squeezed, rows, layers=["."], interventions=changes))["."]
    module.head.register_forward_pre_hook(lambda layer, args: (edit(layer, args, args[0]),))
    np.testing.assert_allclose(changed, run_rows(module, rows), rtol=1e-4, atol=1e-6)


def test_what_is_of_all_rows(squeezing: Live) -> None:
    """It is no row's, and the refusal says why."""
    told = problem(ask(squeezing, Mixed, 2, layers=[".:grad_input"], objective={"kind": "sum"}), 422)
    assert "of all rows of a forward together" in told["errors"][0]["detail"]

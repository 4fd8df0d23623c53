"""What a forward takes: bytes that are counted by hand, figures that make sense, and nothing that is left changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from layertap.models.catalog.catalog import Costs
from layertap.models.devices import memory
from layertap.models.hooks import attach
from layertap.models.plan.selectors import parse_selector
from layertap.models.run import model_catalogs
from layertap.models.run.model_catalogs import measure_costs, survey_shape, verify_resumption
from layertap.models.run.replica import call_module
from layertap.models.run.resumption import find_start
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader, net_spec
from tests.loading import load_model
from tests.nets import SlowOnWide, batch

CPU = torch.device("cpu")
FLOAT = 4  # bytes
Rows = Mapping[str, Tensor]


def peak(module: nn.Module, rows: Rows) -> int:
    """Bytes of a forward, in the mode in which forwards run."""
    with torch.no_grad():
        return memory.measure_peak_bytes(lambda given: module(*given.values()), rows, module)


def ones(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.ones(shape)}


# Threads


class Quick(nn.Module):
    """Notes how many threads it may use; its middle can be stopped at and resumed from."""

    threads: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(torch.get_num_threads())
        return self.second(self.first(x))


def test_quick_models_are_looked_at_on_one_thread() -> None:
    """Threads of many small operations wait for each other, and the longer the more other processes there are."""
    source, inputs = f"python:{__name__}:Quick", (InputSpec("x", (3, 4)),)
    model = load_model(ModelSpec("quick", source, "random:0", "cpu", inputs=inputs), 1, 2)
    shapes = ((5, 4),)
    catalog = survey_shape(model, shapes, functions=True)
    verify_resumption(model, find_start(parse_selector("first"), catalog), shapes)
    assert set(Quick.threads) == {1}


# Bytes, counted by hand


class Keeps(nn.Module):
    """Holds on to every activation until it returns."""

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for _ in range(5):
            seen.append(seen[-1].tanh())
        return seen[-1]


class LetsGo(nn.Module):
    """The same without holding on to anything."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.tanh()
        return x


# Numbers that a row takes at the worst moment: those of its input, and those of what is alive then.
BY_HAND: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ReLU makes another": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 8 + 8),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(True), nn.Linear(8, 20)), 8 + 20),
    "views": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Flatten()), 8),
    "kept": (Keeps, 5 * 4),
    "let go": (LetsGo, 2 * 4),
    "nothing": (nn.Identity, 0),
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", BY_HAND)
def test_peak_by_hand(name: str, rows: int) -> None:
    """Inputs and whatever is alive at the worst moment, byte for byte; weights and views do not count."""
    make, alive = BY_HAND[name]
    assert peak(make().eval(), ones(rows, 4)) == rows * (4 + alive) * FLOAT


# Nothing is left changed


@pytest.mark.parametrize("name", ["Chain", "Writes", "Keywords", "Recurrent"])
def test_as_it_was(load_fresh_net: Loader, name: str) -> None:
    """Weights, buffers, modes, hooks and rows are the same afterwards, also where the model writes to its input."""
    model = load_fresh_net(name)
    rows = batch(model.inputs, 1)
    before = {key: value.clone() for key, value in rows.items()}
    state = {key: value.clone() for key, value in model.module.state_dict().items()}
    versions = [parameter._version for parameter in model.module.parameters()]
    forward = partial(call_module, module=model.module)
    with torch.no_grad():
        found = memory.measure_peak_bytes(forward, rows, model.module)
    measure_costs(forward, rows, CPU, found, crosses_rows=model.catalog.crosses_rows, max_threads=2)
    assert found == model.catalog.costs.row_bytes >= sum(value.nbytes for value in rows.values())
    assert all(rows[key].equal(value) for key, value in before.items())
    assert all(value.equal(state[key]) for key, value in model.module.state_dict().items())
    assert [parameter._version for parameter in model.module.parameters()] == versions
    assert not any(part.training for part in model.module.modules())
    assert model.hooks == attach.count_hooks(model.module) == 0
    assert _get_current_dispatch_mode() is None


def test_a_forward_that_fails() -> None:
    """Its error comes through, and nothing watches operations any more."""
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        peak(nn.Linear(4, 4), ones(1, 5))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        measure_costs(lambda rows: nn.Linear(4, 4)(rows["x"]), ones(1, 5), CPU, 1, crosses_rows=False, max_threads=2)
    assert _get_current_dispatch_mode() is None
    assert torch.get_num_threads() == before


# Figures


@pytest.mark.parametrize(("crosses_rows", "per_row"), [(False, 0.0625), (True, 0.125)])
@pytest.mark.parametrize(("gain", "speedup"), [(2.0, 2.0), (model_catalogs.MIN_SPEEDUP - 0.01, 1.0)])
def test_costs_by_hand(
    monkeypatch: pytest.MonkeyPatch, crosses_rows: bool, per_row: float, gain: float, speedup: float
) -> None:
    """Seconds of a batch, of each row and the speedup, from forwards whose times are known and sometimes disturbed."""
    calls = count(1)

    def take(forward: object, rows: Rows, device: object) -> tuple[float, float]:
        seconds = (1 + len(rows["x"])) / 16 / (gain if torch.get_num_threads() > 1 else 1)
        return seconds * (1 if next(calls) % 7 else 16), seconds

    monkeypatch.setattr(model_catalogs, "MIN_THREADED_S", 0.0)
    monkeypatch.setattr(model_catalogs, "_measure_seconds", take)
    found = measure_costs(lambda rows: None, ones(1, 4), CPU, 5, crosses_rows=crosses_rows, max_threads=2)
    assert found == Costs(base=0.125 - per_row, per_row=per_row, row_bytes=5, speedup=speedup)


def test_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of many seconds runs once."""
    runs: list[float] = []
    monkeypatch.setattr(model_catalogs, "_measure_seconds", lambda *_: runs.append(4.0) or (4.0, 4.0))
    found = measure_costs(lambda rows: None, ones(1, 4), CPU, 5, crosses_rows=False, max_threads=2)
    assert found == Costs(base=0.0, per_row=4.0, row_bytes=5)
    assert len(runs) == 1


def test_another_shape(load_fresh_net: Loader) -> None:
    """A much larger input costs more, as measured."""
    model = load_fresh_net("Chain")
    larger = survey_shape(model, ((3, 256, 256),))
    assert larger.seconds > 2 * model.catalog.seconds
    assert larger.costs.estimate_seconds(1) == pytest.approx(larger.seconds * larger.costs.speedup, rel=0.01)
    assert larger.costs.row_bytes > 100 * model.catalog.costs.row_bytes


def test_shape_that_takes_long() -> None:
    """A model whose time does not grow as what its layers return costs what it was seen to take."""
    model = load_model(replace(net_spec("Chain"), source="python:tests.nets:SlowOnWide"))
    costs = [survey_shape(model, (shape,)).costs.estimate_seconds(1) for shape in ((3, 9, 8), (3, 8, 9))]
    assert costs[0] < SlowOnWide.SECONDS <= costs[1]

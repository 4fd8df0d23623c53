"""Module trees for several threads over parameters that are stored once, and modules that can't be had twice."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.plan.plan import Capture
from layertap.models.plan.planner import make_plan
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import net_spec
from tests.loading import load_model
from tests.models.extraction import see
from tests.nets import batch
from tests.oracle import record

FOUR = (InputSpec("x", (4,)),)
PATIENCE_S = 60.0


def here(factory: str, inputs: tuple[InputSpec, ...] = FOUR) -> ModelSpec:
    """The configuration of a module of this file."""
    return replace(net_spec("Tied", inputs=inputs), source=f"python:{__name__}:{factory}")


def wanted(model: LoadedModel, *texts: str) -> dict[str, Capture]:
    plan = make_plan([parse_selector(text) for text in texts], model.catalog)
    return {result.key: result.capture for result in plan.results}


def extract(model: LoadedModel, number: int, x: dict[str, Tensor], captures: dict[str, Capture]) -> dict[str, Tensor]:
    """What one replica gives."""
    share = RequestSlice(0, len(next(iter(x.values()))), frozenset(captures.values()))
    found = model.run(model.replicas[number], [x], [share]).select(share)
    return {key: found[capture].values for key, capture in captures.items()}


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


# What a replica is


@pytest.mark.parametrize("name", ["resnet", "Tied", "Recurrent", "Encoder", "Keywords"])
def test_replicas(name: str) -> None:
    """Other modules over the same parameters and buffers; each gives what an offline hook sees."""
    model = load_model(net_spec(name), replicas=3)
    first, *others = (each.module for each in model.replicas)
    assert len(others) == 2
    assert model.module is first
    names = dict(first.named_modules(remove_duplicate=False))
    rows = batch(model.inputs, 1, seed=4)
    truth = see(model, rows)
    captures = wanted(model, ".", ".:input") if len(rows) == 1 else wanted(model, ".")
    for number, other in enumerate(others, 1):
        assert [tensor.data_ptr() for tensor in tensors(first)] == [tensor.data_ptr() for tensor in tensors(other)]
        assert not {id(part) for part in first.modules()} & {id(part) for part in other.modules()}
        twins = dict(other.named_modules(remove_duplicate=False))
        assert [type(part) for part in twins.values()] == [type(part) for part in names.values()]
        assert twins.keys() == names.keys()
        assert not any(part.training for part in other.modules())
        torch.testing.assert_close(extract(model, number, rows, captures)["."], truth[".", 0, (), "output"])
    assert not {id(part) for part in others[0].modules()} & {id(part) for part in others[1].modules()}
    assert model.hooks == 0


class Heavy(nn.Module):
    """Four MiB of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 2**17)
        self.narrow = nn.Linear(2**17, 1, bias=False)
        self.register_buffer("table", torch.ones(2**15, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.wide(x))
        return out + self.get_buffer("table")[0].sum()


def test_no_weight_is_stored_twice() -> None:
    """With four replicas as many large tensors are alive as with one: the weights, and a copy of the buffer."""
    gc.collect()
    gc.freeze()  # what others made is not counted
    try:
        model = load_model(here("Heavy"))
        weights = sum(tensor.nbytes for tensor in tensors(model.module)) + model.module.get_buffer("table").nbytes
        assert _alive() == weights
        model = load_model(here("Heavy"), replicas=4)
        assert len(model.replicas) == 4
        assert _alive() == weights
    finally:
        gc.unfreeze()


def _alive() -> int:
    """Bytes of all large tensors that anything holds."""
    gc.collect()
    found = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter) and item.layout is torch.strided]
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in found}
    return sum(size for size in storages.values() if size >= 2**18)


# Two threads


ROUNDS = 40
LAYERS = (("conv", "relu#*", "relu#0:input"), ("relu#1", "head"), ("head:input", "conv:input"), ("relu#0",))


def test_two_threads_at_once() -> None:
    """Two forwards that are halfway at the same moment, with hooks of different requests: each gets its own."""
    model = load_model(net_spec("Chain"), replicas=2)
    inputs = [batch(model.inputs, 1 + seed % 2, seed) for seed in range(4)]
    truth = [record(model.module, *rows.values()) for rows in inputs]
    asked = [wanted(model, *texts) for texts in LAYERS]
    together = threading.Barrier(2, timeout=PATIENCE_S)
    with ExitStack() as stack:
        for each in model.replicas:  # where a forward is halfway, whatever is asked for
            stack.enter_context(each.module.conv.register_forward_pre_hook(lambda *_: meet(together)))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        wrong = list(pool.map(lambda number: _rounds(model, number, inputs, asked, truth), range(2)))
    assert wrong == [[], []]
    assert model.hooks == 0


def meet(together: threading.Barrier) -> None:
    together.wait()


def _rounds(
    model: LoadedModel,
    number: int,
    inputs: list[dict[str, Tensor]],
    asked: list[dict[str, Capture]],
    truth: list[dict[Any, Tensor]],
) -> list[str]:
    torch.set_num_threads(1)
    wrong = []
    for turn in range(ROUNDS):
        which = (turn * (3 - 2 * number) + number) % len(inputs)
        captures = asked[(turn // 4 + number) % len(asked)]
        for key, value in extract(model, number, inputs[which], captures).items():
            point = captures[key].point
            expected = truth[which][point.layer, point.call, point.path, point.site]
            if value.shape != expected.shape or not torch.allclose(value, expected, rtol=1e-4, atol=1e-5):
                wrong.append(f"{turn}: {key}")
    return wrong


# Modules that there is one of


class Plain(nn.Module):
    """Two layers, whatever else a module below does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.linear(x))


class Locked(Plain):
    """Holds what can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Closure(Plain):
    """Calls its part by a function that knows the original."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Callable[[Tensor], Tensor] = lambda x: self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x))


@pytest.mark.parametrize("name", ["Locked", "Closure"])
def test_one_replica_only(name: str) -> None:
    """What can't be run by two threads at once is loaded for one, and runs."""
    model = load_model(here(name), replicas=2)
    assert len(model.replicas) == 1
    rows = batch(model.inputs, 2)
    found = extract(model, 0, rows, wanted(model, "linear"))["linear"]
    weight, bias = model.module.get_parameter("linear.weight"), model.module.get_parameter("linear.bias")
    torch.testing.assert_close(found, nn.functional.linear(rows["x"], weight, bias))
    assert model.hooks == 0

"""Graphs that a model cuts, or makes a second time: no zeros for want of a graph, and no gradient of something else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.errors import InputError
from layertap.models.hooks import attach
from layertap.models.hooks.attach import Modules
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Intervention, Objective, Operation
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.extractor import extract_slices
from layertap.models.spec import InputSpec
from tests.models.extraction import run_plan
from tests.oracle import seeded

SUM = Objective("sum")
Off = Callable[[], Any]


def known(net: nn.Module, *shape: int, dtype: str = "float64") -> tuple[nn.Module, Catalog]:
    """A module in float64 with random frozen weights, and its catalog."""
    net = seeded(net, 1).double().eval().requires_grad_(False)
    specs = (InputSpec("x", shape, dtype),)
    return net, survey(net, specs, lambda rows: net(*rows.values()), torch.device("cpu"), 0, torch.float64)


def planned(catalog: Catalog, *texts: str, objective: Objective = SUM, **edits: Operation) -> Plan:
    """A plan; ``edits`` by layer, dots as double underscores."""
    made = [Intervention(parse_selector(name.replace("__", ".")), how) for name, how in edits.items()]
    return make_plan([parse_selector(text) for text in texts], catalog, made, objective)


def answer(net: nn.Module, x: Tensor, plan: Plan) -> dict[str, Tensor]:
    """The project's answer, by key."""
    return {key: value.double() for key, value in run_plan(net, x, plan).items()}


def ours(net: nn.Module, catalog: Catalog, x: Tensor, *texts: str) -> dict[str, Tensor]:
    """The gradients of the sum of the output, by key."""
    return answer(net, x, planned(catalog, *texts))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def same(found: Tensor, truth: Tensor) -> None:
    """Equal but for rounding to float32, and not zero."""
    assert float(truth.abs().max()) > 0
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)


class Cut(nn.Module):
    """Its middle part computes without a graph, or lets go of it."""

    def __init__(self, off: Off = nullcontext, detach: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.side = nn.Linear(4, 3)
        self.off, self.detach = off, detach

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.side(x)
        with self.off():
            y = self.middle(x)
        y = y.detach() if self.detach else y
        return self.head(y)


CUTS: dict[str, Callable[[], Cut]] = {
    "no_grad": lambda: Cut(torch.no_grad),
    "inference_mode": lambda: Cut(torch.inference_mode),
    "detach": lambda: Cut(detach=True),
}


@pytest.mark.parametrize("texts", [(".:grad_input",), ("first:grad_output", "head:grad_input")])
@pytest.mark.parametrize("kind", CUTS)
def test_no_zeros_before_a_cut(kind: str, texts: tuple[str, ...]) -> None:
    """A gradient that a model's own detaching keeps from flowing is refused, whatever else is asked for with it."""
    net, catalog = known(CUTS[kind](), 4)
    with pytest.raises(InputError, match="computes without gradients") as caught:
        ours(net, catalog, drawn(2, 4), *texts)
    assert "detach()" in caught.value.hint
    assert attach.count_hooks(net) == 0


def test_a_side_branch_is_zero() -> None:
    """A layer that the objective does not depend on has the gradient zero, also where no other is asked for."""
    net, catalog = known(Cut(), 4)
    x = drawn(2, 4)
    assert torch.equal(ours(net, catalog, x, "side:grad_output")["side:grad_output"], torch.zeros(2, 3).double())
    edit = planned(catalog, "first:grad_output", middle=Operation("replace", value=1.0))
    assert torch.equal(answer(net, x, edit)["first:grad_output"], torch.zeros(2, 4).double())


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize(
    "mate", [("head:grad_input", None), ("first:grad_output", "first"), ("first:grad_input", "side")]
)
def test_neighbours_do_not_hide_a_cut(kind: str, mate: tuple[str, str | None]) -> None:
    """A request that is refused alone is refused beside one whose objective does have a graph, whatever that is."""
    net, catalog = known(CUTS[kind](), 4)
    text, layer = mate
    other = Objective("layer", selector=parse_selector(layer)) if layer else SUM
    fine = planned(catalog, text, objective=other)
    cut = planned(catalog, "first:grad_output")
    x = drawn(3, 4)
    good = RequestSlice(0, 1, fine.captures, (), fine.objective)
    taken = extract_slices(Modules(net), lambda: net(x[:1]), [good], 1).select(good)
    assert all(reduced.values.any() for reduced in taken.values())
    for shares in (
        [good, RequestSlice(1, 3, cut.captures, (), cut.objective)],
        [RequestSlice(1, 3, cut.captures, (), cut.objective), good],
    ):
        with pytest.raises(InputError, match="computes without gradients"):
            extract_slices(Modules(net), lambda: net(x), shares, 3)


class Block(nn.Module):
    """One activation runs once, one twice and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.relu = nn.Tanh(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.one(x) + 0.5)
        y = self.relu(self.two(self.act(y)) + 0.5)
        return x + y * y


class Checkpointed(nn.Module):
    """Two blocks, of which nothing is kept for the backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.stem, self.low, self.high, self.head = nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (self.low, self.high):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def by_hand(net: Any, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the sum of the output, by autograd on the model without checkpoints, part after part."""
    found: dict[str, Tensor] = {".:grad_input": x.clone().requires_grad_()}
    found["stem:grad_output"] = y = net.stem(found[".:grad_input"])
    for name in ("low", "high"):
        block = getattr(net, name)
        found[f"{name}.one:grad_output"] = one = block.one(y)
        found[f"{name}.act:grad_input"] = first = torch.relu(one + 0.5)
        found[f"{name}.act:grad_output"] = act = block.act(first)
        found[f"{name}.two:grad_output"] = two = block.two(act)
        second = torch.relu(two + 0.5)
        found[f"{name}:grad_output"] = y = y + second * second
    gradients = torch.autograd.grad(net.head(y).sum(), list(found.values()))
    return dict(zip(found, gradients, strict=True))


POINTS = (".one:grad_output", ".act:grad_input", ".act:grad_output", ".two:grad_output", ":grad_output")
NAMES = (".:grad_input", "stem:grad_output", *(block + point for block in ("low", "high") for point in POINTS))


@pytest.mark.parametrize("texts", [NAMES, *((name,) for name in NAMES[1:5])], ids=lambda texts: texts[-1])
def test_checkpointed(texts: tuple[str, ...]) -> None:
    """A model that computes its values again in the backward has the gradients of one that keeps them."""
    net, catalog = known(Checkpointed(reentrant=False), 4)
    x = drawn(3, 4)
    truth = by_hand(net, x)
    found = ours(net, catalog, x, *texts)
    assert tuple(found) == texts
    for text in texts:
        same(found[text], truth[text])
    assert attach.count_hooks(net) == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_checkpointed_by_the_old_way() -> None:
    """A checkpoint that allows no gradient of values is refused, after it there is one."""
    net, catalog = known(Checkpointed(reentrant=True), 4)
    x = drawn(2, 4)
    with pytest.raises(InputError, match="can't be differentiated"):
        ours(net, catalog, x, ".:grad_input")
    with pytest.raises(InputError, match="without gradients"):
        ours(net, catalog, x, "low.one:grad_output")
    found = ours(net, catalog, x, "head:grad_input")["head:grad_input"]
    same(found, by_hand(net, x)["high:grad_output"])
    assert attach.count_hooks(net) == 0

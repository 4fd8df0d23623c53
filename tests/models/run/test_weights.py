"""Each row's gradients of weights, against torch.func, or plain autograd where that takes no such model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from layertap.models.errors import InputError
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Objective
from layertap.models.plan.selectors import parse_selector
from tests.models.extraction import run_plan
from tests.nets import resnet, surveyed, vit
from tests.oracle import seeded

ROWS, KLASS = 3, 2


class TiedHead(nn.Module):
    """A language model whose head is its table, which it reads itself; the encoder's output projection never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.encoder = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 3).long().clamp(max=10)
        return self.head(self.encoder(self.table(tokens)))[:, -1] * self.scale


class Doubled(torch.autograd.Function):
    """No batching rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Unbatchable(nn.Module):
    """Branches on its values and runs a recurrent part, whose weights are in a list too; checkpoints another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.memory, self.head = nn.Linear(4, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)
        nn.utils.parametrizations.weight_norm(self.head)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=False)
        hidden = Doubled.apply(hidden) if hidden.sum() > -1e9 else hidden
        hidden, _ = self.memory(hidden)
        return self.head(hidden[:, -1])


def compute_loss(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The cross-entropy of one row."""
    scores = functional_call(module, weights, (x[None],))
    return functional.cross_entropy(scores, torch.tensor([KLASS]))


class Listed(nn.Module):
    """Reads a weight from a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 5)
        self.listed = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.listed[0] + self.linear.bias)


def test_a_weight_read_elsewhere() -> None:
    """No gradient is better than a wrong one; those of the others are there."""
    module = seeded(Listed(), 8).requires_grad_(False)
    catalog = surveyed(module, 4)
    texts = (".[linear.weight]:grad_weight", ".[linear.bias]:grad_weight")
    plans = [make_plan([parse_selector(text)], catalog, objective=Objective("norm")) for text in texts]
    with pytest.raises(InputError, match="elsewhere than in its module") as caught:
        run_plan(module, torch.ones(1, 4), plans[0])
    assert [point.path for point in caught.value.points] == [("linear.weight",)]
    (found,) = run_plan(module, torch.ones(1, 4), plans[1]).values()
    assert found.abs().max() > 0
    assert module.linear.weight is module.listed[0]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the oracle's batching rules
@pytest.mark.parametrize(
    ("build", "shape", "selectors", "batches"),
    [
        (resnet, (3, 32, 32), ["conv1:grad_weight", "layer2.0.*:grad_weight", "fc[bias]:grad_weight"], True),
        (vit, (3, 32, 32), [".:grad_weight", "encoder*:grad_weight", "heads.head:grad_weight"], True),
        (
            lambda: seeded(TiedHead(), 5),
            (6,),
            ["table:grad_weight", "head:grad_weight", "*:grad_weight", ".:grad_weight"],
            True,
        ),
        (lambda: seeded(Unbatchable(), 6), (7, 4), ["*:grad_weight"], False),
    ],
    ids=["resnet", "vit", "tied", "unbatchable"],
)
def test_as_torch_func(
    build: Callable[[], nn.Module], shape: tuple[int, ...], selectors: list[str], batches: bool
) -> None:
    """Every weight named has the gradient of each row's loss; the module has its own parameters again, frozen."""
    module = build().eval().requires_grad_(False)
    catalog = surveyed(module, *shape)
    x = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(7))
    before = {name: (value, value.clone()) for name, value in module.named_parameters(remove_duplicate=False)}
    objective = Objective("cross_entropy", KLASS)
    plan = make_plan([parse_selector(text) for text in selectors], catalog, objective=objective)
    rows = [run_plan(module, row[None], plan) for row in x]

    weights = {name: value.detach() for name, value in module.named_parameters()}
    if batches:
        expected = vmap(grad(lambda *given: compute_loss(module, *given)), (None, 0))(weights, x)
    else:  # torch.func takes neither checkpoints nor such functions
        plain, target = copy.deepcopy(module).requires_grad_(), torch.tensor([KLASS])
        each = [
            torch.autograd.grad(functional.cross_entropy(plain(row[None]), target), [*plain.parameters()]) for row in x
        ]
        expected = dict(zip(weights, map(torch.stack, zip(*each, strict=True)), strict=True))
    names = {id(value): name for name, value in reversed([*module.named_parameters()])}
    seen = set()
    for result in plan.results:
        point = result.capture.point
        name = f"{point.layer}.{point.path[0]}".removeprefix("..").removeprefix(".")
        found = torch.cat([row[result.key] for row in rows])
        wanted = expected[names[id(before[name][0])]]
        assert found.shape == wanted.shape == result.capture.shape(ROWS)
        assert wanted.abs().max() > 0
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
        seen.add(name)
    if "*:grad_weight" in selectors:
        assert seen == before.keys()
    after = dict(module.named_parameters(remove_duplicate=False))
    for name, (value, copied) in before.items():
        assert after[name] is value
        assert not value.requires_grad
        assert torch.equal(value, copied)

"""Objectives that look at one position: a pixel of a map of scores, a pixel or a token of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.errors import RequestError
from layertap.models.selection.hook_points import Objective
from layertap.models.selection.selectors import parse_selector
from tests.models.gradients.test_gradients import exact, ours, plan_for


class Segmenter(nn.Module):
    """Scores of five classes at each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Conv2d(3, 4, 3, padding=1)
        self.scores = nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(torch.tanh(self.early(x)))


OBJECTIVES: dict[str, tuple[Objective, Callable[[Tensor], Tensor]]] = {
    "class": (Objective("logit", 2, position=(1, 6)), lambda out: out[:, 2, 1, 6].sum()),
    "top": (Objective("logit", "top", position=(-1, 0)), lambda out: out[:, :, -1, 0].amax(1).sum()),
    "probability": (Objective("probability", 4, position=(3, -2)), lambda out: out.softmax(1)[:, 4, 3, -2].sum()),
    "sum": (Objective("sum", position=(0, 0)), lambda out: out[:, :, 0, 0].sum()),
    "layer": (
        Objective("layer", selector=parse_selector("scores"), channel=-1, position=(2, 2)),
        lambda out: out[:, -1, 2, 2].sum(),
    ),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_pixel_of_scores(name: str) -> None:
    """A class there, the best there, a probability there: what autograd gives of the indexed output."""
    objective, score = OBJECTIVES[name]
    module, catalog = exact(Segmenter(), 3, 8, 9)
    x = drawn(2, 3, 8, 9)
    found = ours(module, catalog, x, objective, "early:grad_output")["early:grad_output"]
    net: Any = module
    start = net.early(x).detach().requires_grad_()
    (wanted,) = torch.autograd.grad(score(net.scores(torch.tanh(start))), start)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-12)


REFUSED = {
    "beyond the rows": (Objective("logit", 0, position=(8, 0)), "between -8 and 7 and between -9 and 8"),
    "before the columns": (Objective("logit", 0, position=(0, -10)), "between -8 and 7 and between -9 and 8"),
    "a token": (Objective("logit", 0, position=(0,)), "no tokens"),
    "a class beyond": (Objective("logit", 5, position=(0, 0)), "use 0 to 4"),
    "no position": (Objective("logit", 0), 'add "position": [0, 0]'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What is not there is told with what to write instead."""
    objective, said = REFUSED[name]
    _, catalog = exact(Segmenter(), 3, 8, 9)
    with pytest.raises(RequestError) as caught:
        plan_for(catalog, objective, "early:grad_output")
    fault = caught.value.faults[0]
    assert said in f"{fault.detail} {fault.hint}"

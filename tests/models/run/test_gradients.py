"""Gradients at every layer, against finite differences and against autograd on models that were split by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.errors import InputError, RequestError
from layertap.models.hooks import attach
from layertap.models.hooks.attach import Modules
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Intervention, Objective, ObjectiveKind, Operation
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.extractor import extract_slices
from layertap.models.spec import InputSpec
from tests.models.extraction import run_plan
from tests.nets import Pruned, resnet, surveyed

CPU = torch.device("cpu")


def exact(module: nn.Module, *shape: int) -> tuple[nn.Module, Catalog]:
    """A module in float64 with frozen weights, and its catalog."""
    module = module.double().eval().requires_grad_(False)
    specs = (InputSpec("x", shape, "float64"),)
    return module, survey(module, specs, lambda rows: module(*rows.values()), CPU, 0, torch.float64)


def plan_for(catalog: Catalog, objective: Objective, *texts: str) -> Plan:
    """The plan for some selectors and an objective."""
    return make_plan([parse_selector(text) for text in texts], catalog, objective=objective)


def ours(module: nn.Module, catalog: Catalog, x: Tensor, objective: Objective, *texts: str) -> dict[str, Tensor]:
    """The project's gradients, by key; ``x`` is a batch."""
    return run_plan(module, x, plan_for(catalog, objective, *texts))


def score(out: Tensor, objective: Objective) -> Tensor:
    """The objective of each row of a model's output, by the textbook."""
    if objective.kind == "sum":
        return out.flatten(1).sum(1)
    if objective.kind == "mean":
        return out.flatten(1).mean(1)
    if objective.kind == "norm":
        return out.flatten(1).square().sum(1).sqrt()
    if isinstance(objective.klass, tuple):
        values = {"logit": out, "probability": out.softmax(1), "binary": out.sigmoid()}[objective.kind]
        return torch.stack([weight * values[:, klass] for weight, klass in objective.klass]).sum(0)
    if objective.reduction is not None:  # torch's own loss of each row alone
        loss, target = LOSSES[objective.kind](reduction=objective.reduction), out.new_tensor(objective.target)
        given = out.log_softmax(1) if objective.kind == "kl_div" else out
        return torch.stack([loss(row[None], target[None]) for row in given])
    if objective.kind == "mse":
        return ((out - out.new_tensor(objective.target)) ** 2).mean(1)
    if objective.kind == "cross_entropy" and objective.target:
        return -(out.new_tensor(objective.target) * out.log_softmax(1)).sum(1)
    klass = out.argmax(1) if objective.klass == "top" else torch.full((len(out),), int(objective.klass or 0))
    chosen = torch.arange(len(out)), klass
    exponentials = (out - out.max(1, keepdim=True).values).exp()
    probabilities = exponentials / exponentials.sum(1, keepdim=True)
    if objective.kind == "kl_div":
        target = (
            torch.tensor(objective.target, dtype=out.dtype)
            if objective.target
            else functional.one_hot(klass, out.shape[1])
        )
        return (torch.special.xlogy(target, target) - target * probabilities.log()).sum(1)
    return {
        "logit": lambda: out[chosen],
        "probability": lambda: probabilities[chosen],
        "cross_entropy": lambda: -probabilities[chosen].log(),
    }[objective.kind]()


def split(net: Any) -> list[Callable[[Tensor], Tensor]]:
    """A ResNet as a chain of functions."""
    return [
        lambda x: net.relu(net.bn1(net.conv1(x))),
        lambda x: net.layer1(net.maxpool(x)),
        net.layer2,
        net.layer3,
        net.layer4,
        lambda x: net.fc(torch.flatten(net.avgpool(x), 1)),
    ]


LOSSES: dict[str, Any] = {"kl_div": nn.KLDivLoss, "mse": nn.MSELoss, "cross_entropy": nn.CrossEntropyLoss}
SHARES = (0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1)
OBJECTIVES = (
    Objective("logit", 2),
    Objective("probability", ((0.5, 1), (2.0, 1), (-1.0, 0))),
    Objective("binary", ((1.0, 5), (1.0, 2))),
    Objective("cross_entropy", target=SHARES),
    Objective("mse", target=(-1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 3.0)),
    Objective("norm"),
    Objective("logit", "top"),
    Objective("probability", 4),
    Objective("cross_entropy", 1),
    Objective("kl_div", "top"),
    Objective("kl_div", target=SHARES),
    *(Objective("kl_div", target=SHARES, reduction=each) for each in ("mean", "batchmean")),
    *(Objective("mse", target=(-1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 3.0), reduction=each) for each in ("mean", "sum")),
    Objective("cross_entropy", target=SHARES, reduction="sum"),
    Objective("sum"),
    Objective("mean"),
)


@pytest.fixture(scope="module")
def known() -> tuple[nn.Module, Catalog]:
    """A ResNet with frozen weights and its catalog, which nobody changes."""
    module = resnet().eval().requires_grad_(False)
    return module, surveyed(module, 3, 32, 32)


@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_split_by_hand(objective: Objective, known: tuple[nn.Module, Catalog]) -> None:
    """What autograd gives on a model whose parts are called one after the other."""
    module, catalog = known
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    names = ["relu:grad_output", "layer1:grad_output", "layer2:grad_output", "layer3:grad_output", "layer4:grad_output"]
    found = ours(module, catalog, x, objective, ".:grad_input", *names, "fc:grad_output")
    values = [x.clone().requires_grad_()]
    for part in split(module):
        values.append(part(values[-1].clone()))
    gradients = torch.autograd.grad(score(values[-1], objective).sum(), values)
    for (key, got), wanted in zip(found.items(), gradients, strict=True):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max()) + 1e-9, msg=key)


@pytest.mark.parametrize(
    ("objective", "compute"),
    [
        (Objective("layer", channel=3), lambda out: out[:, 3].mean((1, 2))),
        (
            Objective("layer", channel=((2.0, 3), (-1.0, -1))),
            lambda out: 2 * out[:, 3].mean((1, 2)) - out[:, -1].mean((1, 2)),
        ),
        (Objective("sum"), lambda out: out.sum()),
        (Objective("norm"), lambda out: out.flatten(1).norm(dim=1)),
    ],
    ids=("channel", "channels", "sum", "norm"),
)
def test_objective_of_a_layer(objective: Objective, compute: Callable[[Tensor], Tensor]) -> None:
    """A channel's mean over its positions, a weighted sum of them, all of the layer; layers after it are refused."""
    module, catalog = exact(resnet(), 3, 32, 32)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    objective = replace(objective, selector=parse_selector("layer2"))
    found = ours(module, catalog, x, objective, "layer1:grad_output")["layer1:grad_output"]
    whole: Any = module
    start = whole.layer1(whole.maxpool(whole.relu(whole.bn1(whole.conv1(x))))).clone().requires_grad_()
    wanted = torch.autograd.grad(compute(whole.layer2(start.clone())).sum(), start)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-12)
    with pytest.raises(RequestError, match="does not depend"):
        plan_for(catalog, objective, "layer3:grad_output")


def test_nothing_is_left() -> None:
    """No gradient on any parameter, no hook, flags as before; a frozen model and one that is not give the same."""
    module = resnet().eval()
    flags = [(name, value.requires_grad) for name, value in module.named_parameters()]
    catalog = surveyed(module, 3, 32, 32)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    first = ours(module, catalog, x, Objective("logit", 0), "layer?:grad_input")
    assert flags == [(name, value.requires_grad) for name, value in module.named_parameters()]
    assert all(value.grad is None for value in module.parameters())
    assert attach.count_hooks(module) == 0
    assert not module.training
    second = ours(module.requires_grad_(False), catalog, x, Objective("logit", 0), "layer?:grad_input")
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not [value for value in first.values() if value.requires_grad or value.is_inference()]


@pytest.mark.parametrize("where", ["linear:grad_input", "keep:grad_output"])
def test_refused_where_a_tensor_is_not_as_promised(where: str) -> None:
    """Fewer tokens than the catalog says: no gradient of another shape, no rows cut elsewhere."""
    module, catalog = exact(Pruned(), 6, 4)
    x = torch.full((2, 6, 4), 100.0, dtype=torch.float64)
    with pytest.raises(InputError, match="not float64"):
        ours(module, catalog, x, Objective("sum"), where)


def test_no_graph_outlives_its_forward() -> None:
    """Changed gradients do not tie the graph to what holds it: no collector would see that circle."""
    module, catalog = exact(resnet(), 3, 32, 32)
    edit = Intervention(parse_selector("layer1:grad_output"), Operation("scale", by=2.0))
    plan = make_plan([parse_selector("layer3:grad_output")], catalog, [edit], Objective("logit", 1))
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    gc.collect()
    gc.freeze()  # what others made is not looked at
    for _ in range(3):
        share = RequestSlice(0, 1, plan.captures, plan.resolved_interventions, plan.objective)
        extract_slices(Modules(module), lambda: module(x), [share], 1)
    gc.collect()
    left = [value.shape for value in gc.get_objects() if type(value) is Tensor and value.requires_grad]
    gc.unfreeze()
    assert left == []


class Segmenter(nn.Module):
    """Scores of five classes at each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Conv2d(3, 4, 3, padding=1)
        self.scores = nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(torch.tanh(self.early(x)))


POSITIONS: dict[str, tuple[Objective, Callable[[Tensor], Tensor]]] = {
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


@pytest.mark.parametrize("name", POSITIONS)
def test_a_pixel_of_scores(name: str) -> None:
    """A class there, the best there, a probability there: what autograd gives of the indexed output."""
    objective, score = POSITIONS[name]
    module, catalog = exact(Segmenter(), 3, 8, 9)
    x = drawn(2, 3, 8, 9)
    found = ours(module, catalog, x, objective, "early:grad_output")["early:grad_output"]
    net: Any = module
    start = net.early(x).detach().requires_grad_()
    (wanted,) = torch.autograd.grad(score(net.scores(torch.tanh(start))), start)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-12)


REFUSED = {
    "beyond the rows": (Objective("logit", 0, position=(8, 0)), "between -8 and 7"),
    "before the columns": (Objective("logit", 0, position=(0, -10)), "between -9 and 8"),
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


@pytest.mark.parametrize("kind", ["probability", "cross_entropy", "kl_div"])
def test_a_single_score(kind: ObjectiveKind) -> None:
    """Softmax of a lone score is 1 for every input: such an objective is refused, and two others are named."""
    _, catalog = exact(nn.Linear(4, 1), 4)
    with pytest.raises(RequestError, match="a single score") as caught:
        plan_for(catalog, Objective(kind, klass=0), ".:grad_input")
    assert "binary" in caught.value.hint

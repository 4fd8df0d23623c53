"""Values changed in flight, against models that were edited by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Catalog
from layertap.models.errors import RequestError
from layertap.models.hooks.attach import Modules
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Intervention, Objective, Operation, TensorData
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.extractor import extract_slices
from tests.models.extraction import run_plan
from tests.nets import WindowMajor, Windows, bottlenecks, resnet, surveyed, swin, vit

Change = Callable[[Tensor], Tensor]


class Edited(nn.Module):
    """A module whose input or output is changed by a function."""

    def __init__(self, inner: nn.Module, before: Change | None = None, after: Change | None = None) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor) -> Any:
        out = self.inner(self.before(x) if self.before else x)
        return self.after(out) if self.after else out


def by_hand(module: nn.Module, name: str, **changes: Change) -> nn.Module:
    """A copy of a model in which one module is edited; no hook has a part in it."""
    edited = copy.deepcopy(module)
    parent = edited.get_submodule(name.rpartition(".")[0])
    setattr(parent, name.rpartition(".")[2], Edited(edited.get_submodule(name), **changes))
    return edited


def planned(catalog: Catalog, how: Operation, where: str, *texts: str, objective: Objective | None = None) -> Plan:
    """The plan for some selectors with one intervention."""
    return make_plan(
        [parse_selector(text) for text in texts], catalog, [Intervention(parse_selector(where), how)], objective
    )


def values(array: Any) -> TensorData:
    """A tensor as a request has it."""
    found = np.asarray(array, np.float32)
    return TensorData(found.shape, found.tobytes())


def randoms(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cut(tensor: Tensor, how: Change, *index: Any) -> Tensor:
    """A copy with a part changed."""
    made = tensor.clone()
    made[index] = how(made[index])
    return made


OPERATIONS: dict[str, tuple[Operation, Change]] = {
    "zero": (Operation("zero"), torch.zeros_like),
    "add": (Operation("add", value=0.7), lambda v: v + 0.7),
    "add tensor": (Operation("add", tensor=values(randoms(64, 8, 8, seed=5))), lambda v: v + randoms(64, 8, 8, seed=5)),
    "scale channels": (
        Operation("scale", tensor=values(randoms(2, 1, 1, seed=5)), channels=(9, 1)),
        lambda v: cut(v, lambda part: part * randoms(2, 1, 1, seed=5), slice(None), [9, 1]),
    ),
    "clamp": (Operation("clamp", min=-0.1, max=0.2), lambda v: v.clip(-0.1, 0.2)),
    "relu": (Operation("relu"), torch.relu),
    "replace tensor": (
        Operation("replace", tensor=values(randoms(64, 8, 8, seed=6))),
        lambda v: randoms(64, 8, 8, seed=6).expand_as(v).clone(),
    ),
    "region": (
        Operation("scale", by=3.0, region=(1, 2, 4, 8)),
        lambda v: cut(v, lambda part: part * 3.0, slice(None), slice(None), slice(1, 4), slice(2, 8)),
    ),
    "noise": (
        Operation("noise", std=0.5, seed=11),
        lambda v: v + 0.5 * torch.stack([randoms(64, 8, 8, seed=11 + row) for row in range(len(v))]),
    ),
}


@pytest.fixture(scope="module")
def known() -> tuple[nn.Module, Catalog]:
    """A ResNet and its catalog, which nobody changes."""
    module = resnet().eval().requires_grad_(False)
    return module, surveyed(module, 3, 32, 32)


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("kind", OPERATIONS)
def test_operations(known: tuple[nn.Module, Catalog], kind: str, side: str) -> None:
    """Each operation on each side: what comes later is what a model edited by hand computes."""
    module, _ = known
    how, change = OPERATIONS[kind]
    # layer1.0.bn2 takes and returns (rows, 64, 8, 8); what it returns is overwritten later.
    plan = planned(known[1], how, f"layer1.0.bn2:{side}", "layer1", "layer4", ".", f"layer1.0.bn2:{side}")
    x = randoms(3, 3, 32, 32, seed=1)
    found = run_plan(module, x, plan)
    edited: Any = by_hand(module, "layer1.0.bn2", **{{"output": "after", "input": "before"}[side]: change})
    with torch.inference_mode():
        start = edited.maxpool(edited.relu(edited.bn1(edited.conv1(x))))
        first = edited.layer1(start)
        torch.testing.assert_close(found["layer1"], first)
        torch.testing.assert_close(found["layer4"], edited.layer4(edited.layer3(edited.layer2(first))))
        torch.testing.assert_close(found["."], edited(x))
        plain = module(x)
    assert not torch.allclose(found["."], plain)
    # What is captured where it was changed is the changed value.
    block: Any = module.get_submodule("layer1.0")
    with torch.inference_mode():
        entered = block.conv2(block.relu(block.bn1(block.conv1(start))))
        before = block.bn2(entered) if side == "output" else entered
        torch.testing.assert_close(found[f"layer1.0.bn2:{side}"], change(before))


@pytest.mark.parametrize(
    ("factory", "where"), [(vit, "encoder.layers.encoder_layer_0.mlp"), (swin, "features.1.0.mlp")]
)
def test_tokens_and_channels_last(factory: Callable[[], nn.Module], where: str) -> None:
    """Channels and tokens are found on whatever axis they are."""
    module = factory().eval()
    catalog = surveyed(module, 3, 32, 32, prefix=1 if factory is vit else 0)
    layout = catalog.layers[where].calls[0].output.tensors[0].layout
    how = Operation("zero", channels=(1, 4), tokens=(0, 3) if layout == "NTC" else None)
    x = randoms(2, 3, 32, 32, seed=3)
    found = run_plan(module, x, planned(catalog, how, where, "."))["."]

    def change(v: Tensor) -> Tensor:
        made = v.clone()
        for channel in (1, 4):
            if layout == "NTC":
                for token in (0, 3):
                    made[:, token, channel] = 0
            else:
                made[..., channel] = 0
        return made

    with torch.inference_mode():
        torch.testing.assert_close(found, by_hand(module, where, after=change)(x))
        assert not torch.allclose(found, module(x))


def test_clipped_gradients(known: tuple[nn.Module, Catalog]) -> None:
    """What is done to a gradient on its way back is what is returned, and what everything before it gets."""
    module, catalog = known
    x = randoms(2, 3, 32, 32, seed=7)
    how = Operation("clamp", min=-0.01, max=0.02, channels=(2, 3, 4))
    plan = planned(
        catalog, how, "layer2:grad_output", "layer2:grad_output", "layer1:grad_output", objective=Objective("logit", 1)
    )
    found = run_plan(module, x, plan)
    net: Any = module
    start = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x))))).clone().requires_grad_()
    middle = net.layer2(start.clone())
    end = net.fc(torch.flatten(net.avgpool(net.layer4(net.layer3(middle.clone()))), 1))
    gradient = torch.autograd.grad(end[:, 1].sum(), middle, retain_graph=True)[0]
    clipped = gradient.clone()
    clipped[:, [2, 3, 4]] = clipped[:, [2, 3, 4]].clip(-0.01, 0.02)
    assert not torch.equal(gradient, clipped)
    torch.testing.assert_close(found["layer2:grad_output"], clipped, rtol=1e-4, atol=1e-7)
    back = torch.autograd.grad(middle, start, grad_outputs=clipped)[0]
    torch.testing.assert_close(found["layer1:grad_output"], back, rtol=1e-4, atol=1e-7)


def test_every_call_by_default() -> None:
    """A module that runs three times is changed three times; one call is named by its number."""
    module = bottlenecks().eval()
    catalog = surveyed(module, 3, 32, 32)
    half = Operation("scale", by=0.5)

    def calls(where: str) -> list[tuple[str, int]]:
        return [
            (edit.point.layer, edit.point.call) for edit in planned(catalog, half, where, ".").resolved_interventions
        ]

    assert calls("layer1.0.relu") == calls("layer1.0.relu#*") == [("layer1.0.relu", call) for call in range(3)]
    assert calls("layer1.0.relu#1") == [("layer1.0.relu", 1)]
    assert calls("layer1.0.conv1") == [("layer1.0.conv1", 0)]
    assert len(calls("layer?.0.relu")) == 12
    x = randoms(2, 3, 32, 32, seed=12)
    found = run_plan(module, x, planned(catalog, half, "layer1.0.relu", "."))["."]
    with torch.inference_mode():
        torch.testing.assert_close(found, by_hand(module, "layer1.0.relu", after=lambda v: v * 0.5)(x))


REFUSED: dict[str, tuple[str, Operation, str]] = {
    "channel": ("layer1", Operation("zero", channels=(64,)), "between -64 and 63"),
    "tokens": ("layer1", Operation("zero", tokens=(0,)), "no axis"),
    "region": ("layer1", Operation("zero", region=(0, 0, 9, 8)), "within 8 by 8"),
    "shape": ("layer1", Operation("replace", tensor=values(np.zeros((64, 8, 7)))), "has shape"),
    "both": ("layer1", Operation("add", value=1.0, tensor=values(np.zeros((64, 8, 8)))), "not both"),
    "replace beyond float32": ("layer1", Operation("replace", value=1e39), "does not hold"),
    "site": ("layer1:attention_grad", Operation("scale", by=0.5), "is not possible"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(known: tuple[nn.Module, Catalog], kind: str) -> None:
    """What makes no sense is refused before any forward, with its place."""
    where, how, words = REFUSED[kind]
    with pytest.raises(RequestError, match=words) as caught:
        planned(known[1], how, where, "layer4")
    assert [fault.pointer for fault in caught.value.faults] == ["/interventions/0"]


@pytest.mark.parametrize("how", [Operation("replace", tensor=values(np.ones((4, 2, 6)))), Operation("noise", std=1.0)])
def test_alone_where_rows_do_not_stand_in_order(how: Operation) -> None:
    """Windows of all rows stand together: what is one row's own would land in another's. In row order it is fine."""
    assert planned(surveyed(WindowMajor(), 8, 6), how, "inner", ".").single_row
    module = Windows().eval()
    x = randoms(3, 8, 6, seed=8)
    plan = planned(surveyed(module, 8, 6), how, "inner", ".")
    assert not plan.single_row
    together = run_plan(module, x, plan)["."]
    for row in range(3):
        share = RequestSlice(0, 1, plan.captures, plan.resolved_interventions, row_offset=row)
        taken = extract_slices(Modules(module), lambda row=row: module(x[row : row + 1]), [share], 1).select(share)
        torch.testing.assert_close(together[row : row + 1], taken[plan.results[0].capture].values)


CHANGES: tuple[tuple[str, Operation], ...] = (
    ("layer2.0.conv1", Operation("noise", std=0.1, seed=2)),
    ("layer2:grad_output", Operation("scale", by=-1.0, channels=(1,))),
    ("conv1", Operation("clamp", min=-0.01)),
)


@pytest.mark.parametrize(
    "objective", [Objective("logit", 1), Objective("cross_entropy", 0)], ids=lambda goal: goal.kind
)
def test_alone_and_together(known: tuple[nn.Module, Catalog], objective: Objective) -> None:
    """Requests that share a forward, each with another change or none: each gets what it gets alone."""
    module, catalog = known
    x = randoms(8, 3, 32, 32, seed=9)
    texts = ("layer1:grad_output", "layer3", "conv1:grad_input")
    plans = [
        make_plan([parse_selector(text) for text in texts], catalog, [Intervention(parse_selector(at), how)], objective)
        for at, how in CHANGES
    ]
    plans.append(make_plan([parse_selector(text) for text in texts], catalog, (), Objective("sum")))
    shares = [
        RequestSlice(2 * at, 2 * at + 2, plan.captures, plan.resolved_interventions, plan.objective)
        for at, plan in enumerate(plans)
    ]
    taken = extract_slices(Modules(module), lambda: module(x.clone()), shares, len(x))
    for plan, share in zip(plans, shares, strict=True):
        alone = run_plan(module, x[share.start : share.stop], plan)
        for result in plan.results:
            found = taken.select(share)[result.capture].values
            torch.testing.assert_close(found, alone[result.key], rtol=1e-4, atol=1e-6, msg=f"{result.key} {share}")


class Comparing(Tensor):
    """Says when it equals another, so that it has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return Tensor.__eq__(self, other)  # type: ignore[arg-type]


def test_state_without_a_hash() -> None:
    """What a model keeps between forwards may be tensors of a class of its own."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    plan = planned(surveyed(module, 3), Operation("zero"), "0", "0")
    module.register_buffer("table", torch.zeros(3).as_subclass(Comparing))
    assert not run_plan(module, randoms(2, 3), plan)["0"].any()

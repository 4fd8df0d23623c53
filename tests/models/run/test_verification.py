"""What is put back gives the model's output again, and where it does not the layer is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Layer
from layertap.models.errors import RequestError
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Reduction, Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.verification import run_verified
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader
from tests.loading import load_model
from tests.nets import batch
from tests.oracle import record

NETS = ("resnet", "swin", "TimeOut", "Structured", "Keywords", "Recursive", "Encoder", "BatchCentred")


class Aliased(nn.Module):
    """Goes on with what it then writes to under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.same = nn.Identity()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.same(x)
        x.mul_(2)
        return self.head(y)


class Random(nn.Module):
    """Never gives the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out + torch.rand_like(out)


def plan_of(model: LoadedModel, *texts: str, **how: Any) -> Plan:
    chosen = [Selector(**{**vars(parse_selector(text)), "reduction": Reduction(**how)}) for text in texts]
    return make_plan(chosen, model.catalog)


def verified(model: LoadedModel, plan: Plan, rows: int = 2, padded: int | None = None) -> dict[Any, Tensor]:
    share = RequestSlice(0, rows, plan.captures)
    piece = batch(model.inputs, rows, seed=5)
    taken = run_verified(model, model.replicas[0], piece, share, plan, model.catalog, padded)
    assert model.hooks == 0
    return {capture.point: reduced.values for capture, reduced in taken.select(share).items()}


def offered(layer: Layer) -> bool:
    return bool(layer.calls) and all(info.dtype != "complex64" for call in layer.calls for info in call.output.tensors)


@pytest.mark.parametrize("name", NETS)
def test_every_layer(load_net: Loader, name: str) -> None:
    """Every output of every call, put back, gives the same: in-place layers, tied ones, windows, structured values."""
    model = load_net(name)
    texts = [f"{layer.name}#*" for layer in model.catalog.layers.values() if offered(layer) and layer.name != "."]
    plan = plan_of(model, *texts)
    rows = 2 if not model.catalog.crosses_rows and not plan.unsplittable else 1
    found = verified(model, plan, rows)
    seen = record(model.module, **batch(model.inputs, rows, seed=5))
    assert found.keys() == {capture.point for capture in plan.captures}
    for point, value in found.items():
        torch.testing.assert_close(
            value, seen[point.layer, point.call, point.path, "output"], rtol=1e-4, atol=1e-5, msg=str(point)
        )


def own(factory: str) -> LoadedModel:
    return load_model(ModelSpec("own", f"python:{__name__}:{factory}", inputs=(InputSpec("x", (4,)),)))


def test_written_to_under_another_name() -> None:
    """The captured value is what left the layer, not what the model went on with: that is told, with the layer."""
    model = own("Aliased")
    with pytest.raises(RequestError, match="'same#0'") as caught:
        verified(model, plan_of(model, "same", "head"))
    assert [fault.pointer for fault in caught.value.faults] == ["/verify"]
    assert verified(model, plan_of(model, "head"))
    assert model.hooks == 0


def test_never_the_same() -> None:
    """A model that is not deterministic is told from a layer that is not."""
    model = own("Random")
    with pytest.raises(RequestError, match="from one forward to the next"):
        verified(model, plan_of(model, "linear"))

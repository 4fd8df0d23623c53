"""Catalogues against what independent hooks see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader
from tests.loading import load_model
from tests.marks import slow
from tests.models.extraction import list_tensors, see
from tests.nets import INPUTS, BatchCentred, batch, surveyed
from tests.oracle import Key, seeded

ROWWISE = dict.fromkeys(INPUTS, True) | dict.fromkeys(("BatchCentred", "Recurrent", "Backwards", "OneRow"), False)
# Layers whose tensors hold the rows in another order, or of which only the whole batch can tell.
MIXED = {
    "WindowMajor": {("inner", "input"), ("inner", "output")},
    "Inner": {("similar", "output"), ("first", "output"), ("mean", "output")},
    "BatchCentred": {("mean", "output")},
    "OneRow": {("act", "input"), ("act", "output")},
    "Recurrent": {("lstm", "output")},  # the last state
    "Backwards": {("lstm", "output")},
}


def leaves(catalog: Catalog) -> dict[Key, TensorInfo]:
    found = list_tensors(catalog, "input", "output")
    return {(point.layer, point.call, point.path, point.site): info for point, info in found}


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", INPUTS)
def test_one_row(load_net: Loader, name: str) -> None:
    """Every tensor of every call of every layer, and no other, with the shape and dtype that hooks see for one row."""
    model = load_net(name)
    there = see(model, batch(model.inputs, 1, seed=1))
    known = leaves(model.catalog)
    assert known.keys() == there.keys()
    assert {key: info.shape for key, info in known.items()} == {key: tuple(value.shape) for key, value in there.items()}
    assert {key: f"torch.{info.dtype}" for key, info in known.items()} == {
        key: str(value.dtype) for key, value in there.items()
    }


@pytest.mark.parametrize("name", [name for name in INPUTS if ROWWISE[name]])
def test_rows(load_net: Loader, name: str) -> None:
    """Where a info is said to hold its rows in order, each row's part of a batch is what that row gives alone."""
    model = load_net(name)
    rows = batch(model.inputs, 3, seed=2)
    together = see(model, rows)
    alone = [see(model, {key: value[row : row + 1] for key, value in rows.items()}) for row in range(3)]
    assert not model.catalog.crosses_rows
    for key, info in leaves(model.catalog).items():
        if info.crosses_rows:
            continue
        assert tuple(together[key].shape) == info.shape_for(3), key
        for row, single in enumerate(alone):
            part = together[key]
            if info.row_axis is not None:
                part = part.narrow(info.row_axis, row * info.entries_per_row, info.entries_per_row)
            close(part, single[key])


@pytest.mark.parametrize("name", [name for name in INPUTS if not ROWWISE[name]])
def test_crossing_rows(load_net: Loader, name: str) -> None:
    """A model whose rows affect each other, or that takes one at a time, is found out, whichever row affects which."""
    assert load_net(name).catalog.crosses_rows


@pytest.mark.parametrize("name", INPUTS)
def test_mixed(load_net: Loader, name: str) -> None:
    """A tensor is marked mixed where its entries are not the rows', in order, and nowhere else."""
    marked = {(key[0], key[3]) for key, info in leaves(load_net(name).catalog).items() if info.crosses_rows}
    assert marked == MIXED.get(name, set())


def test_execution_order(load_net: Loader) -> None:
    """Layers stand in the order in which they first begin; those that never run come last, however many calls ran."""
    assert list(load_net("NeverCalled").catalog.layers) == [".", "often", "last", "silent"]
    resnet = load_net("resnet")
    begun = list(dict.fromkeys(name for name, _, _, site in see(resnet, batch(resnet.inputs, 1)) if site == "input"))
    assert list(resnet.catalog.layers) == begun
    assert begun[:8] == [".", "conv1", "bn1", "relu", "maxpool", "layer1", "layer1.0", "layer1.0.conv1"]


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_rounding_and_mixing(load_net: Loader, dtype: str) -> None:
    """In no dtype does rounding make rows look as if they affected each other, or an effect pass for rounding."""
    catalog = load_net("vit", dtype=dtype).catalog
    assert not catalog.crosses_rows
    assert not any(info.crosses_rows for info in leaves(catalog).values())
    assert catalog.layers["."].calls[0].output.tensors[0].dtype == dtype
    assert load_net("BatchCentred", dtype=dtype).catalog.crosses_rows
    assert leaves(load_net("WindowMajor", dtype=dtype).catalog)["inner", 0, (), "output"].crosses_rows


@pytest.mark.parametrize("name", ["resnet", "Recursive"])
def test_cost_grows_along_the_forward(load_net: Loader, name: str) -> None:
    """The share of the cost never falls from one moment to the next, and is 1 at the end; places are all different."""
    catalog = load_net(name).catalog
    calls = [call for layer in catalog.layers.values() for call in layer.calls]
    moments = sorted((moment.order, moment.cost) for call in calls for moment in (call.input, call.output))
    assert [cost for _, cost in moments] == sorted(cost for _, cost in moments)
    assert len({order for order, _ in moments}) == len(moments)
    end = catalog.layers["."].calls[0].output
    assert (end.order, end.cost) == moments[-1] == (end.order, 1)
    assert catalog.seconds > 0


def test_a_small_effect_is_see() -> None:
    """Rows that affect each other by a hundredth are found out."""

    class Slightly(BatchCentred):
        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x - 0.01 * self.mean(x)

    assert surveyed(seeded(Slightly(), 0), 4).crosses_rows


@pytest.mark.parametrize(("name", "shape"), [("swin", (3, 96, 64)), ("Chain", (3, 16, 4)), ("Encoder", (9, 8))])
def test_sizes(load_fresh_net: Loader, name: str, shape: tuple[int, ...]) -> None:
    """Every tensor has the shape and dtype that hooks see, and its rows where they lie in a batch of three."""
    model = load_fresh_net(name)
    known = leaves(model.catalogs.survey((shape,)))
    specs = model.model_inputs.with_shapes((shape,))
    rows = batch(specs, 3, seed=4)
    alone = [see(model, {key: value[row : row + 1] for key, value in rows.items()}) for row in range(3)]
    together = see(model, rows)
    assert {key: (info.shape, f"torch.{info.dtype}") for key, info in known.items()} == {
        key: (tuple(value.shape), str(value.dtype)) for key, value in alone[0].items()
    }
    for key, info in known.items():
        for row in range(3 if info.row_axis is not None and not info.crosses_rows else 0):
            start = row * info.entries_per_row
            close(together[key].narrow(info.row_axis or 0, start, info.entries_per_row), alone[row][key])


class Forks(nn.Module):
    """Takes another course for wide rows."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv1d(2, 3, 1), nn.Conv1d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide if x.shape[-1] > 10 else self.narrow)(x)


def own(factory: str) -> ModelSpec:
    row = InputSpec("x", (2, 4))
    return ModelSpec(factory, f"python:{__name__}:{factory}", weights="random:0", inputs=(row,), device="cpu")


def test_another_course() -> None:
    """A shape for which other layers run is surveyed as the configured one was."""
    model = load_model(own("Forks"))
    layers = model.catalogs.survey(((2, 12),)).layers
    assert not layers["narrow"].calls
    assert layers["wide"].calls[0].output.tensors[0].shape == (1, 3, 12)
    assert layers["wide"].calls[0].output.tensors[0].layout == "NCL"

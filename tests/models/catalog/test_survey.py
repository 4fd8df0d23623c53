"""Catalogues against what independent hooks see."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.errors import InputError, UnknownLayerError
from layertap.models.loaded_model import LoadedModel
from layertap.models.selection.hook_points import Selector
from layertap.models.selection.matches import EVERY_LAYER, find_matches
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader
from tests.loading import load_model
from tests.marks import slow
from tests.nets import INPUTS, BatchCentred, Recursive, batch, surveyed
from tests.oracle import Key, record, seeded

ROWWISE = dict.fromkeys(INPUTS, True) | dict.fromkeys(
    ("BatchCentred", "BatchScaled", "Recurrent", "Backwards", "OneRow", "PerRow"), False
)
# Layers whose tensors hold the rows in another order, or of which only the whole batch can tell.
MIXED = {
    "WindowMajor": {("inner", "input"), ("inner", "output")},
    "Inner": {("similar", "output"), ("first", "output"), ("mean", "output")},
    "BatchCentred": {("mean", "output")},
    "OneRow": {("act", "input"), ("act", "output")},
    "Recurrent": {("lstm", "output")},  # the last state
    "Backwards": {("lstm", "output")},
}


def seen(model: LoadedModel, rows: dict[str, Tensor]) -> dict[Key, Tensor]:
    if len(rows) == 1:
        return record(model.module, *rows.values())
    return record(model.module, **rows)


def leaves(catalog: Catalog) -> dict[Key, TensorInfo]:
    return {
        (layer.name, number, info.path, site): info
        for layer in catalog.layers.values()
        for number, call in enumerate(layer.calls)
        for site in ("input", "output")
        for info in call.get_boundary(site).tensors
    }


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", INPUTS)
def test_one_row(load_net: Loader, name: str) -> None:
    """Every tensor of every call of every layer, and no other, with the shape and dtype that hooks see for one row."""
    model = load_net(name)
    there = seen(model, batch(model.inputs, 1, seed=1))
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
    together = seen(model, rows)
    alone = [seen(model, {key: value[row : row + 1] for key, value in rows.items()}) for row in range(3)]
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
    begun = list(dict.fromkeys(name for name, _, _, site in seen(resnet, batch(resnet.inputs, 1)) if site == "input"))
    assert list(resnet.catalog.layers) == begun
    assert begun[:8] == [".", "conv1", "bn1", "relu", "maxpool", "layer1", "layer1.0", "layer1.0.conv1"]


@pytest.mark.parametrize("name", ["resnet", "vit", "swin", "NeverCalled", "Recursive", "Retries", "Encoder"])
def test_cost_grows_along_the_forward(load_net: Loader, name: str) -> None:
    """The share of the cost never falls from one moment to the next, and is 1 at the end; places are all different."""
    catalog = load_net(name).catalog
    moments = [
        moment for layer in catalog.layers.values() for call in layer.calls for moment in (call.input, call.output)
    ]
    moments = sorted({id(moment): moment for moment in moments}.values(), key=lambda moment: moment.order)
    costs = [moment.cost for moment in moments]
    assert costs == sorted(costs)
    assert 0 <= costs[0] <= costs[-1] <= 1
    assert catalog.layers["."].calls[0].output.order == max(moment.order for moment in moments)
    assert catalog.layers["."].calls[0].output.cost == 1
    assert catalog.seconds > 0
    assert len({moment.order for moment in moments}) == len(moments)


def test_resnet18() -> None:
    """A ResNet-18 is as its paper and torchvision's source say."""
    module = get_model("resnet18", weights=None)
    layers = surveyed(module, 3, 64, 64).layers
    assert len(layers) == len(list(module.named_modules()))
    assert [len(layers[name].calls) for name in ("relu", "layer1.0.relu", "bn1", "fc")] == [1, 2, 1, 1]
    assert layers["."].parameters == 11_689_512
    assert (layers["conv1"].type, layers["conv1"].is_leaf, layers["conv1"].parameters) == ("Conv2d", True, 9408)
    assert (layers["layer2.0"].type, layers["layer2.0"].is_leaf) == ("BasicBlock", False)
    assert {name for name, layer in layers.items() if "inplace" in layer.hazards} == {
        name for name, part in module.named_modules() if isinstance(part, nn.ReLU)
    }
    assert not any("never_called" in layer.hazards for layer in layers.values())
    last = layers["layer4"].calls[0].output.tensors[0]
    assert (last.shape, last.dtype, last.row_axis, last.layout) == ((1, 512, 2, 2), "float32", 0, "NCHW")


def test_vision_transformer(load_net: Loader) -> None:
    """Token layers are NTC with one class token, patches before it have none, and attention's projection is silent."""
    layers = load_net("vit").catalog.layers
    block = layers["encoder.layers.encoder_layer_0"].calls[0].output.tensors[0]
    assert (block.shape, block.layout, block.prefix) == ((1, 17, 24), "NTC", 1)
    patches = layers["conv_proj"].calls[0].output.tensors[0]
    assert (patches.shape, patches.layout, patches.prefix) == ((1, 24, 4, 4), "NCHW", 0)
    silent = layers["encoder.layers.encoder_layer_0.self_attention.out_proj"]
    assert (silent.calls, silent.hazards) == ((), ("never_called",))
    assert layers["encoder.layers.encoder_layer_0.self_attention"].hazards == ("attention",)
    assert layers["heads.head"].calls[0].input.tensors[0].prefix == 0


def test_swin_windows(load_net: Loader) -> None:
    """Windowed attention stays unfolded as a module's value; a window's own rows show as entries per row."""
    layers = load_net("swin").catalog.layers
    block = layers["features.1.0"].calls[0].output.tensors[0]
    assert (block.layout, block.shape) == ("NHWC", (1, 8, 12, 24))
    windows = load_net("Windows").catalog.layers["inner"].calls[0].output.tensors[0]
    assert (windows.shape, windows.row_axis, windows.entries_per_row, windows.crosses_rows) == ((4, 2, 6), 0, 4, False)
    assert windows.shape_for(3) == (12, 2, 6)


def test_dictionary_output() -> None:
    """A segmentation model's output is found under its key, in the input's own size."""
    catalog = surveyed(get_model("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None), 3, 48, 64)
    (out,) = catalog.layers["."].calls[0].output.tensors
    assert (out.path, out.shape, out.layout) == (("out",), (1, 21, 48, 64), "NCHW")
    assert not catalog.crosses_rows


def test_video() -> None:
    """A video model's layers have a time axis."""
    catalog = surveyed(seeded(get_model("r3d_18", weights=None), 0), 3, 4, 24, 32)
    info = catalog.layers["layer1"].calls[0].output.tensors[0]
    assert (info.shape, info.layout, info.row_axis) == ((1, 64, 4, 12, 16), "NCTHW", 0)
    assert not catalog.crosses_rows


def test_time_first(load_net: Loader) -> None:
    """``nn.MultiheadAttention`` without batch_first has its rows on axis 1, also where that is the model's output."""
    layers = load_net("TimeOut").catalog.layers
    tensors = layers["attention"].calls[0].output.tensors
    assert [(info.shape, info.row_axis, info.layout) for info in tensors] == [
        ((5, 1, 8), 1, "TNC"),
        ((1, 5, 5), 0, "NTC"),
    ]
    assert [info.path for info in layers["attention"].calls[0].input.tensors] == [("0",), ("1",), ("2",)]
    assert layers["."].calls[0].output.tensors[0].row_axis == 1


def test_tied(load_net: Loader) -> None:
    """A tied module stands under each of its names, with all of its calls."""
    layers = load_net("Tied").catalog.layers
    assert list(layers) == [".", "encode", "decode", "act"]
    assert layers["encode"].calls == layers["decode"].calls
    assert len(layers["encode"].calls) == 2


def test_keywords(load_net: Loader) -> None:
    """Arguments by name are found by name, call by call."""
    layers = load_net("Keywords").catalog.layers
    inputs = [[info.path for info in call.input.tensors] for call in layers["gate"].calls]
    assert inputs == [[("0",), ("gate",)], [("x",), ("gate",), ("bias",)]]
    assert [info.path for info in layers["."].calls[0].input.tensors] == [("pixels",), ("kind",)]
    assert layers["embed"].calls[0].input.tensors[0].dtype == "int64"


def test_recursion() -> None:
    """Calls of a module within its own call are counted as they begin, and each keeps its own output."""
    calls = surveyed(Recursive(), 4).layers["down"].calls
    orders = [(call.input.order, call.output.order) for call in calls]
    assert orders == [(2, 7), (3, 6), (4, 5)]


def test_a_call_that_fails(load_net: Loader) -> None:
    """A call whose exception the model catches counts; it has an input and no output."""
    failed, second = load_net("Retries").catalog.layers["picky"].calls
    assert [info.shape for info in failed.input.tensors] == [(1, 5)]
    assert failed.output.tensors == ()
    assert [info.shape for info in second.output.tensors] == [(1, 4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", slow("float16")])
@pytest.mark.parametrize("name", [slow("resnet"), "vit", "swin"])
def test_rounding_is_no_mixing(load_net: Loader, name: str, dtype: str) -> None:
    """In no dtype does rounding make rows look as if they affected each other."""
    catalog = load_net(name, dtype=dtype).catalog
    assert not catalog.crosses_rows
    assert not any(info.crosses_rows for info in leaves(catalog).values())
    assert catalog.layers["."].calls[0].output.tensors[0].dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixing_is_no_rounding(load_net: Loader, dtype: str) -> None:
    """In no dtype does an effect of one row on another pass for rounding."""
    assert load_net("BatchCentred", dtype=dtype).catalog.crosses_rows
    marked = leaves(load_net("WindowMajor", dtype=dtype).catalog)
    assert marked["inner", 0, (), "output"].crosses_rows


def test_a_small_effect_is_seen() -> None:
    """Rows that affect each other by a hundredth are found out."""

    class Slightly(BatchCentred):
        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            out: Tensor = x - 0.01 * self.mean(x)
            return out

    assert surveyed(seeded(Slightly(), 0), 4).crosses_rows


def test_a_shape_that_does_not_fit(load_fresh_net: Loader) -> None:
    """A shape that the model can't take is an InputError that names it, and nothing stays behind."""
    model = load_fresh_net("resnet")
    with pytest.raises(InputError, match=r"can't take an input of this shape: x \[2, 32, 32\]"):
        model.catalogs.survey(((2, 32, 32),))
    assert model.hooks == 0


@pytest.mark.parametrize(
    "module",
    [
        lambda: get_model("resnet18", weights=None),
        lambda: get_model("convnext_tiny", weights=None),
        lambda: get_model("densenet121", weights=None),
        lambda: get_model("mobilenet_v3_small", weights=None),
        lambda: get_model("squeezenet1_1", weights=None),
    ],
    ids=["resnet", "convnext", "densenet", "mobilenet", "squeezenet"],
)
def test_families(module: Callable[[], nn.Module]) -> None:
    """Families of torchvision: row-wise, no layer mixed, a known layout for every tensor with more than two axes."""
    part = seeded(module(), 1)
    catalog = surveyed(part, 3, 64, 64)
    assert not catalog.crosses_rows
    for key, info in leaves(catalog).items():
        assert not info.crosses_rows, key
        assert info.row_axis == 0, key
        assert info.layout is not None, key
        assert len(info.layout) == len(info.shape), key


def test_near_names(load_net: Loader) -> None:
    """Misspelt names have near matches; a very long one is not compared at length."""
    catalog = load_net("resnet").catalog
    for name, hint in (("layer1.0.conf1", "'layer1.0.conv1'"), ("q" * 100_000, EVERY_LAYER)):
        with pytest.raises(UnknownLayerError) as caught:
            find_matches(Selector(name, name), catalog)
        assert hint in caught.value.hint


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_scripted_part() -> None:
    """A scripted part is called, what is in it never; everything around it is there."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    catalog = surveyed(nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 2)), 4)
    assert [name for name, layer in catalog.layers.items() if layer.calls] == [".", "0", "1", "2"]
    assert catalog.layers["1.0"].hazards == ("scripted",)
    assert not catalog.crosses_rows


def test_integer_inputs(load_net: Loader) -> None:
    """Inputs keep their configured dtype in the survey."""
    model = load_net("Keywords")
    assert model.inputs[1] == InputSpec("kind", (), "int64")
    assert model.catalog.layers["."].calls[0].input.tensors[1].shape == (1,)


class Watched(nn.Linear):
    """Notes how many threads its forwards have."""

    threads: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        super().__init__(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(torch.get_num_threads())
        return super().forward(x)


def test_a_quick_model_has_one_thread() -> None:
    """Where a forward takes next to nothing, other threads would only wait for it, and take a core each."""
    source = f"python:{__name__}:Watched"
    load_model(ModelSpec("m", source, "random:0", "cpu", inputs=(InputSpec("x", (4,)),)), threads=2)
    assert Watched.threads == {1}

"""Which axis is what, as a survey finds out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import ConvNeXt, get_model
from torchvision.models.convnext import CNBlockConfig
from torchvision.ops import Permute

from layertap.models.catalog.catalog import Catalog, TensorInfo
from tests.conftest import Loader
from tests.marks import slow
from tests.models.extraction import list_tensors, see
from tests.nets import INPUTS, BatchCentred, Cube, batch, resnet, surveyed, swin
from tests.oracle import Key, seeded


def outputs(catalog: Catalog, side: str = "output") -> dict[str, str | None]:
    """Layer and call to the layout of the first tensor."""
    return {
        f"{layer.name}#{number}": tensors[0].layout
        for layer in catalog.layers.values()
        for number, call in enumerate(layer.calls)
        if (tensors := getattr(call, side).tensors)
    }


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 16, 8), (3, 6, 10)])
def test_channels_height_and_width_may_be_equal(shape: tuple[int, int, int]) -> None:
    """With 8 channels of 8 x 8, or 8 x 4, a map is told from a channels-last one by the modules that it passes."""
    catalog = surveyed(Cube(), *shape)
    out, into = outputs(catalog), outputs(catalog, "input")
    first = ("stem#0", "down#0", "down.conv#0", "act#0")
    last = ("last#0", "last.norm#0", "last.mlp#0", "again#0", "again.0#0", "again.1#0")
    assert {out[name] for name in first} == {into[name] for name in first} == {"NCHW"}
    assert {out[name] for name in last} == {into[name] for name in last} == {"NHWC"}
    assert (into[".#0"], out[".#0"]) == ("NCHW", "NC")


@pytest.mark.parametrize("size", [(32, 32), (48, 32)])
def test_swin_is_channels_last_inside(size: tuple[int, int]) -> None:
    """Swin's inner layers are NHWC at any size, its ends are NCHW."""
    out = outputs(surveyed(swin(), 3, *size))
    ends = {name for name, layout in out.items() if layout == "NCHW"}
    assert ends == {"features.0.0#0", "permute#0", "avgpool#0"}
    assert {layout for name, layout in out.items() if name.startswith("features.") and name not in ends} == {"NHWC"}


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "resnet": (resnet, (3, 32, 32), (3, 24, 40)),
    "convnext": (partial(ConvNeXt, [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]), (3, 32, 32), (3, 32, 64)),
    "squeezenet": (partial(get_model, "squeezenet1_1", weights=None), (3, 64, 64), (3, 40, 64)),
}


@pytest.mark.parametrize("name", NETS)
def test_layouts_do_not_depend_on_the_size(name: str) -> None:
    """A square picture and one that is not give the same layouts, and none is unknown."""
    factory, square, oblong = NETS[name]
    module = factory()
    first, second = surveyed(module, *square), surveyed(module, *oblong)
    assert outputs(first) == outputs(second)
    assert outputs(first, "input") == outputs(second, "input")
    assert None not in outputs(first).values()


@pytest.mark.parametrize(
    ("module", "shape", "layout"),
    [
        (nn.Conv1d(4, 4, 1), (4, 4), "NCL"),
        (nn.Conv2d(4, 4, 1), (4, 4, 4), "NCHW"),
        (nn.Conv3d(4, 4, 1), (4, 4, 4, 4), "NCTHW"),
        (nn.BatchNorm2d(4), (4, 5, 4), "NCHW"),
        (nn.AvgPool2d(2), (4, 4, 4), "NCHW"),
        (nn.AdaptiveAvgPool2d(1), (4, 4, 4), None),  # a mean proves nothing
        (nn.Linear(4, 4), (4, 4), "NTC"),
        (nn.Linear(4, 4), (4, 4, 4), "N??C"),
        (nn.Linear(4, 5), (4,), "NC"),
        (nn.LayerNorm(4), (4, 4, 4), "N??C"),
        (nn.LayerNorm((4, 6, 8)), (4, 6, 8), None),
        (nn.Sequential(nn.Conv2d(4, 4, 1), Permute([0, 2, 3, 1])), (4, 4, 4), "NHWC"),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Dropout()), (4, 4, 4), "NCHW"),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.PixelShuffle(2)), (4, 3, 5), "NCHW"),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten()), (4, 3, 5), "NC"),
        (nn.LSTM(4, 6, batch_first=True), (5, 4), "NTC"),
        (nn.GRU(4, 4), (5, 4), "NTC"),  # time first by its type, but rows are on axis 0
        (nn.Flatten(0), (4,), "N"),
    ],
    ids=str,
)
def test_single_modules(module: nn.Module, shape: tuple[int, ...], layout: str | None) -> None:
    """What operations work along names the axes, whatever their sizes, and is not forgotten; the others are unknown."""
    found = surveyed(nn.Sequential(module), *shape).layers["0"].calls[0].output.tensors[0].layout
    assert found == layout


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class FramesOverTime(nn.Module):
    """A convolution of each frame, then one over time at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = nn.Conv2d(3, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)
        self.last = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        frames = self.space(x.flatten(0, 1)).unflatten(0, x.shape[:2]).permute(0, 3, 4, 2, 1)
        frames = self.time(frames.flatten(0, 2)).unflatten(0, frames.shape[:3])
        return self.last(frames.permute(0, 4, 1, 2, 3)).mean((1, 2, 3))  # (N, time, height, width, channels)


def test_a_letter_for_each_axis() -> None:
    """Where height and width are proven and a third position is not, that one is unknown, and channels are channels."""
    catalog = surveyed(seeded(FramesOverTime(), 1), 4, 3, 6, 10)
    layouts = outputs(catalog) | outputs(catalog, "input")
    assert layouts["last#0"] == "N?HWC"
    infos = [info for layer in catalog.layers.values() for call in layer.calls for info in call.output.tensors]
    assert all(len(info.layout) == len(info.shape) for info in infos if info.layout is not None)


def test_linears_over_tokens() -> None:
    """A Linear that mixes tokens works on turned rows of channels; all else stays (N, tokens, C)."""
    name, mixed = "resmlp_12_224", "linear_tokens"
    catalog = surveyed(timm.create_model(name, num_classes=5, img_size=64), 3, 64, 64)
    layouts = outputs(catalog, "input") | outputs(catalog)
    blocks = {key: layouts[key] for key in layouts if key.startswith("blocks.")}
    assert {layout for key, layout in blocks.items() if mixed in key} == {"NCL"}
    assert {layout for key, layout in blocks.items() if mixed not in key} == {"NTC"}


def test_prefix_tokens() -> None:
    """Class tokens are counted where a sequence has more tokens than any map has pixels, and nowhere else."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        Apply(lambda x: x.flatten(2).mT),
        nn.LayerNorm(8),
        Apply(lambda x: torch.cat([x[:, :2] * 0, x], 1)),
        nn.Linear(8, 6),
        Apply(lambda x: x[:, 2:]),
        nn.Linear(6, 6),
        Apply(lambda x: x[:, 0]),
    )
    catalog = surveyed(module, 3, 16, 24, prefix=2)
    found = {name: layer.calls[0].output.tensors[0].prefix for name, layer in catalog.layers.items()}
    assert found == {".": 0, "0": 0, "1": 0, "2": 0, "3": 2, "4": 2, "5": 0, "6": 0, "7": 0}
    grids = {name: layer.calls[0].output.tensors[0].grid_size for name, layer in catalog.layers.items()}
    assert grids == {name: (4, 6) if name in "123456" else None for name in grids}


CROSSING = ("BatchCentred", "Recurrent", "Backwards", "OneRow", "EarlyExit", "Pruned")
ROWWISE = {name: name not in CROSSING for name in INPUTS}
# Layers whose tensors hold the rows in another order, or of which only the whole batch can tell.
MIXED = {
    "WindowMajor": {("inner", "input"), ("inner", "output")},
    "Inner": {("similar", "output"), ("first", "output"), ("mean", "output")},
    "BatchCentred": {("mean", "output")},
    "OneRow": {("act", "input"), ("act", "output")},
    "Recurrent": {("lstm", "output")},  # the last state
    "Backwards": {("lstm", "output")},
}


def infos_by_key(catalog: Catalog) -> dict[Key, TensorInfo]:
    found = list_tensors(catalog, "input", "output")
    return {(point.layer, point.call, point.path, point.site): info for point, info in found}


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", INPUTS)
def test_one_row(load_net: Loader, name: str) -> None:
    """Every tensor of every call of every layer, and no other, with the shape and dtype that hooks see for one row."""
    model = load_net(name)
    there = see(model, batch(model.inputs, 1, seed=1))
    known = infos_by_key(model.catalog)
    assert known.keys() == there.keys()
    assert {key: info.shape for key, info in known.items()} == {key: tuple(value.shape) for key, value in there.items()}
    assert {key: f"torch.{info.dtype}" for key, info in known.items()} == {
        key: str(value.dtype) for key, value in there.items()
    }


@pytest.mark.parametrize("name", [name for name in INPUTS if ROWWISE[name]])
def test_rows(load_net: Loader, name: str) -> None:
    """Where an info says that rows are in order, each row's part of a batch is what that row gives alone."""
    model = load_net(name)
    rows = batch(model.inputs, 3, seed=2)
    together = see(model, rows)
    alone = [see(model, {key: value[row : row + 1] for key, value in rows.items()}) for row in range(3)]
    assert not model.catalog.crosses_rows
    for key, info in infos_by_key(model.catalog).items():
        if info.crosses_rows or info.single_row:
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
    """A tensor is marked where its entries are not the rows', in order, and nowhere else."""
    found = infos_by_key(load_net(name).catalog).items()
    assert {(key[0], key[3]) for key, info in found if info.crosses_rows or info.single_row} == MIXED.get(name, set())


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
    assert not any(info.crosses_rows for info in infos_by_key(catalog).values())
    assert catalog.layers["."].calls[0].output.tensors[0].dtype == dtype
    assert load_net("BatchCentred", dtype=dtype).catalog.crosses_rows
    assert infos_by_key(load_net("WindowMajor", dtype=dtype).catalog)["inner", 0, (), "output"].single_row


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


def test_a_small_effect_is_seen() -> None:
    """Rows that affect each other by a hundredth are found out."""

    class Slightly(BatchCentred):
        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x - 0.01 * self.mean(x)

    assert surveyed(seeded(Slightly(), 0), 4).crosses_rows


class Attending(nn.Module):
    """Attention with two query heads for each key head, by products of matrices, or by torch's function."""

    def __init__(self, *, fused: bool, width: int) -> None:
        super().__init__()
        self.fused, self.width = fused, width
        self.query, self.key, self.out = nn.Linear(32, 4 * width), nn.Linear(32, 2 * width), nn.Linear(4 * width, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (each(x).unflatten(2, (-1, self.width)).transpose(1, 2) for each in (self.query, self.key))
        key = key.repeat_interleave(2, 1)
        if self.fused:
            found = nn.functional.scaled_dot_product_attention(query, key, key)
        else:
            found = (query @ key.transpose(2, 3)).softmax(3) @ key
        result: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize(("fused", "width"), [(True, 8), (False, 8), (False, 4)])
def test_heads(fused: bool, width: int) -> None:
    """Heads side by side are known where attention splits or joins them, at any size; elsewhere there are none."""
    layers = surveyed(Attending(fused=fused, width=width), 4, 32).layers
    heads = {name: layer.calls[0].output.tensors[0].heads for name, layer in layers.items()}
    assert heads == {".": 0, "query": 4, "key": 2, "out": 0}
    assert layers["out"].calls[0].input.tensors[0].heads == 4


def test_products_without_heads() -> None:
    """What is repeated along windows, or along rows, says nothing of heads."""
    for module, inside in ((resnet(), ""), (swin(), ".attn")):
        for layer in surveyed(module, 3, 32, 32).layers.values():
            if not inside or inside not in layer.name:
                assert not any(info.heads for call in layer.calls for info in call.output.tensors)

"""Models in memory: what loading gives, and rows that run in several forwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models import digits
from layertap.models.catalog.catalog import TensorInfo
from layertap.models.devices.devices import DTYPES
from layertap.models.errors import InputError, LoadError
from layertap.models.hooks import attach
from layertap.models.loaded_model import LoadedModel
from layertap.models.model_catalogs import MAX_CATALOGS
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import HookPoint, Reduction
from layertap.models.selection.plan import Capture, Plan, Result
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from tests.conftest import Loader, net_spec
from tests.loading import load_model
from tests.marks import slow
from tests.models.extraction import extract_plan
from tests.nets import INPUTS, Chain, batch, resnet
from tests.oracle import record

SMALL = PreprocessSpec(resize=48, crop=48)
LARGE = ("bottlenecks", "swin")
ONE_AT_A_TIME = ("BatchCentred", "BatchScaled", "Recurrent", "Backwards", "OneRow", "PerRow")


def captures(model: LoadedModel, how: Reduction) -> Iterator[Capture]:
    """Every tensor of a model that its rows may be cut out of, and that the reduction is defined for."""
    for layer in model.catalog.layers.values():
        for number, call in enumerate(layer.calls):
            for site in ("output", "input"):
                for info in call.get_boundary(site).tensors:  # type: ignore[arg-type]
                    if not info.crosses_rows and info.dtype != "complex64" and _fits(info, how):
                        yield Capture(HookPoint(layer.name, number, info.path, site), info, how)  # type: ignore[arg-type]


def _fits(info: TensorInfo, how: Reduction) -> bool:
    return how.pool == "none" or (info.row_axis is not None and info.layout is not None)


def everything(model: LoadedModel, how: Reduction) -> Plan:
    found = dict.fromkeys(captures(model, how))
    results = tuple(Result(str(at), capture, "Part") for at, capture in enumerate(found))
    return Plan(results, results[-1].capture.point, 1.0, ())


def extract(model: LoadedModel, rows: dict[str, Tensor], *texts: str, max_rows: int = 8) -> dict[str, Tensor]:
    plan = make_plan([parse_selector(text) for text in texts], model.catalog)
    found = extract_plan(model, rows, plan, model.catalog, max_rows)
    return {result.key: found[result.capture].values for result in plan.results}


@pytest.mark.parametrize("pool", ["none", "mean"])
@pytest.mark.parametrize(
    "name", [slow(name) if name in LARGE else name for name in INPUTS if name not in ONE_AT_A_TIME]
)
def test_chunks(load_net: Loader, name: str, pool: str) -> None:
    """Rows that run in several forwards give what they give in one, whichever axis they are on."""
    model = load_net(name)
    rows = batch(model.inputs, 5)
    plan = everything(model, Reduction(pool=pool))  # type: ignore[arg-type]
    whole = extract_plan(model, rows, plan, model.catalog, 5)
    parts = extract_plan(model, rows, plan, model.catalog, 2)
    assert parts.keys() == whole.keys() == plan.captures
    for capture, expected in whole.items():
        found = parts[capture].values
        assert tuple(found.shape) == capture.shape(5)
        torch.testing.assert_close(found, expected.values, rtol=1e-4, atol=1e-5, equal_nan=True)


def close_in_int8(model: LoadedModel, text: str, how: Reduction) -> None:
    rows = batch(model.inputs, 5)
    exact, small = (
        make_plan([replace(parse_selector(text), reduction=replace(how, dtype=dtype))], model.catalog)
        for dtype in ("float32", "int8")
    )
    expected = next(iter(extract_plan(model, rows, exact, model.catalog, 5).values())).values
    (found,) = extract_plan(model, rows, small, model.catalog, 2).values()
    assert found.scale is not None
    assert found.scale.shape == (len(found.values),)
    scale = found.scale.reshape(-1, *[1] * (expected.ndim - 1))
    assert bool(((found.values * scale - expected).abs() <= scale * 0.51).all())


@pytest.mark.parametrize("pool", ["none", "mean", "flatten"])
@pytest.mark.parametrize(("name", "text"), [("Chain", "relu"), ("Windows", "inner"), ("vit", "encoder.ln")])
def test_int8_chunks(load_net: Loader, name: str, text: str, pool: str) -> None:
    """Int8 of several forwards is as close to the numbers as of one: each index of axis 0 keeps its scale."""
    close_in_int8(load_net(name), text, Reduction(pool=pool))  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", ["mean", "flatten"])
def test_int8_chunks_of_pooled_second_axis(load_net: Loader, pool: str) -> None:
    """Pooled, rows are on axis 0 wherever they came from."""
    close_in_int8(load_net("TimeFirst"), "norm", Reduction(pool=pool))  # type: ignore[arg-type]


def test_shared(load_net: Loader) -> None:
    """What is the same for all rows is there once, however many forwards ran."""
    model = load_net("Inner")
    for size in (1, 2, 5):
        table = extract(model, batch(model.inputs, 5), "table", max_rows=size)["table"]
        assert table.equal(model.module.get_parameter("table.values"))


@pytest.mark.parametrize(("name", "text"), [("Inner", "similar"), ("Inner", "mean"), ("WindowMajor", "inner")])
def test_mixed(load_net: Loader, name: str, text: str) -> None:
    """A tensor that mixes its rows is given of one forward, and refused where the rows need several."""
    model = load_net(name)
    x = batch(model.inputs, 4)
    one = {key: value[:1] for key, value in x.items()}
    expected = record(model.module, *one.values())[text, 0, (), "output"]
    torch.testing.assert_close(extract(model, one, text, max_rows=1)[text], expected)
    with pytest.raises(InputError, match="mixes its rows") as caught:
        extract(model, x, text, max_rows=3)
    assert caught.value.hint == "send at most 3 inputs with it"


@pytest.mark.parametrize("name", ["mean", "first", "linear"])
def test_something_of_all_rows(load_net: Loader, name: str) -> None:
    """What is made of several rows together is what an offline hook sees for these very rows."""
    model = load_net("Inner")
    x = batch(model.inputs, 3)
    assert extract(model, x, name)[name].equal(record(model.module, *x.values())[name, 0, (), "output"])


def test_a_size_that_grows_with_all_rows(load_net: Loader) -> None:
    """A tensor of rows by rows is given for one row, and refused for several with the way out."""
    model = load_net("Inner")
    assert extract(model, batch(model.inputs, 1), "similar")["similar"].shape == (1, 1)
    with pytest.raises(InputError, match=r"'similar#0:output' is float32 \[3, 3\], not float32 \[1, 1\]") as caught:
        extract(model, batch(model.inputs, 3), "similar")
    assert caught.value.hint == "send one input at a time"
    assert model.hooks == 0


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_one_at_a_time(load_net: Loader, name: str) -> None:
    """Rows of a model whose rows affect each other are each what they are alone, whatever the limit."""
    model = load_net(name)
    x = batch(model.inputs, 3)
    (given,) = x.values()
    together = extract(model, x, ".", max_rows=8)["."]
    alone = torch.cat([record(model.module, row[None])[".", 0, (), "output"] for row in given])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(("name", "text"), [("BatchCentred", "mean"), ("OneRow", "act")])
def test_one_at_a_time_mixed(load_net: Loader, name: str, text: str) -> None:
    """A tensor without an axis for rows is refused for several rows of such a model."""
    model = load_net(name)
    with pytest.raises(InputError, match="which holds 1 here"):
        extract(model, batch(model.inputs, 2), text)
    assert text in extract(model, batch(model.inputs, 1), text)


@pytest.mark.parametrize("max_rows", [1, 2, 8])
@pytest.mark.parametrize("name", ["Writes", "Views", "Chain", "Kinds"])
def test_input_kept(load_net: Loader, name: str, max_rows: int) -> None:
    """The caller's tensors stay as they are though the model writes into its own input."""
    model = load_net(name)
    x = batch(model.inputs, 3)
    before = {key: value.clone() for key, value in x.items()}
    extract(model, x, ".", max_rows=max_rows)
    assert all(x[key].equal(before[key]) for key in x)


def test_input_site_before_writing(load_net: Loader) -> None:
    """The input of a model that writes into it is what was sent."""
    model = load_net("Writes")
    x = batch(model.inputs, 3)
    assert extract(model, x, ".:input")[".:input"].equal(x["x"])


def test_digits() -> None:
    """The embedded model loads with its weights and preprocessing and gives its embedding."""
    model = load_model(replace(digits.spec(), device="cpu"))
    assert (model.weights, model.embedding, model.preprocess) == ("digits.safetensors", "pool", digits.PREPROCESS)
    assert not model.catalog.crosses_rows
    assert extract(model, batch(model.inputs, 2), "pool", "head")["head"].shape == (2, 10)
    assert model.hooks == 0


def test_torchvision() -> None:
    """An architecture of torchvision with the weights of a seed: the same seed, the same model."""
    one, same, other = (
        load_model(ModelSpec("m", "torchvision:squeezenet1_1", f"random:{seed}", "cpu", preprocess=SMALL))
        for seed in (7, 7, 8)
    )
    assert (one.digest, one.identity) == (same.digest, same.identity)
    assert one.digest != other.digest
    assert one.identity != other.identity
    assert one.inputs == (InputSpec("x", (3, 48, 48)),)
    assert one.embedding == "classifier.1:input"
    assert not one.module.training
    x = batch(one.inputs, 1)
    assert extract(one, x, "features.3")["features.3"].equal(extract(same, x, "features.3")["features.3"])


def test_python(load_net: Loader) -> None:
    """A factory's module takes several inputs by name, and integers stay integers."""
    model = load_net("Keywords")
    assert model.shapes == ((4,), ())
    rows = batch(model.inputs, 3)
    expected = record(model.module, **rows)
    found = extract(model, rows, "gate#0", "embed:input", max_rows=2)
    torch.testing.assert_close(found["gate#0"], expected["gate", 0, (), "output"])
    assert found["embed:input"].equal(rows["kind"])


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (net_spec("Chain", device="cuda:99"), "there is no device 'cuda:99'"),
        (net_spec("Chain", device="cuda:x"), "'cuda:x' is no device"),
        (net_spec("Chain", device="mps"), "'mps' is no device"),
        (net_spec("Chain", inputs=(InputSpec("image", (5, 8, 8)),)), r"can't take an input of this shape: image \[5,"),
        (net_spec("Keywords", inputs=(InputSpec("pixels", (4,)), InputSpec("sort", ()))), "can't take"),
    ],
    ids=["cuda:99", "cuda:x", "mps", "channels", "names"],
)
def test_refused(spec: ModelSpec, reason: str) -> None:
    """A device that is not there and inputs that do not fit are refused at loading."""
    with pytest.raises(LoadError, match=reason) as caught:
        load_model(spec)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("resnet", "fc:input"),
        ("vit", "heads.head:input"),
        ("NeverCalled", "."),
        ("EarlyExit", "."),
        ("Retries", "."),
        ("Recurrent", "."),
    ],
)
def test_embedding(load_net: Loader, name: str, embedding: str) -> None:
    """Of a library's classifier it is what its head takes; of a net that nothing says to classify its output."""
    model = load_net(name)
    assert model.embedding == embedding
    assert extract(model, batch(model.inputs, 2), embedding).keys() == {embedding}
    assert load_net(name, embedding=".").embedding == "."


@pytest.mark.parametrize(
    "name", ["test_vit", "levit_128s", slow("efficientvit_m0"), slow("repvit_m0_9"), slow("crossvit_tiny_240")]
)
def test_embedding_of_timm(name: str) -> None:
    """What timm's own forward_head returns before the scores, or a warning where no layer takes that."""
    model = load_model(ModelSpec("model", f"timm:{name}", weights="random:5"))
    assert model.model_embedding is not None
    rows = batch(model.inputs, 2)
    module: Any = model.module
    with torch.no_grad():
        wanted = module.forward_head(module.forward_features(rows["x"]), pre_logits=True)
    found = extract(model, rows, model.embedding)[model.embedding]
    if name == "crossvit_tiny_240":  # joins what two heads take
        assert "the first of its heads" in model.model_embedding.warnings[0]
        wanted = wanted[:, : found.shape[1]]
    torch.testing.assert_close(found, wanted)


def test_other_shape(load_fresh_net: Loader) -> None:
    """Another shape of input has a catalogue of its own, and the configured one stays."""
    model = load_fresh_net("Chain")
    own = model.catalog
    other = model.catalogs.survey(((3, 12, 10),))
    assert other.layers["conv"].calls[0].output.tensors[0].shape == (1, 8, 12, 10)
    assert model.catalogs.survey(((3, 12, 10),)) is other
    assert model.catalog is model.catalogs.survey(model.shapes) is own
    x = torch.randn(3, 3, 12, 10)
    plan = make_plan([parse_selector("conv")], other)
    (found,) = extract_plan(model, {"image": x}, plan, other, 2).values()
    torch.testing.assert_close(found.values, record(model.module, x)["conv", 0, (), "output"])


def test_catalogs_bound(load_fresh_net: Loader) -> None:
    """No more catalogues are kept than the bound: the one asked for longest ago goes, the configured one never."""
    model = load_fresh_net("Chain")
    own = model.catalog
    shapes = [((3, 8 + more, 8),) for more in range(1, MAX_CATALOGS + 3)]
    first = model.catalogs.survey(shapes[0])
    for shape in shapes[1:]:
        model.catalogs.survey(shape)
        assert model.catalogs.survey(shapes[0]) is first
    assert model.catalog is own
    kept = [shape for shape in shapes if model.catalogs.get_catalog(shape) is not None]
    assert kept == [shapes[0], *shapes[-(MAX_CATALOGS - 2) :]]


@pytest.mark.parametrize("shape", [(5, 8, 8), (3, 8), (3,), (0, 0, 0)], ids=str)
def test_wrong_shape(load_fresh_net: Loader, shape: tuple[int, ...]) -> None:
    """A shape that the model can't take is refused, and leaves neither hook nor catalogue behind."""
    model = load_fresh_net("Chain")
    with pytest.raises(InputError, match="can't take an input of this shape: x"):
        model.catalogs.survey((shape,))
    assert model.hooks == 0
    assert model.catalogs.get_catalog((shape,)) is None


def test_rows_of_another_shape(load_net: Loader) -> None:
    """Rows that do not fit the catalogue they are planned with are refused, not cut in the wrong places."""
    model = load_net("Chain")
    with pytest.raises(InputError, match=r"is float32 \[2, 8, 9, 9\], not float32 \[2, 8, 8, 8\]"):
        extract(model, {"image": torch.randn(2, 3, 9, 9)}, "conv")
    assert model.hooks == 0


class Hooked(Chain):
    """Brings a hook along."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.register_forward_hook(lambda *_: None)


def test_own_hooks() -> None:
    """Hooks that a module brings along are not counted, and are still there afterwards."""
    model = load_model(replace(net_spec("Chain"), source=f"python:{__name__}:Hooked"))
    x = batch(model.inputs, 2)
    extract(model, x, "conv", "relu", max_rows=1)
    assert (model.hooks, model.replicas[0].own_hooks, attach.count_hooks(model.module)) == (0, 1, 1)
    handle = model.module.register_forward_hook(lambda *_: None)
    assert model.hooks == 1
    handle.remove()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(load_net: Loader, dtype: str) -> None:
    """A model in half precision takes float32 rows and gives float32 arrays, close to those of full precision."""
    model, full = load_net("Chain", dtype=dtype), load_net("Chain")
    x = batch(model.inputs, 3)
    for text in ("conv", "relu#0", "head", ".:input"):
        found = extract(model, x, text, max_rows=2)[text]
        assert found.numpy().dtype == "float32"
        torch.testing.assert_close(found, extract(full, x, text)[text], rtol=0.05, atol=0.05)
    leaves = [info.dtype for layer in model.catalog.layers.values() for info in layer.calls[0].output.tensors]
    assert set(leaves) == {dtype}
    assert model.digest == full.digest
    assert model.identity != full.identity


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), slow("bfloat16", 5e-2), slow("float16", 1e-2)])
def test_channels_last(load_net: Loader, dtype: str, tolerance: float) -> None:
    """In another memory format every layer gives what hooks see offline in it, in the order that its shape says."""
    model, plain = load_net("resnet", dtype=dtype, memory_format="channels_last"), load_net("resnet", dtype=dtype)
    x = batch(model.inputs, 3)
    offline = resnet()
    offline.load_state_dict(load_net("resnet").module.state_dict())
    offline.eval().to(DTYPES[dtype], memory_format=torch.channels_last)
    seen = record(offline, x["x"].to(DTYPES[dtype], memory_format=torch.channels_last))
    assert any(not value.is_contiguous() for value in seen.values())
    for (name, call, _, site), value in seen.items():
        (found,) = extract(model, x, f"{name}#{call}:{site}").values()
        assert found.is_contiguous()
        scale = max(float(value.float().abs().max()), 1e-6)
        torch.testing.assert_close(found, value.float(), rtol=0, atol=tolerance * scale, msg=f"{name}#{call}:{site}")
    outputs = [
        [(layer.name, each.output.tensors) for layer in one.catalog.layers.values() for each in layer.calls]
        for one in (model, plain)
    ]
    assert outputs[0] == outputs[1]
    assert (model.digest, model.identity) == (plain.digest, plain.identity)
    weights = [part.weight for part in model.module.modules() if isinstance(part, nn.Conv2d)]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    assert not all(weight.is_contiguous() for weight in weights)

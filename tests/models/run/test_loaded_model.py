"""Models in memory: what loading gives, and rows that run in several forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.devices.devices import DTYPES
from layertap.models.errors import InputError
from layertap.models.plan.plan import Capture, Plan, Result
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Reduction
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.run.model_catalogs import survey_shape
from layertap.models.run.model_info import MAX_CATALOGS
from layertap.models.spec import InputSpec, ModelSpec
from tests.conftest import Loader
from tests.loading import load_model
from tests.marks import hard, slow
from tests.models.extraction import extract_plan, list_tensors
from tests.nets import batch, resnet
from tests.oracle import record

ONE_AT_A_TIME = ("BatchCentred", "Recurrent", "Backwards", "OneRow")


def everything(model: LoadedModel, how: Reduction) -> Plan:
    """Every tensor of a model that its rows may be cut out of, and that the reduction is defined for."""
    captures = [
        Capture(point, info, how)
        for point, info in list_tensors(model.catalog, "output", "input")
        if not info.crosses_rows and info.dtype != "complex64"
        if how.pool == "none" or (info.row_axis is not None and info.layout is not None)
        if how.dtype != "int8" or info.row_axis in (0, None)
    ]
    results = tuple(Result(str(at), capture, "Part") for at, capture in enumerate(captures))
    return Plan(results, captures[-1].point, 1.0, ())


def extract(model: LoadedModel, rows: dict[str, Tensor], *texts: str, max_rows: int = 8) -> dict[str, Tensor]:
    plan = make_plan([parse_selector(text) for text in texts], model.catalog)
    found = extract_plan(model, rows, plan, model.catalog, max_rows)
    return {result.key: found[result.capture].values for result in plan.results}


@pytest.mark.parametrize(
    "how", [Reduction(), Reduction(pool="mean"), Reduction(dtype="int8")], ids=["", "mean", "int8"]
)
@pytest.mark.parametrize("name", ["vit", "Structured", "Keywords", "TimeOut", "Windows", "Inner", "Kinds", "Cube"])
def test_chunks(load_net: Loader, name: str, how: Reduction) -> None:
    """Rows that run in several forwards give what they give in one, whichever axis they are on."""
    model = load_net(name)
    rows = batch(model.inputs, 5)
    plan = everything(model, how)
    whole = extract_plan(model, rows, plan, model.catalog, 5)
    parts = extract_plan(model, rows, plan, model.catalog, 2)
    assert parts.keys() == whole.keys() == plan.captures
    for capture, expected in whole.items():
        found = parts[capture].values
        assert tuple(found.shape) == capture.shape(5)
        if expected.scale is not None:  # a step of its own may be rounded up where it was rounded down
            torch.testing.assert_close(parts[capture].scale, expected.scale, rtol=1e-4, atol=1e-6)
            assert (found.int() - expected.values.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(found, expected.values, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_mixed(load_net: Loader) -> None:
    """A tensor that mixes its rows is given of one forward, and refused where the rows need several."""
    model, text = load_net("Inner"), "similar"
    x = batch(model.inputs, 4)
    one = {key: value[:1] for key, value in x.items()}
    expected = record(model.module, *one.values())[text, 0, (), "output"]
    torch.testing.assert_close(extract(model, one, text, max_rows=1)[text], expected)
    with pytest.raises(InputError, match="mixes its rows") as caught:
        extract(model, x, text, max_rows=3)
    assert caught.value.hint == "send at most 3 inputs with it"


@pytest.mark.parametrize(
    ("name", "layer"), [*((name, ".") for name in ONE_AT_A_TIME), ("WindowMajor", "inner"), ("EarlyExit", "first")]
)
def test_one_at_a_time(load_net: Loader, name: str, layer: str) -> None:
    """Rows that affect each other, or stand in another order in a layer, are each what they are alone."""
    model = load_net(name)
    x = batch(model.inputs, 3)
    (given,) = x.values()
    together = extract(model, x, layer, max_rows=8)[layer]
    alone = torch.cat([record(model.module, row[None])[layer, 0, (), "output"] for row in given])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("name", "embedding"), [("resnet", "fc:input"), ("vit", "heads.head:input"), ("NeverCalled", ".")]
)
def test_embedding(load_net: Loader, name: str, embedding: str) -> None:
    """Of a library's classifier it is what its head takes; of a net that nothing says to classify its output."""
    model = load_net(name)
    assert model.embedding == embedding
    assert extract(model, batch(model.inputs, 2), embedding).keys() == {embedding}
    assert load_net(name, embedding=".").embedding == "."


@pytest.mark.parametrize(
    "name",
    [slow("test_vit"), hard("levit_128s"), hard("efficientvit_m0"), hard("repvit_m0_9"), hard("crossvit_tiny_240")],
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


def test_catalogs_bound(load_fresh_net: Loader) -> None:
    """No more catalogs are kept than the bound: the one asked for longest ago goes, the configured one never."""
    model = load_fresh_net("Chain")
    own = model.catalog
    shapes = [((3, 8 + more, 8),) for more in range(1, MAX_CATALOGS + 3)]
    first = survey_shape(model, shapes[0])
    for shape in shapes[1:]:
        survey_shape(model, shape)
        assert survey_shape(model, shapes[0]) is first
    assert model.catalog is own
    kept = [shape for shape in shapes if model.catalogs.get_catalog(shape) is not None]
    assert kept == [shapes[0], *shapes[-(MAX_CATALOGS - 2) :]]


def test_rounding_at_another_length() -> None:
    """Rounding of the model's own precision crosses no rows, at the configured length and at others."""
    inputs = (InputSpec("x", (8, 4), longest=16),)
    model = load_model(ModelSpec("rounds", "python:tests.nets:Rounds", device="cpu", dtype="bfloat16", inputs=inputs))
    x = batch(inputs, 1)["x"].bfloat16()
    assert not torch.equal(x * 3 / 3, x)  # else nothing is rounded
    assert not model.catalog.crosses_rows
    assert not survey_shape(model, ((6, 4),)).crosses_rows


@pytest.mark.parametrize(("dtype", "tolerance"), [slow("float32", 1e-4), slow("bfloat16", 5e-2)])
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

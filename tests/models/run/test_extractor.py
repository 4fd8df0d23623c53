"""Extraction against hooks with immediate copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from layertap.models.catalog.catalog import Catalog, TensorInfo
from layertap.models.errors import InputError, LayerNotReachedError
from layertap.models.hooks.attach import Modules, count_hooks
from layertap.models.plan.plan import Capture, Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Reduction, Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.points import Point
from tests.conftest import Loader
from tests.marks import slow
from tests.models.extraction import extract_captures, extract_plan, list_tensors, see
from tests.nets import INPUTS, EarlyExit, Pruned, batch, surveyed
from tests.oracle import Key

ROWWISE = [name for name in INPUTS if name not in ("BatchCentred", "Recurrent", "Backwards", "OneRow", "Inner")]


def everything(catalog: Catalog, **how: object) -> Plan:
    """Every tensor of every call of every layer, the whole model's too, at both sites."""
    wanted = [
        point
        for point, info in list_tensors(catalog, "input", "output")
        if info.dtype != "complex64" and not any("*" in part or "?" in part for part in point.path)
    ]
    captures = [
        Selector(p.layer, p.layer, p.call, p.path, p.site, None, Reduction(**how), f"{number}")
        for number, p in enumerate(wanted)
    ]
    return make_plan(captures, catalog)


def key(capture: Capture) -> Key:
    point = capture.point
    return point.layer, point.call, point.path, point.site


def floats(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def equal(found: Tensor, expected: Tensor, exact: bool) -> None:
    """The same bits, or, where the module takes a fused path without hooks, the same but for rounding."""
    tolerance = 0.0 if exact else 1e-5
    torch.testing.assert_close(found, floats(expected), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", [slow(name) if name == "bottlenecks" else name for name in ROWWISE])
def test_every_tensor_of_every_call(load_net: Loader, name: str) -> None:
    """All captures of a model at once are bit for bit what independent hooks copied, of the size that was predicted."""
    model, rows = load_net(name), 3
    inputs = batch(model.inputs, rows, seed=7)
    kept = {key: value.clone() for key, value in inputs.items()}
    plan = everything(model.catalog)
    if plan.single_row or model.catalog.crosses_rows:
        rows, inputs = 1, {key: value[:1] for key, value in inputs.items()}
        kept = {key: value[:1] for key, value in kept.items()}
    truth = see(model, inputs)
    taken = extract_plan(model, inputs, plan, model.catalog, max_rows=8)
    assert {key(capture) for capture in taken} == {key for key in truth if "complex" not in key[2]}
    for capture, reduced in taken.items():
        equal(reduced.values, truth[key(capture)], exact=name != "Encoder")
        assert tuple(reduced.values.shape) == capture.shape(rows)
        assert f"torch.{capture.dtype}" == str(reduced.values.dtype)
        assert reduced.values.nbytes == capture.nbytes(rows)
        assert reduced.values.untyped_storage().nbytes() == reduced.values.nbytes
    assert all(torch.equal(inputs[name], kept[name]) for name in kept)
    assert model.hooks == 0


@pytest.mark.parametrize("name", ["resnet", "TimeFirst", "Recursive", "Views"])
def test_every_tensor_alone(load_net: Loader, name: str) -> None:
    """Each capture by itself, with the forward stopped after it, is the same as with all the others."""
    model = load_net(name)
    inputs = batch(model.inputs, 2, seed=8)
    truth = see(model, inputs)
    captures = sorted(everything(model.catalog).captures, key=lambda capture: str(capture.point))
    for capture in captures[:: max(len(captures) // 25, 1)]:
        selector = Selector("x", capture.point.layer, capture.point.call, capture.point.path, capture.point.site)
        plan = make_plan([selector], model.catalog)
        (reduced,) = extract_plan(model, inputs, plan, model.catalog, 8).values()
        equal(reduced.values, truth[key(capture)], exact=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(load_net: Loader, dtype: str) -> None:
    """A model in half precision gives its own values exactly, as float32."""
    model = load_net("vit", dtype=dtype)
    inputs = batch(model.inputs, 2, seed=9)
    truth = see(model, {name: value.to(model.dtype) for name, value in inputs.items()})
    taken = extract_plan(model, inputs, everything(model.catalog), model.catalog, 8)
    for capture, reduced in taken.items():
        assert capture.info.dtype == dtype
        equal(reduced.values, truth[key(capture)], exact=True)


def capture(layer: str, shape: tuple[int, ...], call: int = 0, **more: object) -> Capture:
    return Capture(Point(layer, call, (), "output"), TensorInfo((), shape, "float32", **more), Reduction())


def test_a_point_that_is_not_reached() -> None:
    """A forward that ends before a promised point is an error that names it, and leaves no hook."""
    module = EarlyExit()
    plan = make_plan([parse_selector("first"), parse_selector("second")], surveyed(module, 4))
    with pytest.raises(LayerNotReachedError, match="this input's forward never reached 'second#0:output'"):
        extract_captures(Modules(module), lambda: module(torch.full((1, 4), 1e6)), plan.captures, 1)
    assert count_hooks(module) == 0


def test_a_shape_that_the_catalog_does_not_know() -> None:
    """A tensor of another shape or dtype than promised is refused before anybody's rows are cut out of it."""
    module = Pruned()
    catalog = surveyed(module, 6, 4)
    far = torch.full((2, 6, 4), 100.0)
    for pool in ("none", "mean"):
        selectors = [Selector("keep", "keep", reduction=Reduction(pool=pool))]
        plan = make_plan(selectors, catalog)
        with pytest.raises(InputError, match=r"'keep#0:output' is float32 \[2, 3, 4\], not float32 \[2, 6, 4\]"):
            extract_captures(Modules(module), lambda: module(far), plan.captures, 2)
        assert count_hooks(module) == 0
    with pytest.raises(InputError, match="is float64"):
        extract_captures(Modules(module.double()), lambda: module(far.double() / 10), plan.captures, 2)


def test_users_hooks_survive() -> None:
    """Hooks that a module brought along stay, run, and are seen through."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    runs: list[int] = []

    def zeroed(_: nn.Module, args: object, output: Tensor) -> Tensor:
        runs.append(1)
        return output * 0

    module[0].register_forward_hook(zeroed)
    module[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    taken = extract_captures(
        Modules(module), lambda: module(torch.ones(1, 4)), [capture("0", (1, 4)), capture("1", (1, 4))], 1
    )
    values = {key(each)[0]: reduced.values for each, reduced in taken.items()}
    assert values["0"].tolist() == [[0] * 4]
    assert torch.equal(values["1"], torch.ones(1, 4).tanh())
    assert (len(runs), count_hooks(module)) == (1, 2)
    module(torch.ones(1, 4))
    assert len(runs) == 2

"""Selectors made into a plan, against catalogues of real modules."""

from __future__ import annotations

import re
from typing import Any

import pytest

from models.catalog import Call, Catalog, Layer, Leaf, Moment
from models.errors import RequestError, SelectorError
from models.plan import Plan, resolve
from models.points import HookPoint, Reduction, Selector
from models.selectors import parse
from tests.conftest import Loader
from tests.nets import DTypes, Inner, Windows, resnet, surveyed, vit


def want(text: str, alias: str | None = None, kind: str | None = None, **how: Any) -> Selector:
    parsed = parse(text)
    return Selector(
        text=parsed.text,
        pattern=parsed.pattern,
        call=parsed.call,
        path=parsed.path,
        site=parsed.site,
        type=kind,
        reduction=Reduction(**how),
        alias=alias,
    )


@pytest.fixture(scope="module")
def net() -> Catalog:
    return surveyed(resnet(), 3, 32, 32)


@pytest.fixture(scope="module")
def tokens() -> Catalog:
    return surveyed(vit(), 3, 32, 32, prefix=1)


def keys(plan: Plan) -> list[str]:
    return [result.key for result in plan.results]


def test_order_and_points(net: Catalog) -> None:
    """Results stand in the order asked for, each with its point, its leaf and its module's class."""
    plan = resolve([want("layer2"), want("conv1:input", pool="mean"), want("layer1.0.relu#0")], net)
    assert keys(plan) == ["layer2", "conv1:input", "layer1.0.relu#0"]
    assert [result.capture.point for result in plan.results] == [
        HookPoint("layer2", 0, (), "output"),
        HookPoint("conv1", 0, (), "input"),
        HookPoint("layer1.0.relu", 0, (), "output"),
    ]
    assert [result.module for result in plan.results] == ["Sequential", "Conv2d", "ReLU"]
    assert plan.results[0].capture.leaf.shape == (1, 128, 4, 4)


def test_where_it_stops(net: Catalog) -> None:
    """The forward may stop after the moment that comes last in it, not after the name that comes last in the list."""
    plan = resolve([want("layer3"), want("layer4:input"), want("conv1")], net)
    assert plan.stops_at == HookPoint("layer4", 0, (), "input")
    assert plan.cost == net.layers["layer4"].calls[0].input.cost
    assert resolve([want("layer1.0.relu#*")], net).stops_at == HookPoint("layer1.0.relu", 1, (), "output")
    assert resolve([want("conv1:input"), want(".:input")], net).stops_at == HookPoint("conv1", 0, (), "input")
    assert resolve([want("conv1"), want(".")], net).stops_at == HookPoint(".", 0, (), "output")


def test_the_same_thing_twice_is_given_once(net: Catalog) -> None:
    """A name repeated, and what a glob finds that a literal named, are one result; other spellings are others."""
    assert keys(resolve([want("bn1"), want("bn1")], net)) == ["bn1"]
    assert keys(resolve([want("*bn1"), want("bn1")], net))[-1:] == ["bn1"]
    both = resolve([want("layer1.*.bn?"), want("layer1.0.bn1")], net)
    assert sorted(keys(both)) == ["layer1.0.bn1", "layer1.0.bn2"]
    assert len(resolve([want("layer1*"), want("layer1*")], net).results) == len(resolve([want("layer1*")], net).results)
    spelled = resolve([want("relu"), want("relu#0"), want("relu#-1"), want("relu", alias="x")], net)
    assert keys(spelled) == ["relu", "relu#0", "relu#-1", "x"]
    assert len(spelled.captures) == 1


def test_a_call_named_by_number_is_not_given_again_by_a_glob(net: Catalog) -> None:
    """A literal's spelling stands for a call of several, whichever way it counts."""
    assert keys(resolve([want("layer1.0.relu#-2"), want("layer1.0.relu*#*")], net)) == [
        "layer1.0.relu#-2",
        "layer1.0.relu#1",
    ]


def test_two_things_under_one_name(net: Catalog) -> None:
    """Different results that would share a key are refused, with the way out."""
    for pair in (
        [want("bn1"), want("bn1", pool="mean")],
        [want("layer*.bn1"), want("layer*.bn1", pool="mean")],
        [want("bn1", alias="x"), want("conv1", alias="x")],
        [want("bn1", alias="conv1"), want("conv1")],
    ):
        with pytest.raises(SelectorError, match="would both be called") as caught:
            resolve(pair, net)
        assert "'as'" in caught.value.hint
    assert keys(resolve([want("bn1"), want("bn1", alias="b", pool="mean")], net)) == ["bn1", "b"]


def test_every_fault_is_told(net: Catalog) -> None:
    """All selectors that can't be met are named, each with its place, its reason and what to do."""
    with pytest.raises(RequestError) as caught:
        resolve([want("layer9"), want("bn1"), want("bn1", pool="cls"), want("relu#7")], net)
    faults = caught.value.faults
    assert [fault.pointer for fault in faults] == ["/layers/0", "/layers/2", "/layers/3"]
    assert [bool(fault.hint) for fault in faults] == [True, True, True]
    assert caught.value.detail == faults[0].detail == "there is no layer 'layer9'"


def test_nothing_asked_for(net: Catalog) -> None:
    """A request without selectors is refused."""
    with pytest.raises(SelectorError, match="names no layer"):
        resolve([], net)


@pytest.mark.parametrize("text", ["*#7", "*[logits]", "layer?.0.bn1#1"])
def test_a_glob_without_results(net: Catalog, text: str) -> None:
    """A glob whose layers have no such call or path is refused, alone and beside others."""
    for selectors in ([want(text)], [want("bn1"), want(text)]):
        with pytest.raises(RequestError, match="none of which has such a call, path or site"):
            resolve(selectors, net)


def test_silent_layers(load_net: Loader) -> None:
    """Layers that a glob matches and that never run are named in the plan, once."""
    catalog = load_net("NeverCalled").catalog
    assert resolve([want("*l*"), want("silent*", kind=None), want("last")][::2], catalog).skipped == ("silent",)
    with pytest.raises(RequestError, match="never runs"):
        resolve([want("silent")], catalog)


@pytest.mark.parametrize(
    ("text", "how", "detail", "hint"),
    [
        ("layer1", {"normalize": True}, "'normalize' needs a pooled result", "add a pool"),
        ("layer1", {"pool": "cls"}, "'layer1' has no class token", "use pool 'mean'"),
        ("fc", {"pool": "cls"}, "'fc' has no class token", "use pool 'mean'"),
        ("layer1", {"channels": (64,)}, "'channels' of 'layer1' must be between 0 and 63", ""),
        ("layer1", {"channels": (0, -1)}, "'channels' of 'layer1' must be between 0 and 63", ""),
        ("layer1", {"channels": ()}, "'channels' of 'layer1' must be between 0 and 63", ""),
        ("layer1", {"tokens": (0,)}, "'layer1' has no axis of tokens", "leave 'tokens' out"),
    ],
)
def test_options_that_make_no_sense(net: Catalog, text: str, how: dict[str, Any], detail: str, hint: str) -> None:
    """An option that a layer can't have is refused with the layer's name and the range or the way out."""
    with pytest.raises(RequestError, match=re.escape(detail)) as caught:
        resolve([want(text, **how)], net)
    assert hint in caught.value.hint


def test_tokens(tokens: Catalog) -> None:
    """A layer of tokens may be narrowed and has a class token; one of patches alone has none."""
    block = "encoder.layers.encoder_layer_0"
    plan = resolve([want(block, tokens=(0, 16), channels=(5,)), want("encoder", pool="cls")], tokens)
    assert [result.capture.shape(3) for result in plan.results] == [(3, 2, 1), (3, 24)]
    with pytest.raises(RequestError, match="must be between 0 and 16"):
        resolve([want(block, tokens=(17,))], tokens)
    with pytest.raises(RequestError, match="no class token"):
        resolve([want("conv_proj", pool="cls")], tokens)


def test_what_has_no_rows_is_not_pooled() -> None:
    """A tensor that is the same for all rows, or something of all of them, is given as it is or not at all."""
    catalog = surveyed(Inner(), 4)
    for name in ("similar", "first", "mean", "table"):
        assert keys(resolve([want(name)], catalog)) == [name]
        with pytest.raises(RequestError, match=f"'{name}' does not hold one entry for each input") as caught:
            resolve([want(name, pool="flatten")], catalog)
        assert caught.value.hint == "use pool 'none'"
    assert resolve([want("table"), want("linear")], catalog).splits
    assert not resolve([want("mean"), want("linear")], catalog).splits


def test_int8_needs_rows_first(load_net: Loader) -> None:
    """Scales are one for each index of axis 0; where the rows are on axis 1 they would be of all rows together."""
    catalog = load_net("TimeFirst").catalog
    with pytest.raises(RequestError, match=re.escape("'attention[0]' has its rows on axis 1")) as caught:
        resolve([want("attention[0]", dtype="int8")], catalog)
    assert "pool" in caught.value.hint
    plan = resolve([want("attention[0]", dtype="int8", pool="mean")], catalog)
    assert plan.results[0].capture.nbytes(3) == 3 * 8 + 3 * 4


def test_unknown_axes() -> None:
    """A pool that needs to know the axes is refused where they are not known; ``flatten`` is not."""
    leaf = Leaf((), (1, 2, 3, 4), "float32")
    call = Call(Moment(1, 0.0, ()), Moment(2, 1.0, (leaf,)))
    catalog = Catalog({"odd": Layer("odd", "Odd", True, 0, (call,), ())}, 0.1, True)
    with pytest.raises(RequestError, match=re.escape("shape [1, 2, 3, 4], are not known, so 'mean' is not defined")):
        resolve([want("odd", pool="mean")], catalog)
    assert resolve([want("odd", pool="flatten")], catalog).results[0].capture.shape(2) == (2, 24)
    with pytest.raises(RequestError, match="no axis of channels"):
        resolve([want("odd", channels=(0,))], catalog)


def test_dtypes_without_a_reply_format() -> None:
    """Complex numbers are refused by name; every other leaf of the same value is given."""
    catalog = surveyed(DTypes(), 3)
    with pytest.raises(RequestError, match="complex64, which no reply format carries"):
        resolve([want(".")], catalog)
    plan = resolve([want(f".[{name}]") for name in ("double", "half", "brain", "index", "small", "flag")], catalog)
    assert [result.capture.dtype for result in plan.results] == ["float32"] * 3 + ["int64", "int8", "bool"]
    assert [result.capture.nbytes(2) for result in plan.results] == [24, 24, 24, 48, 6, 6]
    assert plan.nbytes(2) == 132


def test_folded_windows() -> None:
    """Windows folded into the batch are given as they are, or pooled to one entry for each input."""
    catalog = surveyed(Windows(), 8, 6)
    plan = resolve(
        [want("inner"), want("inner", alias="m", pool="mean"), want("inner", alias="f", pool="flatten")], catalog
    )
    assert [result.capture.shape(3) for result in plan.results] == [(12, 2, 6), (3, 6), (3, 48)]
    assert plan.splits


def test_names_of_a_request_are_escaped(net: Catalog) -> None:
    """A name that a message repeats is cut and made printable."""
    with pytest.raises(RequestError) as caught:
        resolve([want("\x1b[31m" + "ä" * 400 + "]")], net)
    assert len(caught.value.detail) < 120
    with pytest.raises(RequestError) as caught:
        resolve([want("\u202e\n" + "ä" * 400)], net)
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) < 200

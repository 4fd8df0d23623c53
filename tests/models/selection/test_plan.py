"""A request's layers made into a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.errors import RequestError, SelectorError
from layertap.models.gradients.objectives import OBJECTIVES
from layertap.models.hooks.sites import SITES, Site
from layertap.models.interventions.operations import OPERATIONS
from layertap.models.planner import MAX_FAULTS, make_plan
from layertap.models.selection.hook_points import ObjectiveKind, Op, Pool, Reduction, ReplyDType, Selector
from layertap.models.selection.plan import Plan
from layertap.models.selection.poolings import POOLINGS
from layertap.models.selection.selectors import parse_selector
from tests.conftest import Loader
from tests.models.extraction import extract_captures, extract_plan
from tests.nets import Cube, Inner, NeverCalled, Recursive, Structured, TimeFirst, Windows, batch, surveyed, vit

TOKENS = TensorInfo((), (1, 5, 8), "float32", layout="NTC", prefix=1)
PICTURE = replace(TOKENS, shape=(1, 8, 4, 4), layout="NCHW", prefix=0)
LEAVES = {
    "tokens": TOKENS,
    "picture": PICTURE,
    "unknown": replace(PICTURE, layout=None),
    "shared": replace(PICTURE, row_axis=None, layout=None),
    "mixed": replace(PICTURE, crosses_rows=True, layout="NCHW"),
    "second": replace(TOKENS, shape=(5, 1, 8), layout="TNC", row_axis=1),
    "complex": replace(PICTURE, dtype="complex64"),
}


def catalog_of(leaves: dict[str, TensorInfo]) -> Catalog:
    layers = {
        name: Layer(
            name,
            "Part",
            True,
            0,
            (Call(CallBoundary(2 * at + 1, 0.0, (info,)), CallBoundary(2 * at + 2, 0.1, (info,))),),
            (),
        )
        for at, (name, info) in enumerate(leaves.items())
    }
    return Catalog(layers, 1.0, True)


def chosen(text: str, alias: str | None = None, type: str | None = None, **how: Any) -> Selector:  # noqa: A002
    return replace(parse_selector(text), alias=alias, type=type, reduction=Reduction(**how))


def planned(catalog: Catalog, *texts: str, **how: Any) -> Plan:
    return make_plan([chosen(text, **how) for text in texts], catalog)


def keys(plan: Plan) -> list[str]:
    return [result.key for result in plan.results]


@pytest.fixture(scope="module")
def never() -> Catalog:
    return surveyed(NeverCalled(), 4)


@pytest.fixture(scope="module")
def structured() -> Catalog:
    return surveyed(Structured(), 4)


@pytest.fixture(scope="module")
def recursive() -> Catalog:
    return surveyed(Recursive(), 4)


@pytest.mark.parametrize("text", [".", "last", "last:input", "last#0", "last#-1:output", "often#-3", "often"])
def test_literal_key(never: Catalog, text: str) -> None:
    """A literal name keeps the request's spelling."""
    assert keys(planned(never, text)) == [text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("l*", ["last"]),
        ("l*:input", ["last:input"]),
        ("l?st#-1", ["last"]),
        ("oft*", ["often#19"]),
        ("oft*#3:input", ["often#3:input"]),
        ("oft*#*", [f"often#{call}" for call in range(20)]),
        ("often#*", [f"often#{call}" for call in range(20)]),
        ("*", ["often#19", "last"]),
    ],
)
def test_glob_keys(never: Catalog, text: str, expected: list[str]) -> None:
    """A glob's results carry canonical names: the call where there are several, the site where it is not output."""
    assert keys(planned(never, text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nested[pair][left]", ["nested[pair][left]"]),
        ("nested[pair]", ["nested[pair][left]", "nested[pair][right]"]),
        ("nest*[list]", ["nested[list][0][0]", "nested[list][1]"]),
        ("n*[index]", ["nested[index]"]),
        ("nested:input", ["nested:input"]),
    ],
)
def test_paths(structured: Catalog, text: str, expected: list[str]) -> None:
    """Leaves of structured values are named by their path."""
    assert keys(planned(structured, text)) == expected


def test_order(never: Catalog) -> None:
    """Results stand in the order asked for, those of one glob in execution order."""
    assert keys(planned(never, "last", "often#3", "*:input")) == ["last", "often#3", "often#19:input", "last:input"]


def test_once(never: Catalog) -> None:
    """The same thing asked for twice is given once: same spelling, or by two globs, or by a name and a glob."""
    assert keys(planned(never, "last", "last")) == ["last"]
    assert keys(planned(never, "l*", "la*")) == ["last"]
    assert keys(planned(never, "l*", "last#0")) == ["last#0"]
    assert keys(planned(never, "last#0", "*")) == ["last#0", "often#19"]
    assert len(planned(never, "last", "last#0", "last#-1").captures) == 1


def test_not_once(never: Catalog) -> None:
    """The same layer with another pool is another thing, and needs another name."""
    two = [chosen("last"), chosen("last", alias="flat", pool="flatten")]
    assert keys(make_plan(two, never)) == ["last", "flat"]
    assert keys(make_plan([chosen("last", alias="a"), chosen("last", alias="b")], never)) == ["a", "b"]


def test_alias(structured: Catalog) -> None:
    """``as`` names a single result, and is the stem of the leaves of one value."""
    assert keys(make_plan([chosen("linear:input", alias="raw")], structured)) == ["raw"]
    assert keys(make_plan([chosen("lin*", alias="raw")], structured)) == ["raw"]
    assert keys(make_plan([chosen("nested[pair]", alias="p")], structured)) == ["p[pair][left]", "p[pair][right]"]
    assert keys(make_plan([chosen("*", alias="raw", type="Linear")], structured)) == ["raw"]


@pytest.mark.parametrize(
    "selectors",
    [
        [chosen("last"), chosen("last", pool="flatten")],
        [chosen("last", alias="x"), chosen("often", alias="x")],
        [chosen("last", alias="often"), chosen("often")],
        [chosen("l*"), chosen("l*", dtype="float16")],
    ],
    ids=["pool", "as", "as a name", "globs"],
)
def test_conflict(never: Catalog, selectors: list[Selector]) -> None:
    """Two different results of one name are refused."""
    with pytest.raises(SelectorError, match="two different results would both be called") as caught:
        make_plan(selectors, never)
    assert "'as'" in caught.value.hint


def test_empty(never: Catalog) -> None:
    """A request without layers is refused."""
    with pytest.raises(SelectorError, match="names no layer"):
        make_plan([], never)


BAD: dict[str, tuple[Selector, str]] = {
    "no such layer": (chosen("tokenz"), "no layer 'tokenz'"),
    "no such call": (chosen("tokens#1"), "there is no call 1"),
    "no such path": (chosen("tokens[0]"), "is a single tensor"),
    "no such type": (chosen("*", type="Conv9"), "matches no layer"),
    "dtype": (chosen("complex"), "complex64, which no reply format carries"),
    "normalize alone": (chosen("tokens", normalize=True), "'normalize' needs a pooled result"),
    "cls of a picture": (chosen("picture", pool="cls"), "'picture' has no class token"),
    "shared": (chosen("shared", pool="flatten"), "does not hold one entry for each input"),
    "mixed": (chosen("mixed", pool="mean"), "does not hold one entry for each input"),
    "mean of unknown axes": (chosen("unknown", pool="mean"), "shape [1, 8, 4, 4], are not known, so 'mean'"),
    "channels of unknown axes": (chosen("unknown", channels=(0,)), "has no axis for 'channels'"),
    "tokens of a picture": (chosen("picture", tokens=(0,)), "has no axis for 'tokens'"),
    "channel too large": (chosen("tokens", channels=(0, 8)), "must be between -8 and 7"),
    "token too large": (chosen("tokens", tokens=(5,)), "must be between -5 and 4"),
    "glob without that call": (chosen("tok*#7"), "none of which has such a call, path or site"),
    "glob without that path": (chosen("*[logits]"), "none of which has such a call, path or site"),
    "int8 on axis 1": (chosen("second", dtype="int8"), "'second' has its rows on axis 1"),
    "too negative": (chosen("tokens", channels=(-9,)), "must be between -8 and 7"),
    "channel twice": (chosen("tokens", channels=(1, 0, 1)), "'channels' of 'tokens' names an index twice"),
    "none of them": (chosen("tokens", channels=()), "must be between -8 and 7"),
}


def test_an_index_twice_where_sizes_are_not_known() -> None:
    """It is refused before an input is decoded and its shape surveyed."""
    with pytest.raises(RequestError, match="names an index twice"):
        make_plan([chosen("tokens", channels=(3, 3))], replace(catalog_of(LEAVES), sizes_known=False))


def test_globs_leave_out_what_can_not_be_given() -> None:
    """Of what a glob matches: no dtype that no format carries, pooled nothing without an entry for each input."""
    catalog = catalog_of(LEAVES)
    plan = make_plan([chosen("*")], catalog)
    assert "complex" not in keys(plan)
    assert [detail.split()[0] for detail in plan.left_out] == ["'complex'"]
    assert "'complex' is of dtype complex64" in plan.warnings[0]
    pooled = make_plan([chosen("*", pool="flatten")], catalog)
    assert not {"complex", "shared", "mixed"} & set(keys(pooled))
    assert {detail.split()[0] for detail in pooled.left_out} >= {"'complex'", "'shared'", "'mixed'"}
    with pytest.raises(RequestError, match="complex64, which no reply format carries"):
        make_plan([chosen("comple*")], catalog)


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    """What can't be done is refused with its reason, and a pointer to the selector among the good ones."""
    selector, reason = BAD[name]
    with pytest.raises(RequestError) as caught:
        make_plan([chosen("picture"), selector, chosen("picture")], catalog_of(LEAVES))
    assert reason in caught.value.detail
    assert [(fault.detail, fault.hint, fault.pointer) for fault in caught.value.faults] == [
        (caught.value.detail, caught.value.hint, "/layers/1")
    ]


def test_all_faults() -> None:
    """Every bad selector has a fault of its own, up to as many as anyone reads."""
    bad = list(BAD.values())
    for some in (bad[:MAX_FAULTS], bad[-MAX_FAULTS:], bad):
        with pytest.raises(RequestError) as caught:
            make_plan([chosen("tokens"), *(selector for selector, _ in some)], catalog_of(LEAVES))
        faults = caught.value.faults
        assert [fault.pointer for fault in faults] == [f"/layers/{at + 1}" for at in range(min(len(some), MAX_FAULTS))]
        assert all(reason in fault.detail for fault, (_, reason) in zip(faults, some, strict=False))


@pytest.mark.parametrize(
    "how",
    [
        {"pool": "cls"},
        {"pool": "mean", "normalize": True},
        {"pool": "gem", "tokens": (4, 0), "channels": (7, 0)},
        {"pool": "flatten", "normalize": True, "dtype": "int8"},
    ],
    ids=str,
)
def test_accepted(how: dict[str, Any]) -> None:
    """Options that make sense together are taken."""
    assert keys(planned(catalog_of(LEAVES), "tokens", **how)) == ["tokens"]


@pytest.mark.parametrize(
    ("texts", "layer", "call", "site"),
    [
        (["last", "often#0"], "last", 0, "output"),
        (["often#0", "last:input"], "last", 0, "input"),
        (["last:input", "often"], "last", 0, "input"),
        (["often#2", "often#9", "often#4"], "often", 9, "output"),
        (["often#2:input", "often#1"], "often", 2, "input"),
        (["last", "."], ".", 0, "output"),
    ],
)
def test_stops_at(never: Catalog, texts: list[str], layer: str, call: int, site: str) -> None:
    """The forward stops at the deepest point, wherever it stands in the request."""
    point = planned(never, *texts).stops_at
    assert (point.layer, point.call, point.site) == (layer, call, site)


def test_stops_at_of_nested_calls(recursive: Catalog) -> None:
    """Of calls inside each other the outermost ends last, though it began first."""
    assert planned(recursive, "down#2", "down#0", "down#1").stops_at.call == 0
    assert planned(recursive, "down#*:input").stops_at.call == 2


def test_cost(never: Catalog) -> None:
    """The cost is that of the stopping point: more the deeper, all of it for the whole model."""
    costs = [planned(never, text, "often#0:input").cost for text in ("often#0", "often#10", "last:input", "last", ".")]
    assert costs == sorted(costs)
    assert 0 <= costs[0] < costs[-1] == 1
    assert planned(never, "last:input").cost == never.layers["last"].calls[0].input.cost


def test_skipped(never: Catalog) -> None:
    """Layers that a glob matched and that never run are told, once, and never under their own name alone."""
    assert planned(never, "*", "*:input", "last").skipped == ("silent",)
    assert planned(never, "last", "o*").skipped == ()
    with pytest.raises(RequestError, match="never runs"):
        planned(never, "silent")


def test_splits() -> None:
    """Rows may run apart unless one capture mixes them."""
    assert planned(catalog_of(LEAVES), "tokens", "shared").may_split
    assert not planned(catalog_of(LEAVES), "tokens", "mixed").may_split


class Odd(nn.Module):
    """Returns a number, indices, and marks beside its features."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x * 2, "index": x.argsort(-1), "mark": x > 0, "shared": torch.ones(3), "double": x.double()}


class Number(nn.Module):
    """Returns a single number, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(())


@dataclass(frozen=True)
class Sized:
    module: nn.Module
    shape: tuple[int, ...]
    texts: tuple[str, ...]


SIZED = {
    "vit": Sized(vit(), (3, 32, 32), ("*", "*:input", ".")),
    "Cube": Sized(Cube(), (3, 16, 16), ("*", "stem", ".:input")),
    "TimeFirst": Sized(TimeFirst(), (5, 6), ("proj", "norm", "norm:input", ".")),
    "Windows": Sized(Windows(), (8, 6), ("inner", "inner:input")),
    "Odd": Sized(nn.Sequential(Odd()), (4,), ("0", "0:input")),
}


def sizes(what: Sized, how: dict[str, Any]) -> None:
    catalog = surveyed(what.module, *what.shape, prefix=getattr(what.module, "num_prefix_tokens", 0))
    plan = planned(catalog, *what.texts, **how)
    rows = 3
    x = torch.randn(rows, *what.shape)
    found = extract_captures(FeatureExtractor(what.module), lambda: what.module(x), plan.captures, rows)
    for capture, reduced in found.items():
        assert capture.shape(rows) == tuple(reduced.values.shape)
        assert capture.dtype == str(reduced.values.dtype).removeprefix("torch.")
        scale = 0 if reduced.scale is None else reduced.scale.nbytes
        assert capture.nbytes(rows) == reduced.values.nbytes + scale, capture
    given = [found[result.capture] for result in plan.results]
    assert plan.count_numbers(rows) == sum(item.values.numel() for item in given)
    assert plan.nbytes(rows) == sum(
        item.values.nbytes + (0 if item.scale is None else item.scale.nbytes) for item in given
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("pool", ["none", "flatten"])
@pytest.mark.parametrize("name", SIZED)
def test_sizes(name: str, pool: Pool, dtype: ReplyDType) -> None:
    """Shapes, dtypes, numbers and bytes told beforehand are those of the arrays that come out."""
    what = SIZED[name]
    if name == "TimeFirst" and (pool, dtype) == ("none", "int8"):  # refused where rows are on axis 1
        what = replace(what, texts=("proj:input", "."))
    if name == "Odd" and pool == "flatten":  # what is the same for all rows can't be pooled
        what = replace(what, texts=("0[x]", "0[index]", "0[mark]", "0[double]", "0:input"))
    sizes(what, {"pool": pool, "dtype": dtype})


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("pool", "normalize"), [("mean", False), ("gem", False), ("max", True), ("flatten", True)])
def test_sizes_of_pooled_integers(pool: Pool, normalize: bool, dtype: ReplyDType) -> None:
    """Sizes are right for integers too, of which a mean or a unit vector is floating."""
    sizes(replace(SIZED["Odd"], texts=("0[index]",)), {"pool": pool, "normalize": normalize, "dtype": dtype})


def test_sizes_of_a_number() -> None:
    """A single number in int8 has a scale too."""
    sizes(Sized(nn.Sequential(Number()), (4,), ("0",)), {"dtype": "int8"})


def test_sizes_narrowed(load_net: Loader) -> None:
    """Narrowing to channels makes the sizes smaller by as much."""
    catalog = load_net("Chain").catalog
    full, part = (planned(catalog, "conv", channels=channels) for channels in (None, (0, 5)))
    assert (full.count_numbers(2), part.count_numbers(2)) == (2 * 8 * 64, 2 * 2 * 64)
    assert part.nbytes(2) == 2 * 2 * 64 * 4


def test_shared_capture_counts_twice(load_net: Loader) -> None:
    """A capture under two names is taken once, and both arrays count."""
    model = load_net("Chain")
    plan = planned(model.catalog, "conv", "conv#0")
    assert len(plan.captures) == 1
    found = extract_plan(model, batch(model.inputs, 2), plan, model.catalog, 2)
    assert plan.nbytes(2) == 2 * found[plan.results[0].capture].values.nbytes


def test_what_has_no_rows_is_not_pooled() -> None:
    """A tensor that is the same for all rows, or something of all of them, is given as it is or not at all."""
    catalog = surveyed(Inner(), 4)
    for name in ("similar", "first", "mean", "table"):
        assert keys(planned(catalog, name)) == [name]
        with pytest.raises(RequestError, match=f"'{name}' does not hold one entry for each input") as caught:
            planned(catalog, name, pool="flatten")
        assert caught.value.hint == "use pool 'none'"
    assert planned(catalog, "table", "linear").may_split
    assert not planned(catalog, "mean", "linear").may_split


def test_names_of_a_request_are_escaped(never: Catalog) -> None:
    """A name that a message repeats is cut and made printable."""
    with pytest.raises(RequestError) as caught:
        planned(never, "\x1b[31m" + "ä" * 400 + "]")
    assert len(caught.value.detail) < 120
    with pytest.raises(RequestError) as caught:
        planned(never, "\u202e\n" + "ä" * 400)
    assert caught.value.detail.isprintable()
    assert len(caught.value.detail) < 200


@pytest.mark.parametrize(
    ("names", "table"),
    [(Pool, POOLINGS), (Op, OPERATIONS), (ObjectiveKind, OBJECTIVES), (Site, SITES)],
    ids=["Pool", "Op", "Kind", "Site"],
)
def test_names_have_a_row(names: object, table: Mapping[str, object]) -> None:
    """What a request may name, and nothing else, has a row in its table."""
    assert get_args(names) == tuple(table)

"""A request's layers made into a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.errors import RequestError
from layertap.models.plan.objectives import OBJECTIVES
from layertap.models.plan.operations import OPERATIONS
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import MAX_FAULTS, make_plan
from layertap.models.plan.poolings import POOLINGS
from layertap.models.plan.requested import ObjectiveKind, Op, Reduction, Selector
from layertap.models.plan.selectors import parse_selector
from layertap.models.points import SITES, Site
from layertap.models.spec import Pool
from tests.nets import NeverCalled, surveyed

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


BAD: dict[str, tuple[Selector, str]] = {
    "no such layer": (chosen("tokenz"), "no layer 'tokenz'"),
    "no such type": (chosen("*", type="Conv9"), "no layer of this model has type"),
    "dtype": (chosen("complex"), "complex64, which no reply format carries"),
    "normalize alone": (chosen("tokens", normalize=True), "'normalize' needs a pooled result"),
    "cls of a picture": (chosen("picture", pool="cls"), "'picture' has no class token"),
    "shared": (chosen("shared", pool="flatten"), "needs one entry for each input"),
    "mean of unknown axes": (
        chosen("unknown", pool="mean"),
        "shape [1, 8, 4, 4], holds channels is not known, so 'mean'",
    ),
    "channel too large": (chosen("tokens", channels=(0, 8)), "must be between -8 and 7"),
    "int8 on axis 1": (chosen("second", dtype="int8"), "'second' has its rows on axis 1"),
    "channel twice": (chosen("tokens", channels=(1, 0, 1)), "'channels' of 'tokens' names an index twice"),
}


def test_globs_leave_out_what_can_not_be_given() -> None:
    """Of what a glob matches: no dtype that no format carries, pooled nothing without an entry for each input."""
    catalog = catalog_of(LEAVES)
    plan = make_plan([chosen("*")], catalog)
    assert "complex" not in keys(plan)
    assert plan.warnings[0].startswith("1 matching tensors are left out: 'complex' is of dtype complex64")
    pooled = make_plan([chosen("*", pool="flatten")], catalog)
    assert not {"complex", "shared", "mixed"} & set(keys(pooled))
    assert all(f"'{name}'" in pooled.warnings[0] for name in ("complex", "shared", "mixed"))
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


@pytest.mark.parametrize(
    ("texts", "layer", "call", "site"),
    [
        (["last", "often#0"], "last", 0, "output"),
        (["often#0", "last:input"], "last", 0, "input"),
        (["often#2", "often#9", "often#4"], "often", 9, "output"),
        (["last", "."], ".", 0, "output"),
    ],
)
def test_stops_at(never: Catalog, texts: list[str], layer: str, call: int, site: str) -> None:
    """The forward stops at the deepest point, wherever it stands in the request."""
    point = planned(never, *texts).stops_at
    assert (point.layer, point.call, point.site) == (layer, call, site)


def test_all_faults() -> None:
    """Every bad selector has a fault of its own, up to as many as anyone reads; what it names is made printable."""
    bad = [*(selector for selector, _ in BAD.values()), chosen("\u202e\n" + "ä" * 400)] * 10
    with pytest.raises(RequestError) as caught:
        make_plan([chosen("tokens"), *bad], catalog_of(LEAVES))
    faults = caught.value.faults
    assert [fault.pointer for fault in faults] == [f"/layers/{at + 1}" for at in range(MAX_FAULTS)]
    assert all(fault.detail.isprintable() and len(fault.detail) < 200 for fault in faults)


def test_names_have_a_row() -> None:
    """What a request may name, and nothing else, has a row in its table."""
    for names, table in ((Pool, POOLINGS), (Op, OPERATIONS), (ObjectiveKind, OBJECTIVES), (Site, SITES)):
        assert get_args(names) == tuple(table)

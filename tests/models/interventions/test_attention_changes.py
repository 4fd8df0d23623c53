"""Weights of attention changed on their way, against attention written by hand with the same change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.catalog.catalog import Catalog
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import Intervention, Objective, Operation, TensorData
from layertap.models.selection.plan import Plan
from layertap.models.selection.selectors import parse_selector
from tests.models.hooks.test_attention import CASES, ROWS, Change, by_hand, prepared, run, same_state

REPLACEMENT = torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(4))  # heads, queries, keys


def halve_queries(weights: Tensor) -> Tensor:
    changed = weights.clone()
    changed[:, :, [3, 0]] *= 0.5
    return changed


def replace_some(weights: Tensor) -> Tensor:
    changed = weights.clone()
    for query, row in zip((1, 3), REPLACEMENT[0], strict=True):
        changed[:, 0, query, [0, 2, 3]] = row
    return changed


OPERATIONS: dict[str, tuple[Callable[[int], Operation], Change]] = {
    "queries": (lambda windows: Operation("scale", by=0.5, queries=(3, 0)), halve_queries),
    "a few weights of one's own": (
        lambda windows: Operation("replace", tensor=own(windows), heads=(0,), queries=(1, 3), keys=(0, 2, 3)),
        replace_some,
    ),
    "all of them": (lambda windows: Operation("clamp", max=0.15), lambda w: w.clamp(max=0.15)),
}


def own(windows: int) -> TensorData:
    """The replacement as a request has it, for each window of a row."""
    values = REPLACEMENT.numpy() if windows == 1 else np.stack([REPLACEMENT.numpy()] * windows)
    return TensorData(values.shape, values.astype("<f4").tobytes())


def planned(
    catalog: Catalog, layer: str, operation: Operation, *texts: str, objective: Objective | None = None
) -> Plan:
    change = Intervention(parse_selector(f"{layer}:attention"), operation)
    return make_plan([parse_selector(text) for text in texts], catalog, [change], objective)


def count_windows(catalog: Catalog, layer: str) -> int:
    (info,) = catalog.layers[layer].calls[0].get_boundary("attention").tensors
    return info.entries_per_row


@pytest.mark.parametrize(("name", "what"), [*product(["timm fused"], OPERATIONS), *product(CASES, ["queries"])])
def test_changes(name: str, what: str) -> None:
    """The forward goes on with the changed weights, a capture there shows them, and the model is left as it was."""
    case, (make, change) = CASES[name], OPERATIONS[what]
    module, catalog, x = prepared(case)
    layer, later = case.layers[:2] if len(case.layers) > 1 else (case.layers[0], case.layers[0])
    kept: dict[str, Tensor] = {}
    with by_hand(module, case, kept, change, layer):
        expected = module(x)
    before = same_state(module)
    operation = make(count_windows(catalog, layer))
    texts = [".", *dict.fromkeys((f"{layer}:attention", f"{later}:attention"))]
    found = run(module, planned(catalog, layer, operation, *texts), x)
    assert same_state(module) == before
    assert (expected - module(x)).abs().max() > 1e-4
    torch.testing.assert_close(found["."], expected, rtol=1e-4, atol=1e-5)
    for each in (layer, later):
        torch.testing.assert_close(found[f"{each}:attention"], kept[each], rtol=1e-4, atol=1e-5)
    (alone,) = run(module, planned(catalog, layer, operation, f"{layer}:attention"), x).values()
    assert torch.equal(alone, found[f"{layer}:attention"])
    assert same_state(module) == before


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_rows_of_others(name: str) -> None:
    """In a forward of several requests only the rows of the one that asked are changed, and none of its numbers."""
    case, (make, _) = CASES[name], OPERATIONS["queries"]
    module, catalog, x = prepared(case)
    layer = case.layers[0]
    plan = planned(catalog, layer, make(1), ".", f"{layer}:attention")
    plain = make_plan([parse_selector("."), parse_selector(f"{layer}:attention")], catalog)
    shares = [
        RequestSlice(0, 1, plain.captures),
        RequestSlice(1, 2, plan.captures, plan.resolved_interventions),
        RequestSlice(2, ROWS, plain.captures),
    ]
    taken = FeatureExtractor(module).extract_slices(lambda: module(x), shares, ROWS)
    for share, wanted in zip(shares, (plain, plan, plain), strict=True):
        alone = run(module, wanted, x[share.start : share.stop])
        together = taken.select(share)
        for result in wanted.results:
            values = together[result.capture].values
            torch.testing.assert_close(values, alone[result.key], rtol=1e-4, atol=1e-5)
    assert plain.may_share
    assert not plan.may_share

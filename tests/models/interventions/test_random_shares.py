"""Requests drawn at random that share a forward: each gets what it gets alone, whatever others change there."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layertap.models.capture.batch_slices import RequestSlice
from layertap.models.capture.extractor import FeatureExtractor
from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.planner import make_plan
from layertap.models.selection.hook_points import Intervention, Objective, Operation
from layertap.models.selection.plan import Plan
from layertap.models.selection.selectors import parse_selector
from layertap.models.spec import InputSpec
from tests.nets import resnet, vit

FACTORIES: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "vit": vit}
SHAPE = (3, 32, 32)
LAYERS = {
    "resnet": ("conv1", "layer1", "layer2.0.conv1", "layer3", "avgpool"),
    "vit": ("conv_proj", "encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1.mlp", "encoder.ln"),
}
OBJECTIVES = (Objective("logit", 1), Objective("probability", "top"), Objective("sum"), Objective("cross_entropy", 0))
Values = dict[str, Tensor]


def draw_operation(random: Random) -> Operation:
    kinds: dict[str, dict[str, Any]] = {
        "zero": {},
        "scale": {"by": random.choice((-1.0, 0.0, 2.0))},
        "add": {"value": 0.25},
        "clamp": {"min": random.choice((-0.01, 0.5))},
        "replace": {"value": 0.5},
        "noise": {"std": 0.1, "seed": random.randrange(3)},
    }
    kind = random.choice(list(kinds))
    channels = (random.randrange(3),) if random.random() < 0.5 else None
    return Operation(kind, channels=channels, **kinds[kind])


def draw_plan(random: Random, catalog: Catalog, layers: tuple[str, ...]) -> Plan:
    """A few captures with gradients among them, up to three changes of values and of gradients."""
    asked = [f"{layer}:grad_output" for layer in random.sample(layers, 2)] + [random.choice(layers)]
    places = [f"{random.choice(layers)}:{random.choice(('output', 'grad_output'))}" for _ in range(random.randrange(4))]
    changes = [Intervention(parse_selector(place), draw_operation(random)) for place in places]
    return make_plan([parse_selector(text) for text in asked], catalog, changes, random.choice(OBJECTIVES))


def extract(module: nn.Module, x: Tensor, shares: list[RequestSlice], plans: list[Plan]) -> list[Values]:
    taken = FeatureExtractor(module).extract_slices(lambda: module(x.clone()), shares, len(x))
    return [
        {result.key: taken.select(share)[result.capture].values for result in plan.results}
        for share, plan in zip(shares, plans, strict=True)
    ]


def share_of(plan: Plan, start: int, stop: int) -> RequestSlice:
    return RequestSlice(start, stop, plan.captures, plan.resolved_interventions, plan.objective)


@pytest.fixture(scope="module", params=LAYERS)
def net(request: Any) -> tuple[str, nn.Module, Catalog]:
    """A model in float64, so that nothing but a wrong value differs, and its catalogue."""
    module = FACTORIES[request.param]().double().eval().requires_grad_(False)
    specs = (InputSpec("x", SHAPE, "float64"),)
    catalog = survey(module, specs, lambda rows: module(*rows.values()), torch.device("cpu"), 0, torch.float64)
    return request.param, module, catalog


@pytest.mark.parametrize("seed", range(6))
def test_alone_and_together(net: tuple[str, nn.Module, Catalog], seed: int) -> None:
    name, module, catalog = net
    random = Random(f"{name} {seed}")
    plans = [draw_plan(random, catalog, LAYERS[name]) for _ in range(3)]
    rows = [random.randrange(1, 3) for _ in plans]
    starts = [sum(rows[:place]) for place in range(len(rows))]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(rows), *SHAPE, generator=generator, dtype=torch.float64)
    shares = [share_of(plan, start, start + count) for plan, start, count in zip(plans, starts, rows, strict=True)]
    together = extract(module, x, shares, plans)
    for plan, start, count, found in zip(plans, starts, rows, together, strict=True):
        (alone,) = extract(module, x[start : start + count], [share_of(plan, 0, count)], [plan])
        for key, value in alone.items():
            torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9)

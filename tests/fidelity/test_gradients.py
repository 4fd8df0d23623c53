"""Gradients at both sides of every call of every module, of real architectures with small inputs, by plain autograd.

The oracle hooks nothing: in a copy of the model each module's ``forward`` is replaced by a function that hands on
copies of what came and of what left, and keeps the tensors before them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import ConvNeXt, DenseNet
from torchvision.models.convnext import CNBlockConfig

from layertap.models.catalog.catalog import Catalog
from layertap.models.catalog.survey import survey
from layertap.models.hooks.attach import Modules
from layertap.models.plan.plan import Plan
from layertap.models.plan.planner import make_plan
from layertap.models.plan.requested import Objective
from layertap.models.plan.selectors import parse_selector
from layertap.models.run.batch_slices import RequestSlice
from layertap.models.run.extractor import extract_slices
from layertap.models.spec import InputSpec
from tests.models.extraction import list_tensors
from tests.nets import resnet, swin, vit
from tests.oracle import flatten, seeded

CPU = torch.device("cpu")
CLASSES = 7
SITES = ("grad_input", "grad_output")
TOLERANCE = 1e-6  # of a tensor's largest value: models compute in float64, replies are float32
TARGET = tuple((number + 1) / 28 for number in range(CLASSES))
Key = tuple[str, int, tuple[str, ...], str]
Net = tuple[Callable[[], nn.Module], int]  # how it is built, the side of its pictures


NETS: dict[str, Net] = {
    "resnet": (resnet, 32),
    "vit": (vit, 32),
    "swin": (swin, 32),
    "densenet": (partial(DenseNet, 8, (2, 2, 2), 16, num_classes=CLASSES), 32),
    "convnext": (partial(ConvNeXt, [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=CLASSES), 32),
    "eva02": (partial(timm.create_model, "eva02_tiny_patch14_224", num_classes=CLASSES, img_size=28, depth=2), 28),
}
# What one row each of a shared batch is asked for.
OBJECTIVES: tuple[tuple[Objective, Callable[[Tensor], Tensor]], ...] = (
    (Objective("logit", "top"), lambda scores: scores.max()),
    (Objective("cross_entropy", 3), lambda scores: -scores.log_softmax(0)[3]),
    (
        Objective("kl_div", target=TARGET),
        lambda scores: functional.kl_div(scores.log_softmax(0), scores.new_tensor(TARGET), reduction="sum"),
    ),
)


class Copies:
    """What came to and left each call of each module, before it was copied."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: dict[Key, Tensor] = {}
        names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, part in module.named_modules(remove_duplicate=False):
            names[part].append(name or ".")
        for part, aliases in names.items():
            part.forward = self._copying(part.forward, aliases)

    def _copying(self, forward: Callable[..., Any], aliases: list[str]) -> Callable[..., Any]:
        calls = count()

        def copying(*args: Any, **kwargs: Any) -> Any:
            call = next(calls)
            given = {str(index): item for index, item in enumerate(args)} | kwargs
            lone = sum(bool(flatten(item)) for item in given.values()) == 1
            kept = {
                name: self._keep(item, "grad_input", () if lone else (name,), call, aliases)
                for name, item in given.items()
            }
            out = forward(*(kept[str(index)] for index in range(len(args))), **{name: kept[name] for name in kwargs})
            return self._keep(out, "grad_output", (), call, aliases)

        return copying

    def _keep(self, value: Any, site: str, path: tuple[str, ...], call: int, aliases: list[str]) -> Any:
        if isinstance(value, Tensor):
            if not value.requires_grad:
                return value
            kept = value.clone()
            for name in aliases:
                self.kept[name, call, path, site] = kept
            return kept.clone()
        if isinstance(value, dict):
            return {key: self._keep(item, site, (*path, str(key)), call, aliases) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(
                self._keep(item, site, (*path, str(index)), call, aliases) for index, item in enumerate(value)
            )
        return value


def by_autograd(module: nn.Module, x: Tensor) -> dict[Key, Tensor]:
    """The gradients of each row's own objective, at every tensor of a copy of the model."""
    module = copy.deepcopy(module)
    copies = Copies(module)
    scores = module(x.clone().requires_grad_())
    total = torch.stack([goal(row) for (_, goal), row in zip(OBJECTIVES, scores, strict=True)]).sum()
    found = torch.autograd.grad(total, list(copies.kept.values()), allow_unused=True)
    return {
        key: torch.zeros_like(kept) if gradient is None else gradient
        for (key, kept), gradient in zip(copies.kept.items(), found, strict=True)
    }


def taken(module: nn.Module, plans: list[Plan], x: Tensor) -> list[dict[Key, Tensor]]:
    """What each row's plan gives in a forward of all of them."""
    wanted = [frozenset(result.capture for result in plan.results) for plan in plans]
    shares = [RequestSlice(at, at + 1, wanted[at], (), plan.objective) for at, plan in enumerate(plans)]
    found = extract_slices(Modules(module), lambda: module(x.clone()), shares, len(x))
    return [
        {(p.layer, p.call, p.path, p.site): value.values for c, value in found.select(share).items() for p in [c.point]}
        for share in shares
    ]


def close(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors agree, measured by the largest value."""
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return found.shape == wanted.shape and torch.allclose(found.double(), wanted, rtol=0, atol=TOLERANCE * scale)


def built(name: str) -> tuple[nn.Module, Catalog, Tensor]:
    """A model in float64 with frozen random weights, its catalog, three rows."""
    build, side = NETS[name]
    module = seeded(build(), 1).double().eval().requires_grad_(False)
    specs = (InputSpec("x", (3, side, side), "float64"),)
    catalog = survey(module, specs, lambda rows: module(*rows.values()), CPU, 0, torch.float64)
    rows = torch.randn(len(OBJECTIVES), 3, side, side, generator=torch.Generator().manual_seed(2))
    return module, catalog, rows.double()


@pytest.mark.parametrize(
    "name", [name if name == "resnet" else pytest.param(name, marks=pytest.mark.slow) for name in NETS]
)
def test_every_gradient(name: str) -> None:
    """Each row has the gradients of its own objective, beside others that differentiate something else and alone."""
    module, catalog, x = built(name)
    selectors = [parse_selector(f"{pattern}:{site}") for site in SITES for pattern in ("*#*", ".")]
    plans = [make_plan(selectors, catalog, objective=objective) for objective, _ in OBJECTIVES]
    together = taken(module, plans, x)
    wanted = by_autograd(module, x)
    found = list_tensors(catalog, "input", "output")
    leaves = {(point.layer, point.call, point.path, f"grad_{point.site}"): info for point, info in found}
    assert {key for key in wanted if leaves[key].row_axis is not None} == together[0].keys()
    assert sum(bool(value.any()) for value in wanted.values()) > 0.9 * len(wanted)
    for row, found in enumerate(together):
        alone = taken(module, plans[row : row + 1], x[row : row + 1])[0]
        assert alone.keys() == found.keys()
        for key, value in found.items():
            info = leaves[key]
            own = wanted[key].narrow(info.row_axis or 0, row * info.entries_per_row, info.entries_per_row)
            assert close(value, own), (key, row)
            assert close(alone[key], own), (key, row)

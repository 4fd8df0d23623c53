"""Which architectures are tried, and on rows of which shape: small and of unequal sides, where that is allowed."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import pytest
from torchvision import models
from torchvision.models import get_model, list_models

from tests.fidelity.served_model import Case
from tests.nets import swin

SLOW = ("mobilenet_v3_small", "resnet18")  # all others are hard
MARKS = {
    "quick": (),
    "slow": (pytest.mark.slow, pytest.mark.timeout(3600)),
    "hard": (pytest.mark.hard, pytest.mark.timeout(3600)),
}
SURVEYED = frozenset({"mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t"})
SMALLEST: dict[str, tuple[int, int]] = {"alexnet": (80, 64), "inception": (96, 80), "maxvit": (224, 224)}
PATCHED: dict[str, int] = {"vit_b_16": 48, "vit_b_32": 96, "vit_h_14": 42, "vit_l_16": 48, "vit_l_32": 96}
OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False},
    **{name: {"image_size": side} for name, side in PATCHED.items()},
}


def torchvision_case(name: str, shape: tuple[int, ...] | None = None, **options: Any) -> Case:
    """An architecture of torchvision; of a vision transformer, the one that takes small images."""
    build = partial(get_model, name, weights=None, **OPTIONS.get(name, {}), **options)
    return Case(f"torchvision:{name}", build, shape or _shape(name), configured=name not in SURVEYED)


def classifiers() -> list[Any]:
    """Parameters for every classification architecture; a small Swin joins in."""
    cases = [parameter(torchvision_case(name), choose_level(name, SLOW)) for name in list_models(module=models)]
    tiny = Case("python:tests.nets:swin", swin, (3, 32, 48))
    return [*cases, parameter(tiny, "quick")]


def choose_level(name: str, slow: Collection[str]) -> str:
    """Which of MARKS a case has."""
    return "slow" if name in slow else "hard"


def parameter(case: Case, level: str) -> Any:
    """A case as a parameter of a test; ``level`` names its marks."""
    return pytest.param(case, id=case.name, marks=MARKS[level])


def _shape(name: str) -> tuple[int, ...]:
    side = PATCHED.get(name)
    return (3, side, side) if side else (3, *SMALLEST.get(name.partition("_")[0], (64, 48)))

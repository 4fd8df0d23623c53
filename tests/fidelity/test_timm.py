"""Models of timm whose structures differ most: what their modules take and return, every call."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import timm

from tests.fidelity.cases import parameter
from tests.fidelity.conftest import Noted
from tests.fidelity.hosting import Case, hosted
from tests.fidelity.reductions import Axes
from tests.service.support import Array

# What is unlike the others: two prefix tokens and two heads; lists of two branches; lists of up to four; windows
# folded into the rows; layers over tokens; patches unfolded into the rows of a convolutional network.
DEFAULT: dict[str, tuple[int, ...]] = {
    "deit_tiny_distilled_patch16_224": (3, 224, 224),
    "crossvit_9_240": (3, 240, 240),
    "hrnet_w18_small": (3, 64, 64),
    "swin_tiny_patch4_window7_224": (3, 224, 224),
    "mixer_s32_224": (3, 224, 224),
    "mobilevit_xxs": (3, 64, 64),
}
SLOW: dict[str, tuple[int, ...]] = {}


def _deit(key: str, array: Array) -> str:
    return "NTC" if key.startswith("blocks.") and array.ndim == 3 else ""


def _swin(key: str, array: Array) -> str:
    """Channels last between blocks; inside attention (N · windows, tokens, C)."""
    if ".attn" in key and array.ndim == 3 and "[mask]" not in key:
        return "NWC"
    return "NHWC" if key.startswith("layers.") and array.ndim == 4 else ""


def _case(name: str, shape: tuple[int, ...]) -> Case:
    return Case(f"timm:{name}", partial(timm.create_model, name, pretrained=False), shape)


PREFIX = 2
POOLED: dict[str, Axes] = {"deit_tiny_distilled_patch16_224": _deit, "swin_tiny_patch4_window7_224": _swin}
CASES = [parameter(_case(name, shape), slow=name in SLOW) for name, shape in (DEFAULT | SLOW).items()]


@pytest.mark.parametrize("case", CASES)
def test_every_tensor(case: Case, tmp_path: Path, noted: Noted) -> None:
    """What comes over HTTP is what hooks with immediate copies saw offline, whatever a model is made of."""
    with hosted(case, tmp_path) as host:
        noted(host.check())
        if axes := POOLED.get(case.name):
            host.check_pools(axes, PREFIX)

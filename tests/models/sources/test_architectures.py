"""Architectures that are tried for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from layertap.models.sources.architectures import find_fit
from layertap.models.weights.checkpoints import StateDict


@pytest.mark.parametrize("error", [ValueError, RuntimeError, NotImplementedError, ImportError])
def test_a_constructor_that_fails(error: type[Exception]) -> None:
    """One that looks at values is built again, with values; where it raises then, it does not fit."""
    devices = []

    def build(args: Mapping[str, Any]) -> nn.Module:
        devices.append(torch.zeros(1).device.type)
        raise NotImplementedError if len(devices) == 1 else error

    assert find_fit("timm:failing", build, StateDict({})) is None
    assert devices == ["meta", "cpu"]

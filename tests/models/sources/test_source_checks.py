"""What is told of a configured model before torch is imported is what the libraries themselves would say."""

from __future__ import annotations

import timm
from torchvision.models import list_models

from layertap.models.sources.grammar import list_architectures


def test_architectures() -> None:
    """The names read from a library's files are those that it registers when it is imported."""
    assert list_architectures("torchvision") == set(list_models())
    assert list_architectures("timm") >= set(timm.list_models())
    assert "vit_base_patch16_224" in list_architectures("timm")
    assert "vit_bas_patch16_224" not in list_architectures("timm")

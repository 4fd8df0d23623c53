"""Attention of a few kinds of transformers' models beside the library's own; the whole table is made by the script."""

from __future__ import annotations

import pytest
import torch

from tests.fidelity.attention_table import examine


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("gpt_oss", "equal"),  # learned sinks
        ("longformer", "not offered"),  # (N, queries, heads, keys of a window)
        ("hiera", "not offered"),  # (N, heads, windows, queries, keys)
        ("led", "not offered"),  # a window's in its encoder, plain in its decoder
        ("wavlm", "another form"),  # the average of heads
    ],
)
@torch.no_grad()
def test_outcome(kind: str, outcome: str) -> None:
    """Equal to the library's eager weights, or not offered where they are no (heads, queries, keys)."""
    found, detail = examine(kind)
    assert found == outcome, detail

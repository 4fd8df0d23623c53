"""Rows of odd pictures equal what each library's own image processor makes; a table of all by ``pictures_table``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fidelity.pictures_table import compare, draw_pictures, list_timm, list_torchvision, list_transformers

EXPECTED = {
    "CLIPImageProcessorPil": "fast path",
    "LevitImageProcessorPil": "library",
    "Molmo2ImageProcessor": "refused",  # a row of patches for each crop, which has three axes too
    "PoolFormerImageProcessorPil": "fast path",
    "PPOCRV5ServerRecImageProcessor": "library",
    "VitMatteImageProcessorPil": "refused",
}


@pytest.mark.slow
def test_some_of_each_outcome() -> None:
    """Processors of transformers that are proven, kept and refused, each on its way, with equal rows."""
    pictures = list(draw_pictures())
    found = {name: compare(how, run, pictures) for name, how, run in list_transformers(EXPECTED)}
    assert found == EXPECTED


@pytest.mark.hard
@pytest.mark.parametrize(
    ("cases", "least"),
    [
        (list_transformers, {"fast path": 27, "library": 54, "refused": 53}),
        (list_timm, {"fast path": 18, "library": 18, "refused": 6}),
        (list_torchvision, {"fast path": 29}),
    ],
    ids=["transformers", "timm", "torchvision"],
)
def test_all(cases: object, least: dict[str, int]) -> None:
    """No processor of any library makes another row than we do, and most are on the path that they were on."""
    pictures = list(draw_pictures())
    found = Counter(compare(how, run, pictures) for _, how, run in cases())
    assert not found["different"]
    assert all(found[outcome] >= count for outcome, count in least.items())

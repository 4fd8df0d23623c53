"""Attributions of changed inputs, against functions whose integrals and drops are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.explanations.perturbations import (
    IntegratedGradients,
    Occlusion,
    Perturbation,
    PerturbationSettings,
    SmoothGrad,
)
from layertap.models.selection.hook_points import Explanation

Array = NDArray[Any]
NCHW = TensorInfo((), (1, 2, 5, 4), "float32", layout="NCHW")
NHWC = TensorInfo((), (1, 5, 4, 2), "float32", layout="NHWC")
ROW = np.random.default_rng(1).standard_normal((1, 2, 5, 4)).astype(np.float32)


def run(
    kind: type[Perturbation],
    measure: Callable[[Array], Array],
    size: int,
    row: Array = ROW,
    info: TensorInfo = NCHW,
    score: float = 0.0,
    **options: Any,
) -> Array:
    """A method for one row, so many changed rows at a time."""
    settings = PerturbationSettings.fill_in(Explanation((), **options), row.shape, info.layout or "")
    made, count = kind(row, info, settings, score), kind.count(settings, row.shape, info.layout or "")
    for start in range(0, count, size):
        numbers = range(start, min(start + size, count))
        rows = made.make_rows(numbers)
        assert (len(rows), rows.dtype) == (len(numbers), np.float32)
        made.add(numbers, measure(rows))
    return made.finish()


@pytest.mark.parametrize("size", [1, 3, 100])
def test_integrated_gradients(size: int) -> None:
    """Of the sum of cubes: the cube of each entry, exactly, however many rows go at once."""
    found = run(IntegratedGradients, lambda rows: 3 * rows.astype(np.float64) ** 2, size, steps=5)
    np.testing.assert_allclose(found, ROW.astype(np.float64) ** 3, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_smoothgrad(size: int) -> None:
    """Of a constant gradient that gradient; else the mean over samples of a deviation that is a share of the range."""
    slope = np.arange(40, dtype=np.float32).reshape(1, 2, 5, 4)
    found = run(SmoothGrad, lambda rows: np.repeat(slope, len(rows), 0), size, samples=7)
    np.testing.assert_allclose(found, slope)
    mean = run(SmoothGrad, lambda rows: rows, size, samples=400, noise=0.5, seed=3)
    deviation = (mean - ROW).std() * 20 / (ROW.max() - ROW.min())
    assert deviation == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("info", [NCHW, NHWC])
def test_occlusion(size: int, info: TensorInfo) -> None:
    """Of the sum of all: each pixel's mean over its windows of what they cover, written out."""
    row = ROW if info is NCHW else np.ascontiguousarray(np.moveaxis(ROW, 1, -1))
    found = run(
        Occlusion,
        lambda rows: rows.reshape(len(rows), -1).sum(1),
        size,
        row,
        info,
        float(ROW.sum()),
        window=2,
        stride=2,
    )
    pixels, starts = ROW[0].sum(0), [0, 0, 2, 2, 4]
    wanted = [[pixels[top : top + 2, left : left + 2].sum() for left in starts[:4]] for top in starts]
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5)


def test_pixels_that_no_window_covers_are_zero() -> None:
    """A stride wider than the window leaves gaps."""
    found = run(Occlusion, lambda rows: np.zeros(len(rows)), 10, score=1.0, window=1, stride=3)
    assert found[0].tolist() == [[1, 0, 0, 1], [0] * 4, [0] * 4, [1, 0, 0, 1], [0] * 4]


def test_what_is_chosen_where_nothing_is_said() -> None:
    """A window is an eighth of the shorter side, at least a pixel, the stride half of it."""
    shape = (1, 3, 224, 320)
    chosen = PerturbationSettings.fill_in(Explanation(()), shape, "NCHW")
    assert chosen.format(Occlusion.options) == "window 28 stride 14"
    assert (
        PerturbationSettings.fill_in(Explanation(()), (1, 3, 4, 4), "NCHW").format(Occlusion.options)
        == "window 1 stride 1"
    )
    assert Occlusion.count(chosen, shape, "NCHW") == 15 * 22
    assert chosen.format(IntegratedGradients.options) == "steps 50"
    assert chosen.format(SmoothGrad.options) == "samples 25 noise 0.15 seed 0"

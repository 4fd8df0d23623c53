"""The colours of numbers: even in lightness, the same on both sides of zero, and told apart by the colour-blind."""

from __future__ import annotations

import numpy as np

from layertap.service.pictures.colormaps import DIVERGING, NOT_FINITE, SEQUENTIAL, Colors, Scale, find_scale


def to_linear(colors: Colors) -> np.ndarray:
    """SRGB as light, by IEC 61966-2-1."""
    encoded = colors / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def measure_lightness(colors: Colors) -> np.ndarray:
    """CIE L*, 0 to 100."""
    luminance = to_linear(colors) @ [0.2126, 0.7152, 0.0722]
    return np.where(luminance > 0.008856, 116 * np.cbrt(luminance) - 16, 903.3 * luminance)


def test_more_is_lighter() -> None:
    """Each step of the map for amounts is lighter than the one before, and no step is much larger than others."""
    steps = np.diff(measure_lightness(SEQUENTIAL))
    assert steps.min() > 0
    assert steps.max() < 4 * steps.mean()
    assert np.ptp(measure_lightness(SEQUENTIAL)) > 80


def test_zero_is_in_the_middle() -> None:
    """The map around zero is lightest there, without a colour, and as dark at equal distances on both sides."""
    lightness = measure_lightness(DIVERGING)
    middle = len(DIVERGING) // 2
    assert lightness.argmax() == middle
    assert np.ptp(DIVERGING[middle].astype(int)) <= 2
    assert np.abs(lightness - lightness[::-1]).max() < 6
    assert np.diff(lightness[: middle + 1]).min() > 0


def test_scale_of_amounts() -> None:
    """Where nothing is below zero, the least number has the first colour and the greatest the last."""
    values = np.array([[2.0, 4.0], [3.0, np.nan]])
    scale = find_scale(values)
    assert scale == Scale(2.0, 4.0, diverging=False)
    colors = scale.to_colors(values)
    assert [tuple(color) for color in colors.reshape(-1, 3)] == [
        tuple(SEQUENTIAL[0]),
        tuple(SEQUENTIAL[-1]),
        tuple(SEQUENTIAL[len(SEQUENTIAL) // 2]),
        NOT_FINITE,
    ]


def test_scale_around_zero() -> None:
    """Where something is below zero, or values have a sign by nature, zero has the middle colour."""
    values = np.array([-1.0, 0.0, 3.0, -np.inf])
    scale = find_scale(values)
    assert scale == Scale(-3.0, 3.0, diverging=True)
    assert tuple(scale.to_colors(values)[1]) == tuple(DIVERGING[len(DIVERGING) // 2])
    assert tuple(scale.to_colors(values)[3]) == NOT_FINITE
    assert find_scale(np.array([1.0, 2.0]), signed=True) == Scale(-2.0, 2.0, diverging=True)

"""Explanations that run a model on perturbed inputs: they make the rows and add up the results; numpy only.

An object explains one row, a float array (1, …) in the model's own layout. It makes perturbed rows by number, any few
at a time, takes the model's results, and keeps one sum in float64: memory does not grow with the number of rows.
``measures``: a gradient, shaped like the row, or a score for each perturbed row. ``options``: the settings it uses;
``counted``: the one that says how many perturbed rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from layertap.models.catalog.catalog import TensorInfo
from layertap.models.explanations.maps import move_channels_first, weigh_by_scores
from layertap.models.plan.requested import Explanation

Array = NDArray[Any]
BLURS_ACROSS = 20  # a blur's deviation is the shorter side divided by this
WINDOWS_ACROSS = 8  # the default window is the shorter side divided by this, the default stride half of that


@dataclass(frozen=True)
class PerturbationSettings:
    """The options of an explanation, with defaults filled in."""

    steps: int
    samples: int
    noise: float
    seed: int
    window: int
    stride: int
    windows: int  # that cover a row
    baseline: float | Literal["blur", "input"] | None
    channels: int = 0  # of the ablated layer, 0 without one
    reference: Array | None = None  # the row of another input, (1, …), if ``baseline`` is "input"

    @classmethod
    def fill_in(
        cls, asked: Explanation, shape: Sequence[int], layout: str, channels: int = 0, reference: Array | None = None
    ) -> PerturbationSettings:
        """The settings that a request asks for, with defaults for rows of a shape."""
        window = asked.window if asked.window is not None else max(min(_find_sides(shape, layout)) // WINDOWS_ACROSS, 1)
        stride = asked.stride if asked.stride is not None else max(window // 2, 1)
        return cls(
            steps=50 if asked.steps is None else asked.steps,
            samples=25 if asked.samples is None else asked.samples,
            noise=0.15 if asked.noise is None else asked.noise,
            seed=0 if asked.seed is None else asked.seed,
            window=window,
            stride=stride,
            windows=prod(_count_windows(side, window, stride) for side in _find_sides(shape, layout)),
            baseline=asked.baseline or None,  # None: zeros
            channels=channels,
            reference=reference,
        )

    def count(self, perturbation: type[Perturbation]) -> int:
        """How many perturbed rows there are."""
        count: int = getattr(self, perturbation.counted)
        return count

    def format(self, options: Sequence[str]) -> str:
        """Some settings as text: ``window 28 stride 14``; those that are None are left out."""
        chosen = {name: getattr(self, name) for name in options}
        return " ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)


class IntegratedGradients:
    """The mean gradient on the straight line from a baseline, times the difference; its sum is the score's change.

    Sundararajan et al., "Axiomatic attribution for deep networks", 2017, equation 1, by Gauss-Legendre quadrature.
    """

    measures, counted, options = "gradient", "steps", ("steps", "baseline")

    def __init__(self, row: Array, info: TensorInfo, settings: PerturbationSettings, score: float) -> None:
        self._shares, self._weights = _find_nodes(settings.steps)
        self._baseline = make_baseline(row, info.layout or "", settings)
        self._change = row.astype(np.float64) - self._baseline
        self._mean = np.zeros_like(self._change)

    def make_rows(self, numbers: range) -> Array:
        """Points on the line from the baseline to the row."""
        shares = _broadcast_over_rows(self._shares[list(numbers)], self._change)
        return (self._baseline + shares * self._change).astype(np.float32)

    def add(self, numbers: range, measured: Array) -> None:
        """Add the model's results for these rows."""
        weights = _broadcast_over_rows(self._weights[list(numbers)], self._change)
        self._mean += (weights * measured).sum(0, keepdims=True)

    def finish(self) -> Array:
        """The mean gradient times the row's difference from the baseline."""
        result: Array = self._mean * self._change
        return result


class SmoothGrad:
    """The mean gradient over noisy copies of the input; the noise's deviation is a share of the input's range.

    Smilkov et al., "SmoothGrad", 2017. Sample k adds ``numpy.random.default_rng([seed, k]).standard_normal``, which
    does not depend on how samples are batched.
    """

    measures, counted, options = "gradient", "samples", ("samples", "noise", "seed")

    def __init__(self, row: Array, info: TensorInfo, settings: PerturbationSettings, score: float) -> None:
        self._row, self._samples, self._seed = row, settings.samples, settings.seed
        self._deviation = settings.noise * float(np.ptp(row))
        self._total = np.zeros(row.shape, np.float64)

    def make_rows(self, numbers: range) -> Array:
        """The row with noise."""
        noise = [np.random.default_rng([self._seed, number]).standard_normal(self._row.shape) for number in numbers]
        return (self._row + self._deviation * np.concatenate(noise)).astype(np.float32)

    def add(self, numbers: range, measured: Array) -> None:
        """Add the model's results for these rows."""
        self._total += measured.sum(0, dtype=np.float64, keepdims=True)

    def finish(self) -> Array:
        """The mean gradient."""
        result: Array = self._total / self._samples
        return result


class Occlusion:
    """How far the score drops if a baseline covers a window of the input; the mean over the windows on each pixel.

    Zeiler and Fergus, "Visualizing and understanding convolutional networks", 2014, section 4.2. Windows begin at
    multiples of the stride, until one reaches the edge, where it is cut. The result is (1, H, W).
    """

    measures, counted, options = "score", "windows", ("window", "stride", "baseline")

    def __init__(self, row: Array, info: TensorInfo, settings: PerturbationSettings, score: float) -> None:
        self._row, self._layout, self._score = row, info.layout or "", score
        self._window, self._stride = settings.window, settings.stride
        self._baseline = make_baseline(row, self._layout, settings)[0]
        height, width = _find_sides(row.shape, self._layout)
        self._across = _count_windows(width, self._window, self._stride)
        self._total, self._covered = np.zeros((1, height, width)), np.zeros((1, height, width))

    def make_rows(self, numbers: range) -> Array:
        """The row with a window of the baseline."""
        rows = np.repeat(self._row.astype(np.float32), len(numbers), 0)
        for row, number in zip(rows, numbers, strict=True):
            slices = dict(zip("HW", self._find_window(number), strict=True))
            window = tuple(slices.get(letter, slice(None)) for letter in self._layout if letter != "N")
            row[window] = self._baseline[window]
        return rows

    def add(self, numbers: range, measured: Array) -> None:
        """Add the model's results for these rows."""
        for number, score in zip(numbers, measured, strict=True):
            window = (0, *self._find_window(number))
            self._total[window] += self._score - float(score)
            self._covered[window] += 1

    def finish(self) -> Array:
        """The mean drop at each pixel, (1, H, W)."""
        result: Array = np.divide(self._total, self._covered, out=np.zeros_like(self._total), where=self._covered > 0)
        return result

    def _find_window(self, number: int) -> tuple[slice, slice]:
        top, left = (index * self._stride for index in divmod(number, self._across))
        return slice(top, top + self._window), slice(left, left + self._window)


class AblationCam:
    """ReLU of a layer's channels, each weighted by the score's relative drop if the channel is set to 0.

    Ramaswamy et al., "Ablation-CAM", 2020, equations 1 and 2. Row k is the row itself, run without channel k of the
    layer; ``layer``: the layer's output for the row, and its description. The result is (1, H, W) in its pixels.
    """

    measures, counted, options = "score", "channels", ()

    def __init__(
        self,
        row: Array,
        info: TensorInfo,
        settings: PerturbationSettings,
        score: float,
        layer: tuple[Array, TensorInfo],
    ) -> None:
        self._row, self._layout, self._score, self._layer = row, info.layout or "", score, layer
        self._measured = np.zeros(settings.channels)

    def make_rows(self, numbers: range) -> Array:
        """The row, repeated."""
        return np.repeat(self._row.astype(np.float32), len(numbers), 0)

    def add(self, numbers: range, measured: Array) -> None:
        """Add the model's results for these rows."""
        if self._score:
            self._measured[list(numbers)] = (self._score - measured) / self._score

    def finish(self) -> Array:
        """The weighted sum of the layer's channels."""
        return weigh_by_scores(self._layer[0], self._measured, self._layer[1])


class ScoreCam(AblationCam):
    """ReLU of a layer's channels, each weighted by the softmax of the scores of the row that it masks.

    Wang et al., "Score-CAM", 2020, algorithm 1. Row k is the row times channel k, which is enlarged bilinearly with
    aligned corners and then scaled to 0…1, as in pytorch-grad-cam. Otherwise as ``AblationCam``.
    """

    def make_rows(self, numbers: range) -> Array:
        """The row, masked by one channel after the other."""
        maps = move_channels_first(self._layer[0].astype(np.float32), self._layer[1])[0, list(numbers)]
        sides = _find_sides(self._row.shape, self._layout)
        down, across = map(_make_enlargement, maps.shape[1:], sides)
        masks = (down @ maps @ across.T).astype(np.float32)
        low, high = masks.min((1, 2), keepdims=True), masks.max((1, 2), keepdims=True)
        shape = [dict(zip("HW", sides, strict=True)).get(letter, 1) for letter in self._layout[1:]]
        rows: Array = self._row * ((masks - low) / (high - low + 1e-8)).reshape(-1, *shape)
        return rows.astype(np.float32)

    def add(self, numbers: range, measured: Array) -> None:
        """Add the model's results for these rows."""
        self._measured[list(numbers)] = measured

    def finish(self) -> Array:
        """The weighted sum of the layer's channels."""
        powers = np.exp(self._measured - self._measured.max())
        return weigh_by_scores(self._layer[0], powers / powers.sum(), self._layer[1])


Perturbation = IntegratedGradients | SmoothGrad | Occlusion | AblationCam


def make_baseline(row: Array, layout: str, settings: PerturbationSettings) -> Array:
    """The baseline of a row, (1, …), float64: zeros, one value, another row, or the row blurred by a Gaussian.

    The Gaussian's deviation is a twentieth of the shorter side; it is mirrored at the edges.
    """
    if settings.reference is not None:
        return settings.reference.astype(np.float64)
    if not isinstance(settings.baseline, str):
        return np.full(row.shape, settings.baseline or 0.0, np.float64)
    blurred = row.astype(np.float64)
    deviation = min(_find_sides(row.shape, layout)) / BLURS_ACROSS
    for axis in (layout.index("H"), layout.index("W")):
        blurred = np.moveaxis(np.tensordot(_make_blur(row.shape[axis], deviation), blurred, (1, axis)), 0, axis)
    return blurred


def _make_blur(side: int, deviation: float) -> Array:
    """A Gaussian over one axis as a matrix, (side, side)."""
    reach = ceil(3 * deviation)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    mirrored = np.lib.stride_tricks.sliding_window_view(np.pad(np.arange(side), reach, "reflect"), len(weights))
    blur = np.zeros((side, side))
    np.add.at(blur, (np.arange(side)[:, None], mirrored), weights / weights.sum())
    return blur


def _make_enlargement(size: int, side: int) -> Array:
    """Bilinear resizing of one axis with aligned corners, as a matrix (side, size)."""
    weights: Array = np.maximum(1 - np.abs(np.linspace(0, size - 1, side)[:, None] - np.arange(size)), 0.0)
    return weights


@lru_cache(maxsize=32)
def _find_nodes(steps: int) -> tuple[Array, Array]:
    """Gauss-Legendre nodes between 0 and 1 and their weights; cached, as hundreds of steps take long."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    return (nodes + 1) / 2, weights / 2  # from (-1, 1)


def _broadcast_over_rows(numbers: Array, row: Array) -> Array:
    """Reshape a number for each row so that it multiplies the rows."""
    return numbers.reshape(-1, *(1,) * (row.ndim - 1))


def _find_sides(shape: Sequence[int], layout: str) -> tuple[int, int]:
    return shape[layout.index("H")], shape[layout.index("W")]


def _count_windows(side: int, window: int, stride: int) -> int:
    return max(ceil((side - window) / stride), 0) + 1

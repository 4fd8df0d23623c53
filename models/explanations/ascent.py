"""Steps of gradient ascent on rows of a model's input, on the host, by torch's own optimisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from layertap.models.inputs.preprocess import find_pixel_range
from layertap.models.plan.requested import Optimisation, StepRule
from layertap.models.spec import PreprocessSpec

# What a step goes along, by the slope; "scaled" as in DeepDream (Mordvintsev et al., 2015).
DIRECTIONS: Mapping[StepRule, Callable[[Tensor], Tensor]] = {
    "sgd": lambda slope: slope,
    "adam": lambda slope: slope,
    "sign": torch.sign,
    "scaled": lambda slope: slope / slope.abs().mean().clamp_min(torch.finfo(slope.dtype).tiny),
}


class Ascent:
    """Rows (1, …) of a request, each on its own way from its start.

    All is float32. ``axes``: height and width. ``spec``: how pixels become rows, if the settings are for pixels from 0
    to 1.
    """

    def __init__(
        self, starts: Sequence[Tensor], asked: Optimisation, axes: tuple[int, ...], spec: PreprocessSpec | None
    ) -> None:
        self._asked, self._axes, self._done = asked, axes, 0
        self._low, high = find_pixel_range(spec) if spec is not None else (torch.zeros(()), torch.ones(()))
        self._span = high - self._low
        self._starts = [(row.cpu().float() - self._low) / self._span for row in starts]
        self._values = [row.clone().requires_grad_() for row in self._starts]
        make = torch.optim.Adam if asked.rule == "adam" else torch.optim.SGD
        self._optimizer = make(self._values, lr=asked.learning_rate)

    def list_rows(self) -> list[Tensor]:
        """The rows as they are now, in the model's scale; copies."""
        return [value.detach() * self._span + self._low for value in self._values]

    def roll_rows(self) -> list[Tensor]:
        """The rows to differentiate at: rolled by the jitter, until the last step is done."""
        rows = self.list_rows()
        return [row.roll(self._shift, self._axes) for row in rows] if self._asked.jitter else rows

    def move(self, gradients: Sequence[Tensor]) -> None:
        """Take a step by the objective's gradients at ``roll_rows``."""
        asked, sign = self._asked, 1.0 if self._asked.minimise else -1.0
        for value, gradient in zip(self._values, gradients, strict=True):
            slope = gradient.roll([-each for each in self._shift], self._axes) if asked.jitter else gradient
            slope = sign * self._span * slope + 2 * asked.l2 * value.detach()
            if asked.total_variation:
                variation = torch.stack([value.diff(dim=axis).abs().sum() for axis in self._axes]).sum()
                slope = slope + asked.total_variation * torch.autograd.grad(variation, value)[0]
            value.grad = DIRECTIONS[asked.rule](slope)
        self._optimizer.step()
        for value, start in zip(self._values, self._starts, strict=True):
            if asked.epsilon is not None:
                value.data.clamp_(start - asked.epsilon, start + asked.epsilon)
            if asked.clamp is not None:
                value.data.clamp_(*asked.clamp)
        self._done += 1

    @property
    def _shift(self) -> tuple[int, int]:
        """How far the next step's rows are rolled, down and right."""
        reach = self._asked.jitter if self._done < self._asked.steps else 0
        down, right = np.random.default_rng([self._asked.seed, self._done]).integers(-reach, reach + 1, 2)
        return int(down), int(right)

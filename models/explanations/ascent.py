"""Steps of gradient ascent on rows of a model's input, on the host; torch's own optimisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from layertap.models.plan.requested import Optimisation, StepRule

PixelRange = tuple[Tensor, Tensor]  # what pixels of 0 and 255 become, (channels, 1, 1) each

# What an optimiser steps along, by the gradient; "scaled" as in DeepDream (Mordvintsev et al., 2015).
DIRECTIONS: Mapping[StepRule, Callable[[Tensor], Tensor]] = {
    "sgd": lambda slope: slope,
    "adam": lambda slope: slope,
    "sign": torch.sign,
    "scaled": lambda slope: slope / slope.abs().mean().clamp_min(torch.finfo(slope.dtype).tiny),
}


class Ascent:
    """The rows of a request, each (1, …), on their way from ``starts``; each row moves as if alone.

    ``axes``: height and width, empty without. ``pixel_range``: numbers of the settings are for pixels from 0 to 1,
    which are scaled to it. ``number`` counts the steps so far.
    """

    def __init__(
        self, starts: Sequence[Tensor], asked: Optimisation, axes: tuple[int, ...], pixel_range: PixelRange | None
    ) -> None:
        low, high = pixel_range or (torch.zeros(()), torch.ones(()))
        self._asked, self._axes, self._low, self._span = asked, axes, low, high - low
        self._dtypes = [row.dtype for row in starts]
        self._starts = [(row.to(torch.promote_types(row.dtype, torch.float32)) - low) / self._span for row in starts]
        self._values = [row.clone().requires_grad_() for row in self._starts]
        make = torch.optim.Adam if asked.rule == "adam" else torch.optim.SGD
        self._optimizer = make(self._values, lr=asked.learning_rate)
        self.number = 0

    def list_rows(self) -> list[Tensor]:
        """The rows in the model's scale; copies."""
        values = zip(self._values, self._dtypes, strict=True)
        return [(value.detach() * self._span + self._low).to(dtype) for value, dtype in values]

    def make_rows(self) -> list[Tensor]:
        """The rows to differentiate at: rolled by the jitter, unless no step is left."""
        return [row.roll(self._shift, self._axes) if self._asked.jitter else row for row in self.list_rows()]

    def move(self, gradients: Sequence[Tensor]) -> None:
        """Take a step along the gradients at ``make_rows``."""
        back, sign = tuple(-each for each in self._shift), 1.0 if self._asked.minimise else -1.0
        for value, gradient in zip(self._values, gradients, strict=True):
            slope = gradient.roll(back, self._axes) if self._asked.jitter else gradient
            slope = sign * self._span * slope.to(value.dtype) + self._differentiate_penalties(value)
            value.grad = DIRECTIONS[self._asked.rule](slope)
        self._optimizer.step()
        for value, start in zip(self._values, self._starts, strict=True):
            if self._asked.epsilon is not None:
                value.data.clamp_(start - self._asked.epsilon, start + self._asked.epsilon)
            if self._asked.clamp is not None:
                value.data.clamp_(*self._asked.clamp)
        self.number += 1

    @property
    def _shift(self) -> tuple[int, ...]:
        """How far the next step's rows are rolled, down and right."""
        reach = self._asked.jitter if self.number < self._asked.steps else 0
        drawn = np.random.default_rng([self._asked.seed, self.number]).integers(-reach, reach + 1, len(self._axes))
        return tuple(drawn.tolist())

    def _differentiate_penalties(self, value: Tensor) -> Tensor | float:
        """The gradient of what is subtracted from the objective: weighted total variation and squares."""
        slope: Tensor | float = 2 * self._asked.l2 * value.detach()
        if self._asked.total_variation:
            variation = torch.stack([value.diff(dim=axis).abs().sum() for axis in self._axes]).sum()
            slope = slope + self._asked.total_variation * torch.autograd.grad(variation, value)[0]
        return slope

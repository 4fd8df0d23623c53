"""Rows of noise, by which a model is surveyed, measured, compared and probed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layertap.models.devices.dtypes import DTYPES
from layertap.models.inputs.examples import find_example
from layertap.models.spec import InputSpec

ROWS, PLACE = 3, 1  # of a batch of noise: how many rows it has, and which of them is the quiet one
LOUD = 3.0  # how much larger its neighbours are: a batch's largest value is then seldom the quiet row's


def make_noise(
    inputs: Sequence[InputSpec], device: torch.device, dtype: torch.dtype, rows: int = ROWS
) -> dict[str, Tensor]:
    """So many rows of each input, of its example or by a fixed seed, those beside PLACE larger; floats in ``dtype``."""
    generator = torch.Generator().manual_seed(0)

    def draw(spec: InputSpec) -> Tensor:
        shape, example = (rows, *spec.shape), find_example(spec)
        if example is not None:
            chosen = example[torch.arange(rows) % len(example)]
            return chosen.to(device, dtype if chosen.is_floating_point() else chosen.dtype)
        if not DTYPES[spec.dtype].is_floating_point:
            return torch.randint(*(spec.values or (0, 2)), shape, generator=generator).to(device, DTYPES[spec.dtype])
        values = torch.randn(shape, generator=generator)
        values[:PLACE] *= LOUD
        values[PLACE + 1 :] *= LOUD
        return values.to(device, dtype)

    return {spec.name: draw(spec) for spec in inputs}


def make_noise_row(inputs: Sequence[InputSpec], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The first of these rows alone, a batch of one."""
    return {name: value[:1] for name, value in make_noise(inputs, device, dtype).items()}


def copy_row(rows: Mapping[str, Tensor], place: int = PLACE) -> dict[str, Tensor]:
    """A row alone, in memory of its own: a model may write to its input."""
    return {name: value[place : place + 1].clone() for name, value in rows.items()}

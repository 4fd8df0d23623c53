"""How texts go on, as an input of models that generate, beside those of the text.

A forward with it is the whole loop, so it has another shape of row, and thereby its own catalogs and batches.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from layertap.models.spec import MAX_STOP, Generation, InputSpec

GENERATE = "generate"  # the input's name; of a row (1, steps, WIDTH), every step the same
WIDTH = 4 + MAX_STOP
FEW_STEPS = 3  # of a surveyed generation: that of the text, and two of one token each


def make_spec(steps: int) -> InputSpec:
    """The input of so many steps; noise, which is 0, takes the likeliest tokens and never stops."""
    return InputSpec(GENERATE, (1, steps, WIDTH), "int64", values=(0, 1))


def make_rows(generation: Generation, numbers: Iterable[int]) -> Tensor:
    """The input, int64, for the rows of these numbers."""
    floats = torch.tensor([generation.temperature, generation.top_p], dtype=torch.float64).view(torch.int64).tolist()
    stop = [token + 1 for token in generation.stop or ()]
    options = [*floats, generation.top_k, *stop, *[0] * (MAX_STOP - len(stop))]
    rows = torch.tensor([[generation.seed + number, *options] for number in numbers])
    return rows[:, None, None].repeat(1, 1, generation.steps, 1)


def read_row(row: Tensor) -> Generation:
    """The generation of one row of ``make_rows``, whose seed is the row's own."""
    seed, temperature, top_p, top_k, *stop = row[0, 0].tolist()
    floats = torch.tensor([temperature, top_p]).view(torch.float64).tolist()
    return Generation(row.shape[1], floats[0], top_k, floats[1], seed, tuple(each - 1 for each in stop if each))

"""Rows of noise, or of a configured example file, for surveying, measuring, comparing and probing a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layertap.models.devices.devices import DTYPES
from layertap.models.errors import LoadError, escape
from layertap.models.spec import PADDING_MASK, InputSpec

ROWS, QUIET = 3, 1  # rows in a batch of noise, and the index of the quiet one
LOUD = 3.0  # scale of the other rows, so that a batch's largest value is rarely in the quiet row
LOUDER, QUIETER = 1e3, 1e-3  # scales of other neighbours
MAX_CACHED = 64
HINT = 'write it with numpy.savez, or {"NAME": [numbers]} as .json, with one row or several of each input'


def make_noise(
    inputs: Sequence[InputSpec], device: torch.device, dtype: torch.dtype, rows: int = ROWS
) -> dict[str, Tensor]:
    """Rows of each input, from its example or a fixed seed, all but QUIET scaled by LOUD; floats in ``dtype``."""
    generator = torch.Generator().manual_seed(0)

    def draw(spec: InputSpec) -> Tensor:
        shape, example = (rows, *spec.shape), find_example(spec)
        if example is not None:
            chosen = example[torch.arange(rows) % len(example)]
            if len(example) == 1:  # beside copies of itself a row proves nothing
                chosen = torch.stack([row if index == QUIET else row.flip(-1) for index, row in enumerate(chosen)])
            return chosen.to(device, dtype if chosen.is_floating_point() else chosen.dtype)
        if not DTYPES[spec.dtype].is_floating_point:
            drawn = torch.randint(*(spec.values or (0, 2)), shape, generator=generator)
            if spec.is_mask and spec.values is None:  # of a row that is all padding, attention makes NaN
                drawn[:, :1] = int(not spec.name.endswith(PADDING_MASK))
            return drawn.to(device, DTYPES[spec.dtype])
        values = torch.randn(shape, generator=generator)
        values[:QUIET] *= LOUD
        values[QUIET + 1 :] *= LOUD
        return values.to(device, dtype)

    return {spec.name: draw(spec) for spec in inputs}


def replace_neighbours(
    rows: Mapping[str, Tensor], inputs: Sequence[InputSpec], *, scaled: bool = True
) -> dict[str, Tensor]:
    """The same quiet row between others: permuted ones, one loud and half empty, one faint (``scaled``)."""

    def change(spec: InputSpec, value: Tensor) -> Tensor:
        entries = value.reshape(len(value), prod(value.shape[1:]))
        changed = entries.flip(-1).roll(1, -1)
        if not value.is_floating_point():
            changed[:QUIET, entries.shape[1] // 2 :] = spec.values[0] if spec.values else 0
        elif scaled:
            changed[:QUIET] *= LOUDER
            changed[:QUIET, entries.shape[1] // 2 :] = 0
            changed[QUIET + 1 :] *= QUIETER
        changed[QUIET] = entries[QUIET]
        return changed.reshape(value.shape)

    return {spec.name: change(spec, rows[spec.name]) for spec in inputs}


def make_noise_row(inputs: Sequence[InputSpec], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The first row of ``make_noise``, a batch of one."""
    return {name: value[:1] for name, value in make_noise(inputs, device, dtype).items()}


def copy_row(rows: Mapping[str, Tensor], index: int = QUIET) -> dict[str, Tensor]:
    """A copy of one row: a model may write to its input."""
    return {name: value[index : index + 1].clone() for name, value in rows.items()}


def copy_rows(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of all rows."""
    return {name: value.clone() for name, value in rows.items()}


def find_example(spec: InputSpec) -> Tensor | None:
    """The rows of an input's example, (rows, *shape); None if it has none of this shape, LoadError if unreadable."""
    if spec.example is None:
        return None
    rows = torch.from_numpy(_read_file(spec.example, spec.name)).to(DTYPES[spec.dtype])
    rows = rows[None] if rows.ndim == len(spec.shape) else rows
    return rows if rows.shape[1:] == spec.shape and len(rows) else None


def check_examples(inputs: tuple[InputSpec, ...]) -> None:
    """LoadError if an example can't be read, or does not have the configured shape."""
    _read_file.cache_clear()  # the file may have changed
    for spec in inputs:
        if spec.example is not None and find_example(spec) is None:
            name, shape = escape(Path(spec.example).name), list(spec.shape)
            raise LoadError(f"example {name} has no rows of shape {shape} for input {escape(spec.name)}", hint=HINT)


@lru_cache(MAX_CACHED)
def _read_file(path: str, name: str) -> np.ndarray[Any, Any]:
    """An input's array; nothing is unpickled."""
    file = Path(path)
    try:
        if file.suffix == ".npz":
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
                array: np.ndarray[Any, Any] = archive[name]
        else:
            array = np.asarray(json.loads(file.read_text("utf-8"))[name])
        if array.dtype.kind not in "biuf":
            raise ValueError("no numbers")
    except Exception as error:  # a truncated file may raise anything
        detail = f"example {escape(file.name)} can't be read for input {escape(name)}"
        raise LoadError(detail, hint=HINT) from error
    return array

"""Example rows of an input, from a file that the configuration names: values that a model's forward needs."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layertap.models.devices.dtypes import DTYPES
from layertap.models.errors import LoadError, escape
from layertap.models.spec import InputSpec

MAX_CACHED = 64
HINT = 'write it with numpy.savez, or {"NAME": [numbers]} as .json, with one row or several of each input'


def find_example(spec: InputSpec) -> Tensor | None:
    """The rows of an input's example, (rows, *shape); None where it has none of this shape, LoadError as below."""
    if spec.example is None:
        return None
    rows = torch.from_numpy(_read_file(spec.example, spec.name)).to(DTYPES[spec.dtype])
    rows = rows[None] if rows.ndim == len(spec.shape) else rows
    return rows if rows.shape[1:] == spec.shape and len(rows) else None


def check_examples(inputs: tuple[InputSpec, ...]) -> None:
    """LoadError where an example can't be read, or has not the configured shape."""
    _read_file.cache_clear()  # the file may be another by now
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
    except Exception as error:  # a file that is cut raises anything
        detail = f"example {escape(file.name)} can't be read for input {escape(name)}"
        raise LoadError(detail, hint=HINT) from error
    return array

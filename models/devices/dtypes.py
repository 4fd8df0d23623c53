"""Dtypes by their names."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


EVERY = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
FLOATS = ("float32", "float16", "bfloat16", "float64")
# Those that rows are sent in, and that replies carry.
DTYPES = {name: EVERY[name] for name in (*FLOATS, "int8", "int16", "int32", "int64", "uint8", "bool")}

# By precision, of a tensor's largest number: what kernels, sizes of batches and padding move at most.
TOLERANCE = {"float32": 1e-4, "tf32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}

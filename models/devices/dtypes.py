"""Dtypes by their names."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}

# By precision, of a tensor's largest number: what kernels, sizes of batches and padding move at most.
TOLERANCE = {"float32": 1e-4, "tf32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}

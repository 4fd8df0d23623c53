"""A digest of the weights that a module holds."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn


def digest_weights(module: nn.Module) -> str:
    """SHA-256, in hex, of all parameters and buffers: name, dtype, shape and little-endian bytes of each, by name.

    Equal on every machine for equal weights, whatever device they are on and however they came there.
    """
    hasher = hashlib.sha256()
    # Buffers that are not persistent are no part of the state dict, but of what the model computes.
    tensors = {**module.state_dict(), **dict(module.named_buffers(remove_duplicate=False))}
    for name, value in sorted(tensors.items()):
        # A module's extra state may be any object, and only tensors have bytes that are the same everywhere.
        if isinstance(value, Tensor):
            header = [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            hasher.update(json.dumps(header).encode())
            hasher.update(view_bytes(value).cpu().numpy().data)
    return hasher.hexdigest()


def view_bytes(value: Tensor) -> Tensor:
    """The bytes of a tensor's values in their order, (bytes,), uint8, on its device; a view where that is possible."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)

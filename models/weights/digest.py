"""A digest of the weights that a module holds."""

from __future__ import annotations

import hashlib
import json

from torch import Tensor, nn

from layertap.models.plain_tensor import view_bytes


def digest_weights(module: nn.Module, *, saved_only: bool = False) -> str:
    """SHA-256, in hex, of all parameters and buffers: name, dtype, shape and little-endian bytes of each, by name.

    Equal on every machine for equal weights, whatever device they are on and however they came there. ``saved_only``:
    without buffers that a checkpoint does not hold. They are no part of the state dict, but of what own code computes;
    those of a library follow from its architecture, and come and go with its versions.
    """
    hasher = hashlib.sha256()
    made = {} if saved_only else dict(module.named_buffers(remove_duplicate=False))
    tensors = {**module.state_dict(), **made}
    for name, value in sorted(tensors.items()):
        # A module's extra state may be any object, and only tensors have bytes that are the same everywhere.
        if isinstance(value, Tensor):
            header = [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            hasher.update(json.dumps(header).encode())
            hasher.update(view_bytes(value).cpu().numpy().data)
    return hasher.hexdigest()

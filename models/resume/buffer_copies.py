"""A module's buffers as they were before a trial, put back after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layertap.models.plain_tensor import view_bytes


@dataclass(frozen=True)
class BufferCopies:
    """A module's own buffers as they were, and copies of their numbers."""

    module: nn.Module
    buffers: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]

    @classmethod
    def from_module(cls, module: nn.Module) -> BufferCopies:
        """Those that a module has now."""
        buffers = dict(module.named_buffers(recurse=False))
        return cls(module, buffers, {name: buffer.clone() for name, buffer in buffers.items()})

    def restore(self) -> bool:
        """Put back what a forward wrote to, replaced or added; whether it did anything of that."""
        now = dict(self.module.named_buffers(recurse=False))
        if now.keys() == self.buffers.keys() and all(_is_equal(now[name], copy) for name, copy in self.copies.items()):
            return False
        for name in now.keys() - self.buffers.keys():
            self.module._buffers[name] = None
        for name, buffer in self.buffers.items():
            buffer.copy_(self.copies[name])
            self.module._buffers[name] = buffer
        return True


def _is_equal(one: Tensor, other: Tensor) -> bool:
    # Bytes: NaN does not equal itself.
    return one.shape == other.shape and torch.equal(view_bytes(one), view_bytes(other))

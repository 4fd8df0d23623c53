"""Tensors as plain memory: without a graph or a class of their own."""

from __future__ import annotations

import torch


def is_of_export(value: torch.Tensor) -> bool:
    """Whether torch exports a forward with it: it stands for a dense tensor, and has no numbers."""
    return type(value).__module__.startswith("torch._subclasses.")


def to_plain(value: torch.Tensor) -> torch.Tensor:
    """The same numbers without a graph, a class of their own, or a conjugate or negative that is still to be taken."""
    plain = value.detach()
    return (plain if is_of_export(plain) else plain.as_subclass(torch.Tensor)).resolve_conj().resolve_neg()


def view_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor's values in their order, (bytes,), uint8, on its device; a view where possible."""
    plain = to_plain(value).contiguous()
    # With a single entry any strides count as contiguous, and a stride of 0 can't be viewed as another dtype.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)

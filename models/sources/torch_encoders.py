"""torch's own encoders, kept on dense tensors: where rows are padded, ``nn.TransformerEncoder`` makes nested ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def keep_dense(module: nn.Module) -> None:
    """Have all encoders in a module take their plain path, where every layer has a dense tensor for hooks to see.

    What such an encoder returns stays what it was: 0 at the positions that only pad a row.
    """
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder) and part.layers and getattr(part, "use_nested_tensor", False):
            part.use_nested_tensor = False
            part.layers[-1].register_forward_hook(_zero_padding, with_kwargs=True)


def _zero_padding(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """The last layer's output as a nested tensor would be filled up behind it.

    None where torch makes no nested tensor: with a mask of its own, for a graph, for a row whose padding is not last.
    """
    mask = kwargs.get("src_key_padding_mask")
    if mask is None or kwargs.get("src_mask") is not None or output.ndim != 3:
        return None
    if layer.training or (torch.is_grad_enabled() and output.requires_grad):
        return None
    padding = mask != 0  # the encoder makes any mask one to be added
    is_last = (padding[:, :-1] <= padding[:, 1:]).all(1, keepdim=True)
    return output.masked_fill((padding & is_last).unsqueeze(-1), 0.0)

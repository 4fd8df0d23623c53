"""Models whose own forward computes in a lower precision than their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Mixed(nn.Module):
    """All of it in bfloat16, but for the norm, which autocast leaves in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.first = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.first(self.norm(x)).relu())


class Nested(nn.Module):
    """A part in float16 within one in bfloat16, by a decorator, around one in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(64, 64)
        self.full = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            x = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                x = self.full(x.float())
        return self.norm(x)


class Checkpointed(nn.Module):
    """Its norm runs again in the backward, under the autocast that the forward ran in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = checkpoint(lambda x: self.norm(x).tanh(), x, use_reentrant=False)
            return self.head(x).float()


class Attention(nn.Module):
    """Queries, keys and values in float32, which the kernel gets in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.num_heads = 4
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x).unflatten(-1, (4, 8)).transpose(1, 2) * 3
        return functional.scaled_dot_product_attention(q, q.roll(1, 2), q).transpose(1, 2).flatten(2)


class Attending(nn.Module):
    """An attention within autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.attention(x).float().mean(1)

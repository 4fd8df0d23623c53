"""Models of whose kernels torch chooses others where hooks, gradients or another order of memory are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Raised(nn.ReLU):
    """A ReLU that torch's fused layer takes for a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.25


ACTIVATIONS = {"tanh": nn.GELU("tanh"), "raised": Raised(), "relu": nn.ReLU()}


class Encoder(nn.Module):
    """torch's own encoder, whose rows may be padded."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, activation=ACTIVATIONS[activation], batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.encoder(x * 3, src_key_padding_mask=pad)


class Turned(nn.Module):
    """Parts that return a turned view, every other token, or one token for all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(3, 33, 4, 4)
        self.part = nn.Identity()
        self.norm = nn.LayerNorm(33)
        self.first = nn.Linear(33, 50)
        self.head = nn.Linear(50, 7)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.part(self.conv(x).flatten(2).transpose(1, 2))
        some = self.part(tokens[:, ::2])
        wide = self.first(some)
        one = self.part(self.norm(tokens).mean(1)[:, None].expand(-1, 5, -1))
        turned = self.part((one @ self.first.weight.T).transpose(1, 2))
        out: Tensor = self.head(wide.mean(1)) + turned.sum((1, 2))[:, None]
        return out + (some @ self.first.weight.T).sum((1, 2))[:, None]


class Biased(nn.Module):
    """Attention with a bias, and a product with a vector, both of what it computes: kernels look at their gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.early = nn.Linear(16, 16)
        self.bias = nn.Linear(16, 17)
        self.late = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(x)
        bias = self.bias(x)[:, None]
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        x = functional.scaled_dot_product_attention(q, q, q, attn_mask=bias).transpose(1, 2).flatten(2)
        out: Tensor = self.late(x)
        return out.mean(1)

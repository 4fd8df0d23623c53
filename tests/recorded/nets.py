"""Small modules of torch alone; this file is copied beside a configuration that names them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Cnn(nn.Module):
    """Convolutions, a ReLU in place that runs three times, and a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.stem(image)))
        out = self.conv2(self.relu(self.conv1(x)))
        out += x
        scores: Tensor = self.head(self.relu(self.norm2(out)).mean((2, 3)))
        return scores


class Overwriting(nn.Module):
    """Writes to what it needs for gradients, so that it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.linear(x))
        out += x
        return out


class Attention(nn.Module):
    """Attention of several heads by torch's kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        out: Tensor = self.proj(y)
        return out


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Vit(nn.Module):
    """A class token and 4 x 4 patches of 8 pixels."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 6)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        scores: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return scores


class Encoder(nn.Module):
    """torch's transformer encoder over five tokens of eight numbers, the first of them the class token."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(x)[:, 0])
        return scores


class Repeats(nn.Module):
    """Calls one layer three times, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.step(x))
        return x


class Branches(nn.Module):
    """A dictionary of tensors, a tuple, a list and what is none of them."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": x + 1, "pair": (x * 2, x.sin()), "more": [{"deep": x.cos()}], "index": x.argmax(-1), "n": 3}


class Structured(nn.Module):
    """Holds a part that returns nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.branches = Branches()

    def forward(self, x: Tensor) -> dict[str, Any]:
        out: dict[str, Any] = self.branches(self.linear(x))
        return out


class Pair(nn.Module):
    """Two inputs by name: numbers and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.linear = nn.Linear(4, 3)
        self.gate = Gate()

    def forward(self, *, numbers: Tensor, kind: Tensor) -> Tensor:
        out: Tensor = self.gate(self.linear(numbers), gate=self.embed(kind))
        return out


class Gate(nn.Module):
    """One input by position, one by name."""

    def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()


class Centred(nn.Module):
    """Each row loses the mean of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        out: Tensor = self.act(x - x.mean(0))
        return out


class Recurrent(nn.Module):
    """An LSTM over six steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class Touchy(nn.Module):
    """Raises where an input is above a thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.amax() > 1000:
            raise ValueError("too large")
        out: Tensor = self.linear(x)
        return out


class Broken(nn.Module):
    """Can't be built."""

    def __init__(self) -> None:
        super().__init__()
        raise RuntimeError("this one is broken")

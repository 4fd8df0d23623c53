"""Modules that take what goes in by other names, dtypes, axes and masks than most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Time64(nn.Module):
    """All in float64, as a time stamp needs it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(1, 4)
        self.double()

    def forward(self, t: Tensor) -> Tensor:
        return self.lin(t - t.floor())


class Energy64(nn.Module):
    """Large float64 energies of atoms, of which a small sum is left."""

    def __init__(self) -> None:
        super().__init__()
        energies = [-10000.013, -10000.021, -9999.987, -10000.034, -10000.001]
        self.register_buffer("energies", torch.tensor(energies, dtype=torch.float64))

    def forward(self, z: Tensor) -> Tensor:
        return torch.as_tensor(self.energies)[z].sum(1, keepdim=True) + 5e4


class Seconds(nn.Module):
    """No weights that could tell a dtype: only the input's own does."""

    def forward(self, t: Tensor) -> Tensor:
        return t - t.floor()


class Fractions(nn.Module):
    """The squares of what is behind the point, summed."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.floor()).square().flatten(1).sum(1, keepdim=True)


class Offset(nn.Module):
    """Weights in float32 beside a buffer in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 3)
        self.register_buffer("offset", torch.tensor(1e-3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + torch.as_tensor(self.offset).to(x.dtype)


class Sound(nn.Module):
    """Either of two kinds of input, which are computed with differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 3)

    def forward(self, mel: Tensor | None = None, wav: Tensor | None = None) -> Tensor:
        return self.lin(mel) if mel is not None else self.lin(torch.as_tensor(wav)) * 10


class Picture(nn.Module):
    """One input whose name nobody has to know, and options."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(8, 3)

    def forward(self, img: Tensor, scale: float = 2.0) -> Tensor:
        return self.lin(img) * scale


class Wrapped(nn.Module):
    """Hands on whatever it gets, as DataParallel and averaged models do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Sound()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.as_tensor(self.module(*args, **kwargs))


class Tokens(nn.Module):
    """Tokens with a mask: mixes those that count, then halves them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.halve = nn.Linear(4, 6), nn.Conv1d(6, 6, 2, 2)

    def forward(self, values: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(values.dtype)
        tokens: Tensor = self.embed(values)
        tokens = tokens + (tokens * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return torch.as_tensor(self.halve(tokens.mT).mT)


class Sequence(nn.Module):
    """Takes time on axis 0, where rows come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


class Turned(Sequence):
    """The same where the axes are moved before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1))

"""Models that raise, and models that leave nothing to pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Empty(nn.Module):
    """Layers that always return no token, and attention without a query."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.boxes = nn.Linear(8, 4)
        self.none_asked = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        token = self.first(x)[:, None]
        none = token[:, :0]
        boxes = self.boxes(none)
        asked = self.none_asked(none, token, token)[0]
        return token.sum((1, 2)) + boxes.sum() + asked.sum()


class Picky(nn.Module):
    """Refuses large values in one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.check = Check()

    def forward(self, x: Tensor) -> Tensor:
        return self.check(self.first(x))


class Check(nn.Module):
    """The layer that does."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            raise ValueError(f"values of {x.shape[1]} features\nare too large, see /srv/model/readme.txt")
        return x


SPOILT: list[bool] = []  # where nobody puts it back


class Spoilt(nn.Module):
    """Takes everything until it has seen a certain number, and nothing from then on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.amax()) == 12345:
            SPOILT.append(True)
        return self.first([x][len(SPOILT)])


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: type[Exception]) -> Tensor:
        ctx.kind = kind
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.kind("of its own backward")


class OwnBackward(nn.Module):
    """Has a backward that raises, whatever it is given."""

    def __init__(self, error: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.kind = {"ValueError": ValueError, "RuntimeError": RuntimeError}[error]

    def forward(self, x: Tensor) -> Tensor:
        return _Backward.apply(self.first(x), self.kind)


class OnlyWithoutGraph(nn.Module):
    """Raises in every forward that keeps a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.requires_grad:
            raise IndexError("no graph here")
        return x


class _Sealed(Tensor):
    """A tensor that nobody may copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.detach, Tensor.clone):
            raise IndexError("sealed")
        return super().__torch_function__(func, types, args, kwargs or {})


class Sealing(nn.Module):
    """Hands on a tensor that hooks can't read where values are large, and makes do without what raises."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.seal = Seal()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        try:
            return self.seal(x) * 1
        except Exception:
            return x


class Seal(nn.Module):
    """The layer that seals."""

    def forward(self, x: Tensor) -> Tensor:
        return x.as_subclass(_Sealed) if bool((x > 100).any()) else x * 1

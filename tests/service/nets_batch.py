"""Models that can be held up while requests pile up behind them. Each class is a ``python:`` factory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.nets import Mean
from tests.service.nets_http import Gated, Log, peek

LIMIT = 1000  # the survey's noise is far below
TOO_MUCH = 2**46  # numbers: more than an address can reach


class Tower(Gated):
    """Feature maps, tokens with their rows on axis 1, a table without rows, a mean over all rows, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 48)
        self.conv = nn.Conv2d(3, 24, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.LayerNorm(24)
        self.table = Table(24)
        self.mean = Mean()
        self.tail = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.act(self.conv(super().forward(x).unflatten(1, (3, 4, 4))))
        tokens = self.norm(maps.flatten(2).permute(2, 0, 1))
        tokens = tokens + self.table(tokens)
        self.mean(maps)
        return self.tail(tokens.mean(0))


class Table(nn.Module):
    """A parameter, whatever comes in."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(1, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.values


class Stages(Gated):
    """Three parts one after the other; notes which of them began, and with how many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.middle, self.late = (nn.Linear(3, 3) for _ in range(3))
        self.ran = Log()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for name in ("early", "middle", "late"):
            self.ran.append((name, len(x)))
            x = getattr(self, name)(x)
        return x


class Hungry(Gated):
    """Needs memory by the first number of each row, at least 1; where ``room`` is less, the allocator says no."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = Log()

    @property
    def room(self) -> float:
        return self.rooms[-1] if self.rooms else 1e9

    @room.setter
    def room(self, room: float) -> None:
        self.rooms.append(room)

    def forward(self, x: Tensor) -> Tensor:
        if sum(max(number, 1.0) for number in peek(x)) > self.room:
            self.forwards.append(len(x))
            torch.empty(TOO_MUCH)
        return super().forward(x)


class Moody(Gated):
    """What a row's first number does, from ``LIMIT`` on: raise an error, leave the end out, return another shape."""

    SAID = "of the model /secret/path at 0x7f00deadbeef"
    RAISED = RuntimeError(SAID), ValueError(SAID), IndexError(SAID)
    LEAVES_OUT, CUTS = LIMIT + len(RAISED), LIMIT + len(RAISED) + 1

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(3, 3)
        self.end = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        marks = [int(mark) for mark in peek(x) if mark >= LIMIT]
        x = super().forward(x)
        for mark in marks:
            if mark < self.LEAVES_OUT:
                raise self.RAISED[mark - LIMIT]
        if self.LEAVES_OUT in marks:
            return x
        x = self.late(x)
        return self.end(x[:, ::2] if self.CUTS in marks else x)


class Fragile(Gated):
    """By a row's first number: no kernel can be started, the driver has no memory, or from then on nothing works."""

    ODD, FULL, ASSERTS = (LIMIT + number for number in range(3))

    def __init__(self) -> None:
        super().__init__()
        self.broken = Log()

    def forward(self, x: Tensor) -> Tensor:
        marks = set(peek(x))
        out = super().forward(x)
        if self.ASSERTS in marks:
            self.broken.append(self.ASSERTS)
        if self.broken or self.ODD in marks:
            raise torch.AcceleratorError("CUDA error: asserted")
        if self.FULL in marks:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return out

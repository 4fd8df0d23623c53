"""Models whose rows meet: by a share of a mean, a flag, a peak, a read, an order, or for rare values only."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """A linear layer with the weights of a seed, and a part to look at."""

    def __init__(self, outputs: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.tap = nn.Linear(8, outputs), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.tap(self.a(x))


class Mixes(Linear):
    """A share of the batch's mean that half precision takes for rounding."""

    def __init__(self, share: float = 0.02) -> None:
        super().__init__(64)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y + self.share * y.mean(0, keepdim=True)


class Flag(Linear):
    """A flag over all rows, which no noise of a survey sets."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.tap((x > 1e5).any())


class Read(Linear):
    """A number that Python reads, by a way that is no operation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(x.numpy().clip(0, 1).max())


class Floor(Linear):
    """Decibels of a spectrum above a floor that the batch's peak sets, as torchaudio's ``top_db``."""

    def forward(self, x: Tensor) -> Tensor:
        decibels = 10 * x.abs().clamp(min=1e-10).log10()
        return torch.maximum(decibels, decibels.amax() - 30)


class Sorted(nn.Module):
    """Sorts a batch by length, as for packed sequences; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(1000, 8, padding_idx=0)
        self.gru, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        order = (ids != 0).sum(1).argsort(descending=True, stable=True)
        y: Tensor = self.gru(self.table(ids[order]))[0].mean(1)
        return self.head(y)[order.argsort()]


class Late(Linear):
    """Large numbers come from the row before: no survey of noise shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.where(x > 1e5, x.roll(1, 0), x))


class Many(Linear):
    """Another way for more rows than any survey runs."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return 1.5 * y if len(x) > 3 else y


class Gate(Linear):
    """Experts: a row's own, chosen by its numbers, computed for all rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for chosen, expert in ((x[:, 0] > 0, self.a), (x[:, 0] <= 0, self.b)):
            rows = chosen.nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out

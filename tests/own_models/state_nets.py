"""Models that keep something, for a while or for good: in lists, flags, weights, tables, helpers and closures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


def draw_weights(module: nn.Module) -> None:
    """Give a module weights of its own generator: another model's dropout may use torch's meanwhile."""
    generator = torch.Generator().manual_seed(0)
    for each in module.parameters():
        nn.init.uniform_(each, -0.35, 0.35, generator=generator)


class Two(nn.Module):
    """Two linear layers with the weights of a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        draw_weights(self)
        self.prepare()

    def prepare(self) -> None:
        """Add what the model keeps."""


class Seen(Two):
    """A list that is emptied at the end of a forward."""

    def prepare(self) -> None:
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.a(x))
        out: Tensor = self.b(self.seen[-1]) + torch.stack(self.seen).mean(0)
        self.seen.clear()
        return out


class Raises(Seen):
    """The same, and some inputs are refused in its midst."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        self.seen.append(out)
        if x.amax() > 1000:
            raise ValueError("too large")
        out = self.b(torch.stack(self.seen).mean(0))
        self.seen.clear()
        return out


class Swap(Two):
    """Averaged weights, while half of the forward runs."""

    def prepare(self) -> None:
        self.register_buffer("ema", 0.5 * self.a.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        plain = self.a.weight.data
        self.a.weight.data = self.get_buffer("ema")
        h: Tensor = self.b(self.a(x))
        self.a.weight.data = plain
        return h + self.a(x)


class Overwritten(Swap):
    """The same, written into the weights' own memory and back."""

    def forward(self, x: Tensor) -> Tensor:
        plain = self.a.weight.data.clone()
        self.a.weight.data.copy_(self.get_buffer("ema"))
        h: Tensor = self.b(self.a(x))
        self.a.weight.data.copy_(plain)
        return h + self.a(x)


class Slope(Two):
    """A setting of one of torch's layers, and a part of a list, that are others for half of the forward."""

    def prepare(self) -> None:
        self.parts = nn.ModuleList([self.a, nn.LeakyReLU(0.1)])
        self.other = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.other.weight)

    def forward(self, x: Tensor) -> Tensor:
        part, self.parts[0], self.parts[1].negative_slope = self.parts[0], self.other, 0.9
        h: Tensor = self.b(self.parts[1](part(x)) + self.parts[0](x))
        self.parts[0], self.parts[1].negative_slope = part, 0.1
        return h + self.parts[1](self.a(x))


class Settles(Two):
    """A part that the first forward replaces by one with fewer parts."""

    def prepare(self) -> None:
        self.part: nn.Module = nn.Sequential(nn.Identity(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.part, nn.Sequential):
            self.part = self.part[1]
        out: Tensor = self.b(self.part(self.a(x)))
        return out


class Hooked(Two):
    """A hook and another forward of a part, for half of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        handle, plain = self.a.register_forward_hook(lambda part, given, out: 2 * out), self.b.forward
        self.b.forward = lambda x: 3 * plain(x)  # type: ignore[method-assign]
        h: Tensor = self.b(self.a(x))
        handle.remove()
        del self.b.forward
        return h + self.b(self.a(x))


class Counted(Two):
    """An array that counts large inputs, which no survey meets."""

    def prepare(self) -> None:
        self.count = np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x)) * float(1 + self.count[0])
        if x.mean() > 5e4:
            self.count[0] += 1
        return y


class Dropped(Two):
    """Dropout that is on for a part of the forward."""

    def prepare(self) -> None:
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.drop(self.a(x)))
        self.drop.train()
        self.drop(self.a(x))
        self.drop.eval()
        return y


class Memory:
    """A helper that is no module."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}


class Helper(Two):
    """A helper object keeps what came in."""

    def prepare(self) -> None:
        self.memory = Memory()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.memory.values.setdefault("kept", [])
        kept.append(x)
        return self.b(self.a(torch.stack(kept).sum(0)))


class Closed(Two):
    """A closure counts calls."""

    def prepare(self) -> None:
        self.count = counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.count()


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Counts(Two):
    """An array of numpy that is written to."""

    def prepare(self) -> None:
        self.counts = np.zeros(1, np.float32)

    def forward(self, x: Tensor) -> Tensor:
        self.counts += 1
        return self.b(self.a(x)) * float(self.counts[0])


class Latch(Two):
    """An outlier changes the model for good."""

    def prepare(self) -> None:
        self.register_buffer("limit", torch.tensor(1e4))
        self.latched = False

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().amax()) > float(self.get_buffer("limit")):
            self.latched = True
            self.get_buffer("limit").mul_(2)
        out: Tensor = self.b(self.a(x))
        return -out if self.latched else out


class Backwards(Two):
    """A counter and a running mean in the backward."""

    def prepare(self) -> None:
        self.scale = 1.0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        if h.requires_grad:
            h.register_hook(self.count)
        return self.b(h) * self.scale + self.get_buffer("mean")

    def count(self, gradient: Tensor) -> None:
        self.scale += 1
        self.get_buffer("mean").add_(gradient.mean(0))


class Double(Two):
    """Another default dtype, for a part of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        h = self.a(x)
        out: Tensor = self.b(h)
        torch.set_default_dtype(torch.float32)
        return out + torch.zeros(8)


class Table(nn.Module):
    """A table of positions that is kept by the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)
        draw_weights(self)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        if self.table is None or len(self.table) != x.shape[1]:
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            angles = torch.stack([rows, columns], -1).reshape(-1, 2, 1) * torch.tensor([1.0, 0.3])
            self.table = torch.cat([angles.sin(), angles.cos()], -1).reshape(-1, 8)
        return self.head((x + self.table).relu().mean(1))

"""Models that take another way for other inputs, and parts whose output is read where no hook is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.oracle import seeded

GLOBAL: dict[str, Tensor] = {}  # as scripts gather features


class Two(NamedTuple):
    """A result with names."""

    values: Tensor
    mean: Tensor


class Part(nn.Module):
    """A part that does what it is given."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor, b: Tensor | None = None, *, high: bool = False) -> Any:
        return self.run(x if b is None else x + b, high)


class Ways(nn.Module):
    """Of an input whose mean is above 1 arguments, names and structures are other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Part(lambda x, high: x * 1.5)
        self.pair = Part(lambda x, high: (x * 2, x.mean()) if high else x * 2)
        self.keyed = Part(lambda x, high: {"b" if high else "a": x + 1})
        self.named = Part(lambda x, high: (x * 3, x.mean()) if high else Two(x * 3, x.mean()))
        self.listed = Part(lambda x, high: [[x + 1], [x] * (3 if high else 2)])
        self.extra = seeded(nn.Linear(8, 8), 1)
        self.head = seeded(nn.Linear(8, 8), 2)

    def forward(self, x: Tensor) -> Tensor:
        high = bool(x.mean() > 1)
        x = self.inner(b=torch.ones_like(x), x=x) if high else self.inner(x)
        x = self.pair(x, high=high)
        x = x[0] if isinstance(x, tuple) else x
        (x,) = self.keyed(x, high=high).values()
        x = self.named(x, high=high)[0]
        (x,), more = self.listed(x, high=high)
        x = x + sum(more)
        return self.head(x if high else self.extra(x))


class Loop(nn.Module):
    """Five turns for an input whose mean is above 1, else two; each runs a block with a part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(seeded(nn.Linear(8, 8), 1), nn.Tanh())
        self.head = seeded(nn.Linear(8, 8), 2)

    def forward(self, x: Tensor) -> Tensor:
        turns = 5 if x.mean() > 1 else 2
        while turns:
            x, turns = torch.relu(self.block(x)) + x, turns - 1
        return self.head(x)


class Halting(nn.Module):
    """Runs until it has converged."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = seeded(nn.Linear(8, 8), 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(50):
            before, x = x, torch.tanh(self.cell(x)) / 2
            if (x - before).abs().max() < 0.05:
                break
        return x


class Counted(nn.Module):
    """Runs a part as often as a number that leaves as an array says: no operation shows that it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = seeded(nn.Linear(8, 8), 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(abs(x.numpy()[0, 0])) + 1):
            x = torch.tanh(self.cell(x))
        return x


class Keeping(nn.Module):
    """A part that keeps what it returns as an attribute of its own; the parts after it read that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = seeded(nn.Linear(8, 8), 1)

    def forward(self, x: Tensor) -> Tensor:
        self.skip = self.linear(x)
        return self.skip


class Kept(nn.Module):
    """Outputs that are read from where they are kept, each in another place."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.itself, self.listed, self.hooked = Keeping(), seeded(nn.Linear(8, 8), 2), seeded(nn.Linear(8, 8), 3)
        self.drop, self.shared, self.classed = nn.Dropout(), seeded(nn.Linear(8, 8), 4), seeded(nn.Linear(8, 8), 5)
        self.outputs: list[tuple[Tensor, str]] = []
        found: dict[str, list[Tensor]] = {"hooked": []}
        self.listed.register_forward_hook(lambda part, args, output: self.outputs.append((output, "listed")))
        self.hooked.register_forward_hook(lambda part, args, output: found["hooked"].append(output))
        self.shared.register_forward_hook(lambda part, args, output: GLOBAL.update(shared=output))
        self.classed.register_forward_hook(lambda part, args, output: setattr(Kept, "last", output))
        self.take = lambda: found["hooked"].pop()

    def forward(self, x: Tensor) -> Tensor:
        y = self.classed(self.shared(self.hooked(self.listed(self.itself(x)))))
        self.before = y
        z = self.drop(y)  # the same tensor: kept before it was this part's output
        kept = [self.itself.skip, self.outputs.pop()[0], self.take(), self.before, GLOBAL["shared"], self.last]
        return torch.stack([x, y, z, *kept], 1)


class Compiled(nn.Module):
    """A compiled function that calls parts, and a compiled module that no attribute registers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = seeded(nn.Linear(8, 8), 1), seeded(nn.Linear(8, 4), 2)
        self.run = torch.compile(self.steps, backend="eager")
        self.hidden = [torch.compile(self.b, backend="eager")]

    def steps(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.run(x))

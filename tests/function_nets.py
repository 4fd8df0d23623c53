"""Networks that compute by functions between calls of their parts, and what these give in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.service.nets_http import Gated, Log


def count_modes() -> int:
    """How many function modes are on in this thread."""
    return torch._C._len_torch_function_stack()


class Halves(nn.Module):
    """Adds to a row what it is from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = Log()

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(count_modes())
        return x + x.flip(1)


class Mixer(nn.Module):
    """In place, several at once, of several tensors, by keyword, under two names; notes which modes are on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.halves, self.last = nn.Linear(4, 8), Halves(), nn.Linear(8, 3)
        self.modes = Log()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += 1
        h = self.halves(h)
        h = functional.relu(h, inplace=True)
        left, right = self.halves(2 * h).split(4, dim=1)
        h = torch.cat([right, left], dim=1)
        h.mul_(0.5)
        h = torch.add(h, h.sigmoid(), alpha=2)
        self.modes.append(count_modes())
        return self.last(h)


def mix(module: Mixer, x: Tensor) -> dict[str, Tensor]:
    """What the functions of a ``Mixer`` take and return, by selectors of it as the part ``mixer``."""
    with torch.no_grad():
        first = module.first(x)
        added = first + 1
        halved = added + added.flip(1)
        rectified = halved.clamp(min=0)
        again = 2 * rectified + 2 * rectified.flip(1)
        joined = torch.cat([again[:, 4:], again[:, :4]], dim=1)
        return {
            "mixer/add#0": added,
            "mixer/add#0:input": first,
            "mixer.halves#0/add#0": halved,
            "mixer.halves#0/add[1]:input": added.flip(1),
            "mixer/relu#0": rectified,
            "mixer/relu:input": halved,
            "mixer/mul#0": 2 * rectified,
            "mixer.halves/flip": 2 * rectified.flip(1),
            "mixer.halves#1/add#-1": again,
            "mixer/split#0[0]": again[:, :4],
            "mixer/split#0[1]": again[:, 4:],
            "mixer/cat#0": joined,
            "mixer/cat#0[1]:input": again[:, :4],
            "mixer/mul#1": joined * 0.5,
            "mixer/mul#1:input": joined,
            "mixer/sigmoid:output": (joined * 0.5).sigmoid(),
            "mixer/add#1": joined * 0.5 + 2 * (joined * 0.5).sigmoid(),
        }


class Outer(nn.Module):
    """A ``Mixer`` and what goes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x - 1)


class Branches(nn.Module):
    """Adds a second time for rows of large numbers, and multiplies a third time for batches of several."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x = x + 1
        if bool(x.amax() > 100):
            x = x + 2
        for _ in range(len(x)):
            x = x * 0.5
        return x


class GatedMixer(Gated):
    """Computes by functions when its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = Log()

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        h += 1
        h = h * 3
        self.modes.append(count_modes())
        return torch.cat([h, h.tanh()], dim=1)


class InPlace(nn.Module):
    """Writes to a tensor that it has under another name too, and drops what that gives; into one that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = kept = self.first(x)
        h += 1
        torch.relu_(h)
        if torch.is_grad_enabled():  # which torch has not with ``out``
            doubled = h * 2
        else:
            torch.mul(h, 2, out=(doubled := torch.empty_like(h)))
        rectified = nn.ReLU()(kept - doubled.sin())
        return self.last(functional.relu(rectified * doubled) + kept)

    def compute(self, x: Tensor, edit: Callable[[str, Tensor], Tensor]) -> Tensor:
        """The same by functions that write nowhere; ``edit`` gives what goes on of what a function takes or returns."""
        h = edit("relu#0", edit("add#0", edit("add#0:input", self.first(x)) + 1).relu())
        doubled = edit("mul#0", h * 2)
        rectified = edit("relu#1", edit("relu#1:input", h - doubled.sin()).relu())
        return self.last(edit("add#1", edit("relu#2", (rectified * doubled).relu()) + h))

"""Models whose forwards a test can hold up or make fail. Each class is a ``python:`` factory."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from concurrent.futures import CancelledError
from logging import getLogger
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

PATIENCE_S = 60


class Log(Sequence[Any]):
    """Notes that stay as forwards leave them: they are kept outside, since what is in a model is put back.

    They are kept on a logger, for fingerprints count what a forward may read: notes elsewhere would make another model.
    """

    __slots__ = ()

    def __init__(self) -> None:
        vars(getLogger("tests.notes"))[f"{id(self)}"] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Log:
        return Log()

    @property
    def _own(self) -> list[Any]:
        return vars(getLogger("tests.notes"))[f"{id(self)}"]

    def __getitem__(self, index: Any) -> Any:
        return self._own[index]

    def __len__(self) -> int:
        return len(self._own)

    def __eq__(self, other: object) -> bool:
        return self._own == (other._own if isinstance(other, Log) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._own)

    def append(self, value: Any) -> None:
        self._own.append(value)

    def clear(self) -> None:
        self._own.clear()


def peek(x: Tensor) -> list[float]:
    """The first number of each row, as a kernel reads it: rows whose numbers Python reads run alone."""
    rows = x.detach().contiguous()
    numbers = (ctypes.c_float * rows.numel()).from_address(rows.data_ptr())
    return list(numbers[:: rows[0].numel()])


class Scores(nn.Module):
    """A linear layer of rows of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Gated(Scores):
    """Runs only while its gate is open, and notes how many rows each forward had."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Event()
        self.gate.set()
        self.entered = Event()
        self.forwards = Log()

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.append(len(x))
        self.entered.set()
        if not self.gate.wait(PATIENCE_S):
            raise TimeoutError("nobody opened the gate")
        return super().forward(x)


class Touchy(Scores):
    """Raises the error whose number, beyond ``LIMIT``, is the largest entry of its input."""

    LIMIT = 1000

    def forward(self, x: Tensor) -> Tensor:
        largest = int(x.amax())
        if largest >= self.LIMIT:
            raise ERRORS[largest - self.LIMIT]
        return super().forward(x)


class Thirds(nn.Module):
    """Answers with a third, in a tensor that it makes in its forward and whose dtype it leaves to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        third = torch.full((1,), 1 / 3)
        return self.out(third.float().expand(len(x), 4))


class Same(nn.Module):
    """Answers zeros, whatever it is shown: its head is not trained yet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).mean((2, 3)))


class ChannelMeans(Same):
    """Answers with means over rows and pixels: no tensor has an entry for each row, so there is no embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((0, 2, 3))


class TwoInputs(nn.Module):
    """Takes its inputs by name: one of floats and one of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.linear = nn.Linear(4, 3)

    def forward(self, *, pixels: Tensor, kind: Tensor) -> dict[str, Tensor]:
        a, b = self.linear(pixels), self.embed(kind)
        return {"sum": a + b, "product": a * b}


class Patches(nn.Module):
    """Patches of 4 pixels with attention among them, of a picture of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, stride=4)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.embed(x).flatten(2).transpose(1, 2))
        tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        return self.head(tokens.mean(1))


class Branches(nn.Module):
    """Runs a layer for wide pictures only, and another one twice for these."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 4, 1)
        self.wide = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(x)
        if x.shape[3] > 16:
            x = self.wide(self.wide(x))
        return x.mean((2, 3))


class Never(nn.Module):
    """Can't be built."""

    def __init__(self) -> None:
        raise RuntimeError("/secret/path: no such file, object at 0x7f00deadbeef")


ERRORS = (
    RuntimeError("of the model"),
    ValueError("of the model"),
    MemoryError("of the model"),
    StopIteration("of the model"),
    OSError(2, "no such file", "/secret/path"),
    SystemExit(3),
    KeyboardInterrupt("of the model"),
    CancelledError("of the model"),
    asyncio.CancelledError("of the model"),
)


class Cnn(nn.Module):
    """Convolutions with ReLU modules, the mean over pixels, scores of five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(inplace=True), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class FunctionalRelu(nn.Module):
    """Its ReLU is a function, which no hook of a module sees."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


class PartlyGuided(FunctionalRelu):
    """One ReLU is a part; another is made in the forward of a part, a third is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(self.conv, nn.ReLU(), InlineRelu())


class InlineRelu(nn.Module):
    """Makes a ReLU in each forward, which is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.ReLU()(self.conv(x))


class Undifferentiable(FunctionalRelu):
    """Scores of pictures that have no gradient there."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Entries(nn.Module):
    """Takes a dictionary of ids and a mask, and a scale beside it; one id must be there, as an image's token is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor], scale: Tensor) -> Tensor:
        if not bool((batch["ids"] == IMAGE_TOKEN).sum(1).eq(2).all()):
            raise ValueError("each row has two image tokens")
        weights = batch["mask"][..., None] * scale[:, None, None]
        return self.head((self.table(batch["ids"]) * weights).sum(1))


IMAGE_TOKEN = 49


class Siamese(nn.Module):
    """Puts two inputs of a row through one body, all first ones before all second ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.body(torch.cat([a, b])).chunk(2)
        return torch.cosine_similarity(left, right)


class Stacked(Siamese):
    """The same, which returns what the body does."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.body(torch.cat([a, b]))
